"""Images alone: every image file in a folder, or that a pattern matches, without labels."""

import glob
import os
from pathlib import Path

import numpy as np
import torch

from letkd.batch import UNLABELLED
from letkd.data.base import Dataset, Reading, register_data
from letkd.data.file_split import FileSplit
from letkd.data.folder import MEAN, SIZE, STD
from letkd.data.listing import Listing, files_below, leave_out_damaged, some
from letkd.data.pictures import SUFFIXES, shown
from letkd.errors import DataError
from letkd.progress import say


def list_images(root: Path | None) -> Listing:
    """Image files below a folder, however deep, or those that a pattern such as `photos/**/*.jpg` matches, sorted by path."""
    if root is None:
        raise DataError("images are read from a folder or a pattern, and none was named; name it with --root (root= in Python)")
    home, found = root, []
    if root.is_dir():
        found = sorted(files_below(root))
    elif glob.has_magic(str(root)):
        parts = root.parts
        home = Path(*parts[: next(k for k, part in enumerate(parts) if glob.has_magic(part))])
        names = (name for name in glob.glob(str(root), recursive=True) if os.path.isfile(name))
        found = sorted((os.fsencode(name), os.stat(name).st_size) for name in names)
    elif root.exists():
        raise DataError(
            f"images were asked from {shown(root)}, which is a file; name a folder, or a pattern such as 'photos/*.jpg'"
        )
    else:
        raise DataError(
            f"images were asked from {shown(root)}, which is not there; name a folder, or a pattern such as 'photos/*.jpg'"
        )
    suffixes = tuple(map(os.fsencode, SUFFIXES))
    kept = [(path, length) for path, length in found if path.lower().endswith(suffixes)]
    if not kept:
        raise DataError(f"{shown(root)} has no images: files count that end in {' '.join(SUFFIXES)}")
    foreign = tuple(shown(path) for path, _ in found if not path.lower().endswith(suffixes))
    paths = tuple(os.path.relpath(path, os.fsencode(home)) for path, _ in kept)
    return Listing(home, ("images",), paths, tuple(length for _, length in kept), (0,) * len(kept), foreign)


def read_images(root: Path | None, reading: Reading) -> FileSplit:
    """The images of `list_images` as a split without labels.

    Args:
        reading: with a size.
    """
    listing = list_images(root)
    if listing.foreign:
        say(f"images: {some(listing.foreign)} passed over: no image by its name")
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
    """A data set without classes: a share of it is held out for validation, and there is no test split."""
    train = read_images(root, reading.at(SIZE))
    none = train.subset(torch.arange(0))
    return Dataset("images", train, none, none, classes=(), mean=MEAN, std=STD, flip=True)
