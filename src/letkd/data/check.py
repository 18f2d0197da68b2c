"""`letkd data check`: the files of a data set, and what is wrong with them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from letkd.data.archives import COUNTS, MD5
from letkd.data.base import READERS, AnySplit, Reading, unknown_data
from letkd.data.download import md5_of
from letkd.data.image_folder import SIZE, list_tree, need_folder
from letkd.data.imagenet import list_imagenet
from letkd.data.images import list_images
from letkd.data.listing import Listing, check_files
from letkd.data.pictures import default_resize, printable
from letkd.data.tiny_imagenet import SIZE as TINY_SIZE
from letkd.data.tiny_imagenet import list_tiny_imagenet
from letkd.progress import bar


@dataclass
class Part:
    """The check of one split; `sizes` counts the images per width and height."""

    name: str
    images: int
    classes: int
    sizes: dict[tuple[int, int], int]
    wrong: list[str] = field(default_factory=list)
    ignored: int = 0


LISTS = {
    "folder": lambda root: list_tree(need_folder("folder", root, "a tree of images with one folder per class")),
    "tiny-imagenet": lambda root: list_tiny_imagenet(root)[1],
    "imagenet": lambda root: list_imagenet(root)[1],
    "images": lambda root: {"train": replace(list_images(root), classes=())},
}


def check_data(name: str, root: Path | None, *, workers: int = 0) -> list[Part]:
    """Read a whole data set and check files, counts and published checksums; every image file is decoded.

    Args:
        workers: processes that decode images.
    """
    if name not in READERS:
        raise unknown_data(name)
    if name in LISTS:
        lists = LISTS[name](root)
        parts = [_check_files(part, listing, workers) for part, listing in lists.items()]
        for part, listing in zip(parts, lists.values(), strict=True):
            unknown = sorted(set(listing.classes) - set(lists["train"].classes))
            part.wrong += [f"the class {printable(c)} of {part.name} is not in train" for c in unknown]
    else:
        data = READERS[name](root, Reading())
        parts = [_in_memory(part, split) for part, split in (("train", data.train), ("test", data.test))]
    if name in COUNTS:
        *counts, classes = COUNTS[name]
        for part, n in zip(parts, counts, strict=True):
            if (part.images, part.classes) != (n, classes):
                part.wrong.append(
                    f"{name} has {n:,} images of {classes:,} classes in {part.name}; found {part.images:,} of {part.classes:,}"
                )
    parts[0].wrong += _sums(root, MD5.get(name, {}))
    return parts


def views(name: str, parts: list[Part], reading: Reading) -> str:
    """How the image files of a data set are scaled for networks, in a sentence; empty for data sets without image files."""
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
    return f"networks get {h}x{w} (data.size): {kept:,} images unchanged, {scaled:,} scaled, {how} (data.resize), and centre-cropped"


def _in_memory(name: str, split: AnySplit) -> Part:
    h, w = split.image_size
    return Part(name, len(split), len(split.labels.unique()), {(w, h): len(split)})


def _check_files(name: str, listing: Listing, workers: int) -> Part:
    broken, sizes = check_files(listing.root, listing.paths, workers=workers, description=f"decoding {name}")
    empty = [f"the class {printable(c)} has no image in {name}" for c in listing.empty()]
    full = len(listing.classes) - len(empty)
    return Part(name, len(listing), full, sizes, [*empty, *broken.values()], len(listing.foreign))


def _sums(root: Path | None, known: dict[str, str]) -> Iterable[str]:
    """Messages for the known files, in `root` or `root` itself, that exist and have another checksum."""
    if root is None:
        return []
    candidates = {name: [root / name, *([root] if root.name == name else [])] for name in known}
    candidates |= {name: [*candidates[name], root / Path(name).name] for name in known if root.name == Path(name).parent.name}
    files = {name: next((path for path in paths if path.is_file()), None) for name, paths in candidates.items()}
    wrong = []
    with bar("checksums", len(files)) as tick:
        for name, path in files.items():
            if path is not None and (found := md5_of(path)) != known[name]:
                wrong.append(f"{printable(path)} has the MD5 {found}, not the published {known[name]}: download it again")
            tick()
    return wrong
