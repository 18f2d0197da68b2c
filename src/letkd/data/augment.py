"""Random crops and mirror images of a whole batch at once."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from letkd.errors import DataError


def crop_flip(
    images: UInt8[Tensor, "b c h w"],
    top: Int64[Tensor, " b"],
    left: Int64[Tensor, " b"],
    *,
    flip: Bool[Tensor, " b"],
    pad: int,
    mode: str,
) -> UInt8[Tensor, "b c h w"]:
    """Pads every image, cuts an image of the old size out of it, then mirrors it left to right where `flip` says so.

    Args:
        top: first row of the cut in the padded image, 0 to 2·pad.
        left: first column, likewise.
        pad: pixels added on each side.
        mode: `reflect` mirrors the image at its border without repeating the border pixel, `zero` adds black.
    """
    h, w = images.shape[-2:]
    x = torch.arange(w)
    row = torch.arange(h) + top[:, None] - pad  # [b h], in the unpadded image
    col = torch.where(flip[:, None], w - 1 - x, x) + left[:, None] - pad  # [b w]
    # Where a pixel comes from is worked out per row and per column, so that the pixels themselves move only once.
    inside_row, inside_col = (row >= 0) & (row < h), (col >= 0) & (col < w)
    row = (h - 1) - ((h - 1) - row.abs()).abs()
    col = (w - 1) - ((w - 1) - col.abs()).abs()
    if mode == "zero":
        row, col = row.clamp(0, h - 1), col.clamp(0, w - 1)
    source = (row[:, :, None] * w + col[:, None, :]).flatten(1)[:, None]  # [b 1 h·w]
    cut = images.flatten(2).gather(2, source.expand(-1, images.shape[1], -1)).view_as(images)
    if mode == "zero":
        cut *= (inside_row[:, :, None] & inside_col[:, None, :])[:, None]
    return cut


@dataclass(frozen=True)
class Augment:
    """The random crop and flip of the CIFAR recipes; the authors use `pad=4`, `reflect` and flips.

    Args:
        pad: pixels added on each side before the crop; 0 for no crop.
        mode: what is added, see `crop_flip`.
        flip: whether every second image, by chance, is mirrored; leave it off where a mirror image changes its class.
    """

    pad: int = 4
    mode: str = "reflect"
    flip: bool = True

    def __post_init__(self):
        if self.pad < 0:
            raise DataError(f"augmentation with pad={self.pad}: the padding is a number of pixels, 0 or more")
        if self.mode not in ("reflect", "zero"):
            raise DataError(f"augmentation with mode={self.mode!r}: there are 'reflect' and 'zero'")

    def draw(self, b: int, generator: torch.Generator) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """The `top`, `left` and `flip` of the next `b` images."""
        top = torch.randint(2 * self.pad + 1, (b,), generator=generator)
        left = torch.randint(2 * self.pad + 1, (b,), generator=generator)
        flip = torch.randint(2, (b,), generator=generator) == 1 if self.flip else torch.zeros(b, dtype=torch.bool)
        return top, left, flip

    def __call__(self, images: UInt8[Tensor, "b c h w"], generator: torch.Generator) -> UInt8[Tensor, "b c h w"]:
        h, w = images.shape[-2:]
        if self.mode == "reflect" and self.pad >= min(h, w):
            raise DataError(
                f"reflect padding of {self.pad} pixels on images of {h}x{w}: it must be smaller than both sides; "
                "choose a smaller pad or mode='zero'"
            )
        if self.pad == 0 and not self.flip:
            return images
        top, left, flip = self.draw(len(images), generator)
        return crop_flip(images, top, left, flip=flip, pad=self.pad, mode=self.mode)
