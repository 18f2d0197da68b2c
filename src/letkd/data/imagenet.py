"""ImageNet-1k (ILSVRC2012) from its official folders; files are decoded on demand."""

from pathlib import Path
from typing import Any

import torch

from letkd.data.base import Dataset, Reading, register_data
from letkd.data.image_folder import MEAN, SIZE, STD, need_folder
from letkd.data.listing import Listing, as_splits, list_classes
from letkd.data.pictures import printable
from letkd.data.wordnet import list_flat, named, read_words
from letkd.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
WHAT = (
    "a folder with train/<wnid>/*.JPEG and val, where val has one folder per class, or the 50,000 files and, next to val, "
    f"{DEVKIT} of the official archives (image-net.org)"
)


def list_imagenet(root: Path | None) -> tuple[Path, dict[str, Listing], dict[str, str]]:
    """The folder, its training and validation images, and the known class names by WordNet id."""
    root = need_folder("imagenet", root, WHAT)
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise DataError(
                f"{printable(root)} has no folder {part}, so imagenet cannot be read from it; imagenet is read from {WHAT}"
            )
    kit = next((folder for folder in (root / DEVKIT / "data", root / "data", root) if (folder / TRUTH).is_file()), None)
    synsets = {} if kit is None else _synsets(kit / "meta.mat")
    words = {wnid: names.split(",")[0] for wnid, names in synsets.values()} or read_words(root / "words.txt")
    if any(entry.is_dir() for entry in (root / "val").iterdir()):
        val = list_classes(root, root / "val")
    elif kit is None:
        raise DataError(
            f"{printable(root / 'val')} has no class folders, and {DEVKIT} with {TRUTH} is not in {printable(root)}; "
            f"imagenet is read from {WHAT}"
        )
    else:
        val = _list_val(root, kit / TRUTH, synsets)
    return root, {"train": list_classes(root, root / "train"), "test": val}, words


def _synsets(path: Path) -> dict[int, tuple[str, str]]:
    """WordNet id and names by the class number of the development kit. Reading such a file cannot run code."""
    from scipy.io import loadmat

    try:
        table: Any = loadmat(path, squeeze_me=True)["synsets"]
        rows = zip(table["ILSVRC2012_ID"], table["WNID"], table["words"], strict=True)
        return {int(number): (str(wnid), str(words)) for number, wnid, words in rows}
    except Exception as error:  # a damaged file can raise any error
        raise DataError(
            f"{printable(path)} is not the meta.mat of {DEVKIT} ({printable(str(error)[:200])}); unpack it again"
        ) from None


def _list_val(root: Path, truth: Path, synsets: dict[int, tuple[str, str]]) -> Listing:
    """Line k of the ground truth is the class number of ILSVRC2012_val_0000000k.JPEG."""
    owners = {}
    for k, line in enumerate(truth.read_text("utf-8", "replace").split(), start=1):
        if not line.isdecimal() or int(line) not in synsets:
            raise DataError(
                f"line {k} of {printable(truth)} is {line[:20]!r}, which is not a class of meta.mat: unpack {DEVKIT} again"
            )
        owners[f"ILSVRC2012_val_{k:08d}.JPEG"] = synsets[int(line)][0]
    return list_flat(root, root / "val", owners, truth.name)


@register_data("imagenet")
def read_imagenet(root: Path | None, reading: Reading) -> Dataset:
    """Labels follow the sorted WordNet ids; the official validation images are the test split."""
    root, parts, words = list_imagenet(root)
    wnids, splits = as_splits("imagenet", parts, reading.at(SIZE))
    train = splits["train"]
    return Dataset(
        "imagenet",
        train,
        train.subset(torch.arange(0)),
        splits["test"],
        classes=named(wnids, words),
        mean=MEAN,
        std=STD,
        flip=True,
    )
