"""What there is of a data set, and what is wrong with it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from letkd.data.archives import COUNTS, MD5
from letkd.data.base import READERS, AnySplit, Reading
from letkd.data.download import md5_of
from letkd.data.folder import SIZE, list_tree, need_folder
from letkd.data.imagenet import list_imagenet
from letkd.data.listing import Listing, check_files
from letkd.data.pictures import default_resize, shown
from letkd.data.tiny_imagenet import SIZE as TINY_SIZE
from letkd.data.tiny_imagenet import list_tiny_imagenet
from letkd.errors import DataError, nearest
from letkd.progress import bar


@dataclass
class Part:
    """A split as it was found; `sizes` counts the images of each width and height."""

    name: str
    images: int
    classes: int
    sizes: dict[tuple[int, int], int]
    wrong: list[str] = field(default_factory=list)
    passed_over: int = 0


LISTS = {
    "folder": lambda root: list_tree(need_folder("folder", root, "a tree of images with one folder for each class")),
    "tiny-imagenet": lambda root: list_tiny_imagenet(root)[1],
    "imagenet": lambda root: list_imagenet(root)[1],
}


def check_data(name: str, root: Path | None, *, workers: int = 0) -> list[Part]:
    """Reads all of a data set: files, counts, checksums where they are published; image files are decoded, every one.

    Args:
        workers: processes that decode.
    """
    if name not in READERS:
        raise DataError(f"there is no data set {name!r}; nearest: {nearest(name, READERS)}")
    if name in LISTS:
        lists = LISTS[name](root)
        parts = [_check_files(part, listing, workers) for part, listing in lists.items()]
        for part, listing in zip(parts, lists.values(), strict=True):
            strange = sorted(set(listing.classes) - set(lists["train"].classes))
            part.wrong += [f"the class {shown(c)} of {part.name} is not in train" for c in strange]
    else:
        data = READERS[name](root, Reading())
        parts = [_held(part, split) for part, split in (("train", data.train), ("test", data.test))]
    if name in COUNTS:
        *counts, classes = COUNTS[name]
        for part, n in zip(parts, counts, strict=True):
            if (part.images, part.classes) != (n, classes):
                part.wrong.append(
                    f"{name} has {n:,} images of {classes:,} classes in {part.name}; there are {part.images:,} of {part.classes:,}"
                )
    parts[0].wrong += _sums(root, MD5.get(name, {}))
    return parts


def views(name: str, parts: list[Part], reading: Reading) -> str:
    """What networks get of a data set's image files, in a sentence; nothing for data sets that come without files."""
    if name not in LISTS:
        return ""
    tiny = name == "tiny-imagenet"
    reading = reading.at(TINY_SIZE if tiny else SIZE)
    (h, w), resize = reading.sides, reading.resize or (min(reading.sides) if tiny else None)
    side = resize or default_resize((h, w))
    kept = sum(part.sizes.get((w, h), 0) for part in parts) if side == min(h, w) or resize is None else 0
    scaled = sum(n for part in parts for n in part.sizes.values()) - kept
    how = (
        f"shorter side to {side}" if h == w else f"until they cover {round(h * side / min(h, w))}x{round(w * side / min(h, w))}"
    )
    return f"networks get {h}x{w} (data.size): {kept:,} images as they are, {scaled:,} scaled, {how} (data.resize), and the centre cut out"


def _held(name: str, split: AnySplit) -> Part:
    h, w = split.image_size
    return Part(name, len(split), len(split.labels.unique()), {(w, h): len(split)})


def _check_files(name: str, listing: Listing, workers: int) -> Part:
    broken, sizes = check_files(listing.root, listing.paths, workers=workers, description=f"decoding {name}")
    empty = [f"the class {shown(c)} has no image in {name}" for c in listing.empty()]
    full = len(listing.classes) - len(empty)
    return Part(name, len(listing), full, sizes, [*empty, *broken.values()], len(listing.foreign))


def _sums(root: Path | None, known: dict[str, str]) -> Iterable[str]:
    """The files of these names that are there, in `root` or named by it, and have another checksum."""
    if root is None:
        return []
    places = {name: [root / name, *([root] if root.name == name else [])] for name in known}
    places |= {name: [*places[name], root / Path(name).name] for name in known if root.name == Path(name).parent.name}
    there = {name: next((path for path in paths if path.is_file()), None) for name, paths in places.items()}
    wrong = []
    with bar("checksums", len(there)) as tick:
        for name, path in there.items():
            if path is not None and (found := md5_of(path)) != known[name]:
                wrong.append(f"{shown(path)} has the MD5 {found}, not the published {known[name]}: download it again")
            tick()
    return wrong
