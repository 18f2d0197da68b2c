"""Unlabelled images added to the training images of a data set."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from letkd.batch import UNLABELLED
from letkd.data.base import AnySplit, Dataset, Reading, Split
from letkd.data.file_split import FileSplit
from letkd.data.images import read_images
from letkd.data.joined import Joined
from letkd.data.pictures import printable
from letkd.errors import DataError
from letkd.progress import say

REST = "rest"


def add_unlabelled(data: Dataset, unlabelled: str, rest: AnySplit, reading: Reading) -> Dataset:
    """The data set with unlabelled images after its own training images.

    Args:
        unlabelled: a folder or a pattern, or "rest".
        rest: training images that `fraction` leaves out.
        reading: how the data set's own files are read.
    """
    if unlabelled == REST:
        if not len(rest):
            raise DataError(
                f'unlabelled="rest" means the training images of {data.name} that fraction leaves out, and it leaves out none; lower '
                "data.fraction, or name a folder"
            )
        return replace(data, train=Joined(data.train, without_labels(rest)))
    sized = replace(reading, size=data.image_size, resize=reading.resize or data.train.resize)
    images = read_images(Path(unlabelled).expanduser(), sized)
    if not len(images):
        raise DataError(f"no image of {printable(unlabelled)} can be decoded; name a folder with other images")
    images = leave_out(images, {"test": data.test, "validation": data.val}, unlabelled)
    if not len(images):
        raise DataError(
            f"all images of {printable(unlabelled)} are in the test or validation split of {data.name}; name a folder with other images"
        )
    return replace(data, train=Joined(data.train, images))


def without_labels(split: AnySplit) -> AnySplit:
    """The same images, all without a label."""
    if not isinstance(split, Split | FileSplit):
        raise DataError(f"labels cannot be removed from a {type(split).__name__}")
    return replace(split, labels=torch.full_like(split.labels, UNLABELLED))


def leave_out(images: FileSplit, held_out: dict[str, AnySplit], folder: str) -> AnySplit:
    """The unlabelled images that are not also in a held-out split, compared by bytes; a message says how many are left out.

    Files are compared with files. For splits in memory the images are decoded, kept in memory and compared by their pixels.

    Args:
        held_out: held-out splits by name.
        folder: name of the folder, for the message.
    """
    files = {name: split for name, split in held_out.items() if isinstance(split, FileSplit)}
    pixels = {name: split for name, split in held_out.items() if isinstance(split, Split)}
    found: AnySplit = images
    if files:
        known = _file_digests(list(files.values()), set(images.lengths.tolist()))
        lengths = {length for length, _ in known}
        duplicate = [
            length in lengths and (length, _digest(images.path(i))) in known for i, length in enumerate(images.lengths.tolist())
        ]
        found = _without(images, duplicate, list(files), folder)
    if pixels and isinstance(found, FileSplit):
        decoded = found.in_memory(f"decoding {printable(folder)}")
        known = {_pixels(image) for split in pixels.values() for image in split.images}
        found = _without(decoded, [_pixels(image) in known for image in decoded.images], list(pixels), folder)
    return found


def _without(split: Split | FileSplit, duplicate: list[bool], names: list[str], folder: str) -> Split | FileSplit:
    if n := sum(duplicate):
        say(f"{printable(folder)}: {n:,} images are also {' or '.join(names)} images (equal bytes) and are left out")
    return split.subset(~torch.tensor(duplicate, dtype=torch.bool)) if n else split


def _file_digests(splits: list[FileSplit], lengths: set[int]) -> set[tuple[int, bytes]]:
    """Length and digest of the files whose length is in `lengths`."""
    return {
        (length, _digest(split.path(i)))
        for split in splits
        for i, length in enumerate(split.lengths.tolist())
        if length in lengths
    }


def _digest(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""  # decoding it raises an error that names it


def _pixels(image: Tensor) -> bytes:
    return hashlib.sha256(image.contiguous().numpy().data).digest()
