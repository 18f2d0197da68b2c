"""Images without labels beside those of a data set."""

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
from letkd.data.pictures import shown
from letkd.errors import DataError
from letkd.progress import say

REST = "rest"


def add_unlabelled(data: Dataset, unlabelled: str, rest: AnySplit, reading: Reading) -> Dataset:
    """The data set with more training images, behind its own and without labels.

    Args:
        unlabelled: a folder or a pattern, or "rest".
        rest: training images that the data set leaves out.
        reading: how its own files are read.
    """
    if unlabelled == REST:
        if not len(rest):
            raise DataError(
                f'unlabelled="rest" asks for the training images of {data.name} that fraction leaves out, and it leaves out none; lower '
                "data.fraction, or name a folder"
            )
        return replace(data, train=Joined(data.train, without_labels(rest)))
    sized = replace(reading, size=data.image_size, resize=reading.resize or data.train.resize)
    images = leave_out(
        read_images(Path(unlabelled).expanduser(), sized), {"test": data.test, "validation": data.val}, unlabelled
    )
    if not len(images):
        raise DataError(f"{shown(unlabelled)} has no images but those of the test and the validation split of {data.name}")
    return replace(data, train=Joined(data.train, images))


def without_labels(split: AnySplit) -> AnySplit:
    """The same images, all without a label."""
    if not isinstance(split, Split | FileSplit):
        raise DataError(f"labels cannot be taken from a {type(split).__name__}")
    return replace(split, labels=torch.full_like(split.labels, UNLABELLED))


def leave_out(images: FileSplit, held: dict[str, AnySplit], where: str) -> AnySplit:
    """Images without labels less those that are also in a split that is held out, by their bytes; a line says how many.

    Files are compared with files. For splits in memory the images are decoded, kept in memory and compared by their pixels.

    Args:
        held: splits that are held out, by name.
        where: the folder, for the line.
    """
    files = {name: split for name, split in held.items() if isinstance(split, FileSplit)}
    pixels = {name: split for name, split in held.items() if isinstance(split, Split)}
    found: AnySplit = images
    if files:
        known = _file_digests(list(files.values()), set(images.lengths.tolist()))
        lengths = {length for length, _ in known}
        twice = [
            length in lengths and (length, _digest(images.path(i))) in known for i, length in enumerate(images.lengths.tolist())
        ]
        found = _less(images, twice, list(files), where)
    if pixels and isinstance(found, FileSplit):
        decoded = found.in_memory(f"decoding {shown(where)}")
        known = {_pixels(image) for split in pixels.values() for image in split.images}
        found = _less(decoded, [_pixels(image) in known for image in decoded.images], list(pixels), where)
    return found


def _less(split: Split | FileSplit, twice: list[bool], names: list[str], where: str) -> Split | FileSplit:
    if n := sum(twice):
        say(f"{shown(where)}: {n:,} images are {' or '.join(names)} images too, by their bytes, and are left out")
    return split.subset(~torch.tensor(twice, dtype=torch.bool)) if n else split


def _file_digests(splits: list[FileSplit], lengths: set[int]) -> set[tuple[int, bytes]]:
    """Length and digest of the files that are as long as one of those that they are compared with."""
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
        return b""  # it is named when it is decoded


def _pixels(image: Tensor) -> bytes:
    return hashlib.sha256(image.contiguous().numpy().data).digest()
