"""Data sets held in memory, and the batches made of them."""

from letkd.data import cifar, digits  # noqa: F401  (importing a reader's file registers it)
from letkd.data.augment import Augment
from letkd.data.base import Dataset, Loader, Split, load_data

__all__ = ["Augment", "Dataset", "Loader", "Split", "load_data"]
