"""Data sets, in memory or as image files, and the batches made of them."""

from letkd.data import cifar, digits, folder, imagenet, tiny_imagenet  # noqa: F401  (importing a reader's file registers it)
from letkd.data.augment import Augment, CropFlip, ResizedCropFlip, RotateFlip
from letkd.data.base import AnySplit, Dataset, Split, load_data
from letkd.data.files import FileSplit
from letkd.data.loader import Loader
from letkd.data.strong import Strong

__all__ = [
    "AnySplit",
    "Augment",
    "CropFlip",
    "Dataset",
    "FileSplit",
    "Loader",
    "ResizedCropFlip",
    "RotateFlip",
    "Split",
    "Strong",
    "load_data",
]
