"""Tiny-ImageNet-200 from its official folder: 200 classes, 64x64, decoded once and kept in memory (1.3 GB)."""

from dataclasses import replace
from pathlib import Path

import torch

from letkd.data.base import Dataset, Reading, register_data
from letkd.data.image_folder import need_folder
from letkd.data.listing import Listing, as_splits, list_classes
from letkd.data.pictures import printable
from letkd.data.wordnet import list_flat, named, read_words
from letkd.errors import DataError

FOLDER = "tiny-imagenet-200"
# The usual normalisation, which the authors use too.
MEAN = (0.4802, 0.4481, 0.3975)
STD = (0.2302, 0.2265, 0.2262)
SIZE = 64


def list_tiny_imagenet(root: Path | None) -> tuple[Path, dict[str, Listing]]:
    """The official folder (`root`, or its sub-folder of the official name), and its training and validation images."""
    what = f"the unpacked {FOLDER}.zip (`letkd data get tiny-imagenet`)"
    root = need_folder("tiny-imagenet", root, what)
    home = root / FOLDER if (root / FOLDER / "train").is_dir() else root
    for part in ("train", "val"):
        if not (home / part).is_dir():
            raise DataError(
                f"{printable(root)} has no folder {part}, so tiny-imagenet cannot be read from it; tiny-imagenet is read from {what}"
            )
    train = list_classes(home, home / "train")
    train = replace(train, foreign=tuple(name for name in train.foreign if not name.endswith("_boxes.txt")))  # official
    return home, {"train": train, "test": _list_val(home)}


def _list_val(home: Path) -> Listing:
    """The validation images by the official annotations; without these, by class folders, into which they are often sorted."""
    notes = home / "val" / "val_annotations.txt"
    if not notes.is_file() or not (home / "val" / "images").is_dir():
        return list_classes(home, home / "val")
    owners = {}
    for k, line in enumerate(notes.read_text("utf-8", "replace").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or "/" in fields[0] or fields[0] in ("", ".", ".."):
            raise DataError(f"line {k} of {printable(notes)} is not a file name, a tab and a class: unpack {FOLDER}.zip again")
        owners[fields[0]] = fields[1]
    return list_flat(home, home / "val" / "images", owners, notes.name)


@register_data("tiny-imagenet")
def read_tiny_imagenet(root: Path | None, reading: Reading) -> Dataset:
    """The official validation images are the test split, as is usual; the official test images have no labels."""
    home, parts = list_tiny_imagenet(root)
    reading = reading.at(SIZE)
    whole = replace(reading, resize=reading.resize or min(reading.sides))  # the images are small, so no margin is cropped
    wnids, splits = as_splits("tiny-imagenet", parts, whole)
    train, test = (splits[part].in_memory(f"tiny-imagenet: decoding {part}") for part in ("train", "test"))
    classes = named(wnids, read_words(home / "words.txt"))
    return Dataset("tiny-imagenet", train, train.subset(torch.arange(0)), test, classes=classes, mean=MEAN, std=STD, flip=True)
