"""scikit-learn's handwritten digits, up-scaled to the size of CIFAR images: real data that needs no download."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from letkd.data.base import Dataset, Reading, Split, register_data, stratified

# Mean and standard deviation of the 1,077 training images; grey, so the same for all three channels.
MEAN = 0.3054
STD = 0.3238
TEST_PER_CLASS = 72


@register_data("digits")
def read_digits(root: Path | None, reading: Reading) -> Dataset:
    """1,797 grey 8x8 images, scaled to 32x32 with three channels; the test split is 72 images per digit, always the same."""
    grey, labels = _grey_and_labels()
    small = torch.from_numpy(grey).reshape(-1, 1, 8, 8) * (255 / 16)  # grey levels are 0 to 16
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
    """The output of `load_digits`, float64 [n 64] and int64 [n], read from its file because importing scikit-learn is slow."""
    found = find_spec("sklearn")
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    given: Any = load_digits(return_X_y=True)
    return given
