"""Lists the image files in a folder, and their classes."""

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
from letkd.data.pictures import SUFFIXES, printable, read_picture
from letkd.data.workers import in_workers
from letkd.errors import DataError, nearest
from letkd.progress import bar, say

CHUNK = 64


@dataclass(frozen=True)
class Listing:
    """Image files and their classes.

    Args:
        root: the folder that `paths` are relative to.
        classes: names of the classes, including those without images.
        paths: paths of the files, encoded.
        lengths: sizes of the files in bytes.
        owners: for each file, the index of its class in `classes`.
        foreign: files that are not images by their names; they are ignored.
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
        """The listing of only the files at the indices `kept`."""
        return replace(
            self,
            paths=tuple(self.paths[i] for i in kept),
            lengths=tuple(self.lengths[i] for i in kept),
            owners=tuple(self.owners[i] for i in kept),
        )


def list_classes(root: Path, folder: Path) -> Listing:
    """The classes in `folder`, one per sub-folder, sorted by name, and the files of each at any depth, sorted by path.

    Args:
        root: the folder that the files' paths are relative to.
    """
    classes, strays = [], []
    for entry in sorted(_entries(folder), key=lambda entry: os.fsencode(entry.name)):
        if _leads_to_folder(entry):
            classes.append(entry.name)
        else:
            strays.append(entry.name)
    if not classes:
        images = sum(name.lower().endswith(SUFFIXES) for name in strays)
        loose = f"; the {images} image(s) in it are in no class folder" if images else ""
        raise DataError(f"{printable(folder)} has no sub-folders{loose}: a tree of images has one folder per class")
    paths, lengths, owners, foreign = [], [], [], [printable(folder / name) for name in strays]
    for c, name in enumerate(classes):
        for path, length in sorted(files_below(folder / name)):
            if path.lower().endswith(tuple(map(os.fsencode, SUFFIXES))):
                paths.append(os.path.relpath(path, os.fsencode(root)))
                lengths.append(length)
                owners.append(c)
            else:
                foreign.append(printable(path))
    return Listing(root, tuple(classes), tuple(paths), tuple(lengths), tuple(owners), tuple(foreign))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if not entry.name.startswith(".")]  # .DS_Store and the like
    except OSError as error:
        raise DataError(f"the folder {printable(folder)} cannot be read ({error.strerror})") from error


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # circular links
        return entry.is_dir()
    return False


def folder_names(folder: Path) -> list[str]:
    """Names of the sub-folders, also of linked ones, sorted."""
    return sorted(entry.name for entry in _entries(folder) if _leads_to_folder(entry))


def files_below(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Files and their sizes, at any depth; a broken link counts as a file of size 0, so that reading it raises an error."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):  # links to folders may be circular
            yield from files_below(Path(entry.path))
            continue
        try:
            status = entry.stat()
        except OSError:
            yield os.fsencode(entry.path), 0
            continue
        if stat.S_ISREG(status.st_mode):
            yield os.fsencode(entry.path), status.st_size
        elif stat.S_ISDIR(status.st_mode):  # a link to a folder, which is not followed
            yield os.fsencode(entry.path), 0


def check_files(
    root: Path, paths: Sequence[bytes], *, workers: int, description: str
) -> tuple[dict[int, str], dict[tuple[int, int], int]]:
    """Decode every file. Returns errors by the file's index in `paths`, and the number of files per width and height."""
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
    """The printable class names of `parts["train"]`, and every part as a split whose labels index these classes.

    Args:
        reading: must have a size.
    """
    for part, listing in parts.items():
        if listing.foreign:
            say(f"{name}: {first_few(listing.foreign)} in its {part} part ignored: not an image by its name")
    if reading.corrupt == "skip":
        parts = {part: leave_out_damaged(name, part, listing, reading.workers) for part, listing in parts.items()}
    train = parts["train"]
    empty = train.empty()
    if empty and reading.corrupt == "refuse":
        raise DataError(
            f"{name} has {first_few(empty)} without an image to train on in {printable(train.root)}: fill or remove the class folder(s), "
            "or skip such classes with `data.corrupt=skip`"
        )
    if empty:
        say(f"{name}: {first_few(empty)} left out: no image to train on")
    classes = tuple(c for c in train.classes if c not in set(empty))
    if not classes:
        raise DataError(
            f"{name} has no images to train on in {printable(train.root)}; images are files that end in {' '.join(SUFFIXES)}"
        )
    number = {c: k for k, c in enumerate(classes)}
    splits = {}
    for part, listing in parts.items():
        full = {listing.classes[c] for c in set(listing.owners)}
        unknown = sorted(full - set(classes) - set(empty))
        if unknown:
            raise DataError(
                f"the {part} part of {name} has {first_few(unknown)}, and the training part has no such class "
                f"(nearest: {nearest(unknown[0], classes)})"
            )
        if part != "train" and listing.empty():
            say(f"{name}: {first_few(listing.empty())} has no image in the {part} part")
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
    return tuple(map(printable, classes)), splits


def leave_out_damaged(name: str, part: str, listing: Listing, workers: int) -> Listing:
    """The listing without files that cannot be decoded; a message names these."""
    wrong, _ = check_files(listing.root, listing.paths, workers=workers, description=f"{name}: checking {part}")
    if not wrong:
        return listing
    say(
        f"{name}: {len(wrong)} of {len(listing):,} files of its {part} part cannot be decoded and are left out: "
        + first_few(wrong.values())
    )
    return listing.only([i for i in range(len(listing)) if i not in wrong])


def first_few(names, n: int = 3) -> str:
    """The first `n` names, and the number of the others."""
    names = [printable(name) for name in names]
    return ", ".join(names[:n]) + (f" and {len(names) - n:,} more" if len(names) > n else "")
