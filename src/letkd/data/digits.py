"""scikit-learn's handwritten digits, up-scaled to the size of CIFAR images: real data that needs no download."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from letkd.data.base import Dataset, Reading, Split, register_data, stratified

# Of the 1,077 training images; grey, so the same for all three channels.
MEAN = 0.3054
STD = 0.3238
TEST_PER_CLASS = 72


@register_data("digits")
def read_digits(root: Path | None, reading: Reading) -> Dataset:
    """1,797 grey images of 8x8 as 32x32 in three channels; 72 images of each digit, always the same, are the test split."""
    grey, labels = _grey_and_labels()
    small = torch.from_numpy(grey).reshape(-1, 1, 8, 8) * (255 / 16)  # their grey goes from 0 to 16
    large = F.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
    images = large.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    everything = Split(images, torch.from_numpy(labels).long())
    test = stratified(everything.labels, lambda n: TEST_PER_CLASS, seed=(0, 0))
    return Dataset(
        name="digits",
        train=everything.subset(~test),
        val=everything.subset(torch.zeros_like(test)),
        test=everything.subset(test),
        classes=tuple("0123456789"),
        mean=(MEAN, MEAN, MEAN),
        std=(STD, STD, STD),
        flip=False,
    )


def _grey_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """What `load_digits` gives, float64 [n 64] and int64 [n], from its file: importing scikit-learn takes longer than all the rest."""
    found = find_spec("sklearn")
    for place in found.submodule_search_locations or () if found else ():
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    given: Any = load_digits(return_X_y=True)
    return given
