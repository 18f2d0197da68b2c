"""Mixup and CutMix: every image of a batch mixed with the one before it."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from letkd.errors import DataError

Box = tuple[slice, slice]  # rows and columns


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019), with one share λ per batch.

        mixup    λ · x + (1 − λ) · x'
        cutmix   x with a box of x' of area 1 − λ around a random centre, clipped at the border; λ is then the remaining share of x

    Args:
        kind: `mixup` or `cutmix`.
        alpha: λ is drawn from Beta(α, α). On CIFAR both papers use 1; on ImageNet CutMix uses 1 and mixup 0.2.

    If λ is below 1/2, x and x' are swapped: an image always keeps the larger share, so its own label dominates. As every
    image is x once and x' once per epoch, this changes only the order of the mixed images.
    """

    kind: str = "mixup"
    alpha: float = 1.0

    def __post_init__(self):
        if self.kind not in ("mixup", "cutmix"):
            raise DataError(f"images mixed by {self.kind!r}: choose 'mixup' or 'cutmix'")
        if not 0 < self.alpha < math.inf:
            raise DataError(f"images mixed with alpha={self.alpha}: it must be greater than 0")

    def draw(self, h: int, w: int, generator: torch.Generator) -> tuple[float, Box | None]:
        """λ of the next batch of h x w images and, for CutMix, the box."""
        seed, y, x = (int(torch.randint(n, (), generator=generator)) for n in (2**32, h, w))
        # RandomState gives the same numbers in every version of numpy; torch draws from Beta only with the global generator.
        share = float(np.random.RandomState(seed).beta(self.alpha, self.alpha))
        if self.kind == "mixup":
            return share, None
        half_h, half_w = (int(side * math.sqrt(1 - share) / 2) for side in (h, w))
        rows, cols = slice(max(y - half_h, 0), min(y + half_h, h)), slice(max(x - half_w, 0), min(x + half_w, w))
        return 1 - (rows.stop - rows.start) * (cols.stop - cols.start) / (h * w), (rows, cols)

    def __call__(
        self, own: Float32[Tensor, "b c h w"], other: Float32[Tensor, "b c h w"], share: float, box: Box | None
    ) -> tuple[Float32[Tensor, "b c h w"], float]:
        """The mixed images, and the share of `own` in them: 1/2 or more."""
        x, x_other = (own, other) if share >= 0.5 else (other, own)
        if box is None:
            mixed = torch.lerp(x_other, x, share)
        else:
            mixed = x.clone()
            mixed[:, :, *box] = x_other[:, :, *box]
        return mixed, max(share, 1 - share)
