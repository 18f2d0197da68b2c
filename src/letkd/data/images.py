"""Images without labels: every image file in a folder, or matched by a pattern."""

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch

from letkd.batch import UNLABELLED
from letkd.data.base import Dataset, Reading, register_data
from letkd.data.file_split import FileSplit
from letkd.data.image_folder import MEAN, SIZE, STD
from letkd.data.listing import Listing, files_below, first_few, leave_out_damaged
from letkd.data.pictures import SUFFIXES, printable
from letkd.errors import DataError
from letkd.progress import say


def list_images(root: Path | None) -> Listing:
    """Image files in a folder and its sub-folders, or matched by a pattern such as `photos/**/*.jpg`, sorted by path.

    Links to folders in it are not followed.
    """
    if root is None:
        raise DataError("images are read from a folder or a pattern, and none was named; name it with --root (root= in Python)")
    home, found = root, []
    if root.is_dir():
        found = sorted(files_below(root))
    elif glob.has_magic(str(root)):
        parts = root.parts
        home = Path(*parts[: next(k for k, part in enumerate(parts) if glob.has_magic(part))])
        found = sorted(set(_matching(home, parts[len(home.parts) :])))
    elif root.exists():
        raise DataError(
            f"{printable(root)} is a file, and images are read from a folder or a pattern; name one, such as 'photos/*.jpg'"
        )
    else:
        raise DataError(
            f"{printable(root)} does not exist, so images cannot be read from it; name a folder, or a pattern such as 'photos/*.jpg'"
        )
    suffixes = tuple(map(os.fsencode, SUFFIXES))
    kept = [(path, length) for path, length in found if path.lower().endswith(suffixes)]
    if not kept:
        raise DataError(f"{printable(root)} has no images, which are files that end in {' '.join(SUFFIXES)}")
    foreign = tuple(printable(path) for path, _ in found if not path.lower().endswith(suffixes))
    paths = tuple(os.path.relpath(path, os.fsencode(home)) for path, _ in kept)
    return Listing(home, ("images",), paths, tuple(length for _, length in kept), (0,) * len(kept), foreign)


def _matching(folder: Path, pattern: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """Files below a folder and their sizes that match the parts of a pattern, as by `glob`, but links to folders are not followed."""
    part, rest = pattern[0], pattern[1:]
    if part == "**":
        yield from _matching(folder, rest or ("*",))
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        path, is_folder = folder / entry.name, entry.is_dir(follow_symlinks=False)  # links may be circular
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if is_folder and part == "**":
            yield from _matching(path, pattern)
        elif is_folder and rest and fnmatch(entry.name, part):
            yield from _matching(path, rest)
        elif not rest and part != "**" and fnmatch(entry.name, part) and path.is_file():
            yield os.fsencode(path), path.stat().st_size


def read_images(root: Path | None, reading: Reading) -> FileSplit:
    """The images of `list_images` as a split without labels.

    Args:
        reading: must have a size.
    """
    listing = list_images(root)
    if listing.foreign:
        say(f"images: {first_few(listing.foreign)} ignored: not an image by its name")
    if reading.corrupt == "skip":
        listing = leave_out_damaged("images", "train", listing, reading.workers)
    return FileSplit(
        listing.root,
        np.array(listing.paths, dtype=np.bytes_),
        np.array(listing.lengths, dtype=np.int64),
        torch.full((len(listing),), UNLABELLED),
        size=reading.sides,
        resize=reading.resize,
        workers=reading.workers,
    )


@register_data("images")
def read_images_alone(root: Path | None, reading: Reading) -> Dataset:
    """A data set without classes and without a test split; a share of it is held out for validation."""
    train = read_images(root, reading.at(SIZE))
    none = train.subset(torch.arange(0))
    return Dataset("images", train, none, none, classes=(), mean=MEAN, std=STD, flip=True)
