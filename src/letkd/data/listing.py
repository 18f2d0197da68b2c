"""Which image files lie under a folder, and of which class each is."""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from letkd.data.base import Reading
from letkd.data.file_split import FileSplit
from letkd.data.pictures import SUFFIXES, read_picture, shown
from letkd.data.workers import in_workers
from letkd.errors import DataError, nearest
from letkd.progress import bar, say

CHUNK = 64


@dataclass(frozen=True)
class Listing:
    """Image files with the class of each.

    Args:
        root: the folder that `paths` start from.
        classes: names of the classes, those without images included.
        paths: the files, encoded.
        lengths: of the files, in bytes.
        owners: for each file, its class's place in `classes`.
        foreign: files that are no images by their names; they are passed over.
    """

    root: Path
    classes: tuple[str, ...]
    paths: tuple[bytes, ...]
    lengths: tuple[int, ...]
    owners: tuple[int, ...]
    foreign: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def empty(self) -> list[str]:
        """Classes without an image."""
        full = set(self.owners)
        return [name for c, name in enumerate(self.classes) if c not in full]

    def only(self, kept: Sequence[int]) -> "Listing":
        """The files at the places `kept`."""
        return replace(
            self,
            paths=tuple(self.paths[i] for i in kept),
            lengths=tuple(self.lengths[i] for i in kept),
            owners=tuple(self.owners[i] for i in kept),
        )


def list_classes(root: Path, folder: Path) -> Listing:
    """The classes under `folder`, one sub-folder each, sorted by name; the files of each, however deep, sorted likewise.

    Args:
        root: what the files' paths are to start from.
    """
    classes, strays = [], []
    for entry in sorted(_entries(folder), key=lambda entry: os.fsencode(entry.name)):
        if _leads_to_folder(entry):
            classes.append(entry.name)
        else:
            strays.append(entry.name)
    if not classes:
        images = sum(name.lower().endswith(SUFFIXES) for name in strays)
        lie = f"; the {images} image(s) in it lie in no class folder" if images else ""
        raise DataError(f"{shown(folder)} has no sub-folders{lie}: a tree of images has one folder for each class")
    paths, lengths, owners, foreign = [], [], [], [shown(folder / name) for name in strays]
    for c, name in enumerate(classes):
        for path, length in sorted(_files(folder / name)):
            if path.lower().endswith(tuple(map(os.fsencode, SUFFIXES))):
                paths.append(os.path.relpath(path, os.fsencode(root)))
                lengths.append(length)
                owners.append(c)
            else:
                foreign.append(shown(path))
    return Listing(root, tuple(classes), tuple(paths), tuple(lengths), tuple(owners), tuple(foreign))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if not entry.name.startswith(".")]  # .DS_Store and the like
    except OSError as error:
        raise DataError(f"the folder {shown(folder)} cannot be read ({error.strerror})") from error


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link that leads in a circle
        return entry.is_dir()
    return False


def _files(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Files with their lengths; a link that leads nowhere counts as one of no length, so that it is named when it is read."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):  # a link to a folder may lead in a circle
            yield from _files(Path(entry.path))
            continue
        try:
            status = entry.stat()
        except OSError:
            yield os.fsencode(entry.path), 0
            continue
        if stat.S_ISREG(status.st_mode):
            yield os.fsencode(entry.path), status.st_size


def check_files(
    root: Path, paths: Sequence[bytes], *, workers: int, description: str
) -> tuple[dict[int, str], dict[tuple[int, int], int]]:
    """Decodes every file: what is wrong, by the file's place in `paths`; and how many files there are of each width and height."""
    wrong: dict[int, str] = {}
    sizes: dict[tuple[int, int], int] = {}
    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    with bar(description, len(paths)) as tick:
        results = in_workers(partial(_check, root), chunks, workers=workers)
        for k, result in enumerate(results):
            for i, found in enumerate(result, start=k * CHUNK):
                if isinstance(found, str):
                    wrong[i] = found
                else:
                    sizes[found] = sizes.get(found, 0) + 1
            tick(advance=len(result))
    return wrong, sizes


def _check(root: Path, paths: Sequence[bytes]) -> list[str | tuple[int, int]]:
    found: list[str | tuple[int, int]] = []
    for path in paths:
        try:
            found.append(read_picture(root / os.fsdecode(path)).size)
        except DataError as error:
            found.append(str(error))
    return found


def as_splits(name: str, parts: Mapping[str, Listing], reading: Reading) -> tuple[tuple[str, ...], dict[str, FileSplit]]:
    """The classes of `parts["train"]` as they can be printed, and every part as a split with labels in their order.

    Args:
        reading: with a size.
    """
    for part, listing in parts.items():
        if listing.foreign:
            say(f"{name}: {some(listing.foreign)} in its {part} part passed over: no image by its name")
    if reading.corrupt == "skip":
        parts = {part: _whole(name, part, listing, reading.workers) for part, listing in parts.items()}
    train = parts["train"]
    empty = train.empty()
    if empty and reading.corrupt == "refuse":
        raise DataError(
            f"{name} has {some(empty)} without an image to train on in {shown(train.root)}: fill or remove the class folder(s), "
            "or leave such classes out with data.corrupt=skip"
        )
    if empty:
        say(f"{name}: {some(empty)} left out, with no image to train on")
    classes = tuple(c for c in train.classes if c not in set(empty))
    if not classes:
        raise DataError(
            f"{name} has no images to train on in {shown(train.root)}: files count that end in {' '.join(SUFFIXES)}"
        )
    number = {c: k for k, c in enumerate(classes)}
    splits = {}
    for part, listing in parts.items():
        full = {listing.classes[c] for c in set(listing.owners)}
        unknown = sorted(full - set(classes) - set(empty))
        if unknown:
            raise DataError(
                f"the {part} part of {name} has {some(unknown)}, and the training part no such class "
                f"(nearest: {nearest(unknown[0], classes)})"
            )
        if part != "train" and listing.empty():
            say(f"{name}: {some(listing.empty())} has no image in the {part} part")
        labels = np.array([number.get(c, -1) for c in listing.classes], np.int64)[np.array(listing.owners, np.int64)]
        kept = labels >= 0
        splits[part] = FileSplit(
            listing.root,
            np.array(listing.paths, dtype=np.bytes_)[kept],
            np.array(listing.lengths, dtype=np.int64)[kept],
            torch.from_numpy(labels[kept]),
            size=reading.sides,
            resize=reading.resize,
            workers=reading.workers,
        )
    return tuple(map(shown, classes)), splits


def _whole(name: str, part: str, listing: Listing, workers: int) -> Listing:
    wrong, _ = check_files(listing.root, listing.paths, workers=workers, description=f"{name}: checking {part}")
    if not wrong:
        return listing
    say(
        f"{name}: {len(wrong)} of {len(listing):,} files of its {part} part cannot be decoded and are left out: "
        + some(wrong.values())
    )
    return listing.only([i for i in range(len(listing)) if i not in wrong])


def some(names, n: int = 3) -> str:
    """The first few of many names."""
    names = [shown(name) for name in names]
    return ", ".join(names[:n]) + (f" and {len(names) - n:,} more" if len(names) > n else "")
