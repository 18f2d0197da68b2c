"""Any tree of images with one folder for each class."""

from pathlib import Path

import torch

from letkd.data.base import Dataset, Reading, register_data, stratified
from letkd.data.listing import Listing, as_splits, list_classes
from letkd.data.pictures import shown
from letkd.errors import DataError
from letkd.progress import say

# Of ImageNet; what networks for photographs are usually fed with.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE = 224
TEST_SHARE = 0.2


def need_folder(name: str, root: Path | None, what: str) -> Path:
    """The folder a data set is to be read from, which must be there."""
    if root is None:
        raise DataError(f"{name} is read from {what}, and no folder was named; name it with `root=FOLDER`")
    if not root.is_dir():
        raise DataError(
            f"{name} was asked from {shown(root)}, which is {'no folder' if root.exists() else 'not there'}; it is read from {what}"
        )
    return root


def list_tree(root: Path) -> dict[str, Listing]:
    """The parts of a tree: `train`, `val` and `test` as far as there are such sub-folders, else all of it as `train`."""
    if not (root / "train").is_dir():
        return {"train": list_classes(root, root)}
    parts = {part: list_classes(root, root / part) for part in ("train", "val", "test") if (root / part).is_dir()}
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
        say(f"{shown(root)}: no test folder, so val is the test split, as with ImageNet")
    return parts


@register_data("folder")
def read_folder(root: Path | None, reading: Reading) -> Dataset:
    """`train`, `val` and `test` with a folder for each class; or one such tree, of which a fifth of each class is the test split."""
    root = need_folder("folder", root, "a tree of images with one folder for each class")
    classes, splits = as_splits("folder", list_tree(root), reading.at(SIZE))
    train = splits["train"]
    if "test" not in splits:
        mask = stratified(train.labels, lambda n: min(int(TEST_SHARE * n + 0.5), n - 1), seed=(0, 0))
        train, splits["test"] = train.subset(~mask), train.subset(mask)
        say(
            f"{shown(root)}: no test folder, so {int(mask.sum()):,} images, a fifth of each class and always the same, are the test split"
        )
    val = splits.get("val", train.subset(torch.arange(0)))
    return Dataset("folder", train, val, splits["test"], classes=classes, mean=MEAN, std=STD, flip=True)
