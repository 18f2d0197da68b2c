"""Any tree of images with one folder per class."""

from pathlib import Path

import torch

from letkd.data.base import Dataset, Reading, register_data, stratified
from letkd.data.listing import Listing, as_splits, folder_names, list_classes
from letkd.data.pictures import printable
from letkd.errors import DataError
from letkd.progress import say

# Of ImageNet, the usual normalisation for photographs.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE = 224
TEST_SHARE = 0.2
SPLITS = ("train", "val", "test")
SPLITS_ELSEWHERE = {*SPLITS, "training", "valid", "validation", "testing"}  # with capitals, too


def need_folder(name: str, root: Path | None, what: str) -> Path:
    """The folder to read a data set from; raises if it does not exist."""
    if root is None:
        raise DataError(f"{name} is read from {what}, and no folder was named; name it with `root=FOLDER`")
    if not root.is_dir():
        state = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"{printable(root)} {state}, so {name} cannot be read from it; {name} is read from {what}")
    return root


def list_tree(root: Path) -> dict[str, Listing]:
    """The parts of a tree: its sub-folders `train`, `val` and `test`; without a `train` folder, the whole tree as `train`."""
    names = folder_names(root)
    alike = [name for name in names if name.casefold() in SPLITS_ELSEWHERE]
    misnamed = [name for name in alike if name not in SPLITS]
    whole = "train" not in names
    if (misnamed and not whole) or (whole and alike and (names == alike or len(alike) > 1)):
        folder, todo = (misnamed[0], "rename it") if misnamed else (alike[0], "add the folder train")
        raise DataError(
            f"{printable(root)} has the folder {folder!r}, which looks like a split; splits are named train, val and test: {todo}"
        )
    if whole:
        return {"train": list_classes(root, root)}
    if others := [name for name in names if name not in SPLITS]:
        say(
            f"{printable(root)}: {', '.join(map(repr, others[:3]))}{' …' * (len(others) > 3)} ignored: only train, val and test are read"
        )
    parts = {part: list_classes(root, root / part) for part in SPLITS if part in names}
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
        say(f"{printable(root)}: no test folder, so val is used as the test split, as for ImageNet")
    return parts


@register_data("folder")
def read_folder(root: Path | None, reading: Reading) -> Dataset:
    """`train`, `val` and `test` with a folder per class; or one such tree, of which a fifth of each class becomes the test split."""
    root = need_folder("folder", root, "a tree of images with one folder per class")
    classes, splits = as_splits("folder", list_tree(root), reading.at(SIZE))
    train = splits["train"]
    if len(classes) == 1:
        say(
            f"warning: {printable(root)} has only one class, {classes[0]!r}; name the folder that contains the folders of the classes"
        )
    if "test" not in splits:
        mask = stratified(train.labels, lambda n: min(int(TEST_SHARE * n + 0.5), n - 1), seed=(0, 0))
        train, splits["test"] = train.subset(~mask), train.subset(mask)
        say(
            f"{printable(root)}: no test folder, so {int(mask.sum()):,} images, a fixed fifth of each class, are the test split"
        )
    val = splits.get("val", train.subset(torch.arange(0)))
    return Dataset("folder", train, val, splits["test"], classes=classes, mean=MEAN, std=STD, flip=True)
