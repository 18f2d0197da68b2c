"""ImageNet-1k (ILSVRC2012) from its official folders; files are decoded when they are asked for."""

from pathlib import Path
from typing import Any

import torch

from letkd.data.base import Dataset, Reading, register_data
from letkd.data.folder import MEAN, SIZE, STD, need_folder
from letkd.data.listing import Listing, as_splits, list_classes
from letkd.data.pictures import shown
from letkd.data.wordnet import list_flat, named, read_words
from letkd.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
WHAT = (
    "a folder with train/<wnid>/*.JPEG and val, either with a folder for each class too or with the 50,000 files as they are "
    f"beside {DEVKIT} of the official archives (image-net.org)"
)


def list_imagenet(root: Path | None) -> tuple[Path, dict[str, Listing], dict[str, str]]:
    """The folder, its training and validation images, and the names of the classes as far as they are known."""
    root = need_folder("imagenet", root, WHAT)
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise DataError(f"imagenet was asked from {shown(root)}, which has no folder {part}; it is read from {WHAT}")
    kit = next((folder for folder in (root / DEVKIT / "data", root / "data", root) if (folder / TRUTH).is_file()), None)
    synsets = {} if kit is None else _synsets(kit / "meta.mat")
    words = {wnid: names.split(",")[0] for wnid, names in synsets.values()} or read_words(root / "words.txt")
    if any(entry.is_dir() for entry in (root / "val").iterdir()):
        val = list_classes(root, root / "val")
    elif kit is None:
        raise DataError(
            f"{shown(root / 'val')} has no class folders, and {DEVKIT} with {TRUTH} is not in {shown(root)}; imagenet is read from {WHAT}"
        )
    else:
        val = _list_val(root, kit / TRUTH, synsets)
    return root, {"train": list_classes(root, root / "train"), "test": val}, words


def _synsets(path: Path) -> dict[int, tuple[str, str]]:
    """The development kit's numbers, each with its WordNet id and names. Nothing in such a file can run code."""
    from scipy.io import loadmat

    try:
        table: Any = loadmat(path, squeeze_me=True)["synsets"]
        rows = zip(table["ILSVRC2012_ID"], table["WNID"], table["words"], strict=True)
        return {int(number): (str(wnid), str(words)) for number, wnid, words in rows}
    except Exception as error:  # a damaged file can fail in any way at all
        raise DataError(f"{shown(path)} is not the meta.mat of {DEVKIT} ({shown(str(error)[:200])}); unpack it again") from None


def _list_val(root: Path, truth: Path, synsets: dict[int, tuple[str, str]]) -> Listing:
    """Line k of the ground truth is the number of the class of ILSVRC2012_val_0000000k.JPEG."""
    owners = {}
    for k, line in enumerate(truth.read_text("utf-8", "replace").split(), start=1):
        if not line.isdecimal() or int(line) not in synsets:
            raise DataError(
                f"line {k} of {shown(truth)} is {line[:20]!r}, which is no class of meta.mat: unpack {DEVKIT} again"
            )
        owners[f"ILSVRC2012_val_{k:08d}.JPEG"] = synsets[int(line)][0]
    return list_flat(root, root / "val", owners, truth.name)


@register_data("imagenet")
def read_imagenet(root: Path | None, reading: Reading) -> Dataset:
    """Labels in the order of the sorted WordNet ids; the official validation images are the test split."""
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
