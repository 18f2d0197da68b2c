"""Data sets, in memory or as image files, and the batches made of them."""

from letkd.data import cifar, digits, image_folder, imagenet, images, tiny_imagenet  # noqa: F401  (importing a reader's file registers it)
from letkd.data.augment import Augment, Chain, CropFlip, Erase, ResizedCropFlip, RotateFlip
from letkd.data.base import AnySplit, Dataset, Split, load_data, register_data
from letkd.data.file_split import FileSplit
from letkd.data.loader import Loader
from letkd.data.mix import Mix
from letkd.data.policies import RandAugment, TrivialAugment
from letkd.data.strong import Strong

__all__ = [
    "AnySplit",
    "Augment",
    "Chain",
    "CropFlip",
    "Dataset",
    "Erase",
    "FileSplit",
    "Loader",
    "Mix",
    "RandAugment",
    "ResizedCropFlip",
    "RotateFlip",
    "Split",
    "Strong",
    "TrivialAugment",
    "load_data",
    "register_data",
]
