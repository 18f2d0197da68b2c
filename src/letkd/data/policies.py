"""RandAugment and TrivialAugment: which operations an image gets, and how strong they are."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float64, Int64, UInt8
from torch import Tensor

from letkd.data.augment import Augment
from letkd.data.operations import OPERATIONS, operate
from letkd.errors import DataError

STRONGEST = 30  # strengths are 0 to 30, as in both papers


@lru_cache(maxsize=8)
def _largest(across: float, down: float, shear: float, degrees: float, colour: float, bits: float) -> Float64[Tensor, " ops"]:
    """The level of every operation at the strongest setting."""
    level = dict.fromkeys(OPERATIONS, 0.0) | {"shear_x": shear, "shear_y": shear, "rotate": degrees}
    level |= {"translate_x": across, "translate_y": down, "posterize": bits, "solarize": 255.0}
    level |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), colour)
    return torch.tensor(list(level.values()), dtype=torch.float64)


class _Policy(Augment):
    """Random operations, drawn uniformly for every image, each with a strength and a sign."""

    draws: ClassVar[int] = 2

    def largest(self, h: int, w: int) -> Float64[Tensor, " ops"]:
        """The level of every operation at strength 30, for images of height h and width w."""
        raise NotImplementedError

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        largest = self.largest(*images.shape[-2:])
        for operation, strength in zip(*(rows.unbind(1) for rows in draws), strict=True):
            images = operate(images, operation, largest[operation] * strength / STRONGEST)
        return images


@dataclass(frozen=True)
class RandAugment(_Policy):
    """RandAugment (Cubuk et al. 2020): several operations in sequence, all of the same strength.

    Args:
        operations: number per image. The paper and torchvision use 2 on ImageNet.
        magnitude: the strength, 0 to 30. Both use 9.

    At 30: shears of 0.3, shifts of 150/331 of the side, rotations by 30°, enhancement by 0.1 or 1.9, 4 of 8 bits dropped.
    """

    operations: int = 2
    magnitude: int = 9

    def __post_init__(self):
        if self.operations < 1:
            raise DataError(f"RandAugment with operations={self.operations}: the number of operations must be 1 or more")
        if not 0 <= self.magnitude <= STRONGEST:
            raise DataError(f"RandAugment with magnitude={self.magnitude}: the strength must be from 0 to {STRONGEST}")

    def largest(self, h: int, w: int) -> Float64[Tensor, " ops"]:
        return _largest(150 / 331 * w, 150 / 331 * h, 0.3, 30.0, 0.9, 4.0)

    def draw(self, b: int, generator: torch.Generator) -> tuple[Int64[Tensor, "b n"], Int64[Tensor, "b n"]]:
        """Operation and signed strength of each of the `operations` for the next `b` images."""
        operation = torch.randint(len(OPERATIONS), (b, self.operations), generator=generator)
        sign = 2 * torch.randint(2, (b, self.operations), generator=generator) - 1
        return operation, self.magnitude * sign


@dataclass(frozen=True)
class TrivialAugment(_Policy):
    """TrivialAugment with the wide space (Müller and Hutter 2021): one operation of random strength. It has no settings.

    At 30: shears of 0.99, shifts of 32 pixels, rotations by 135°, enhancement by 0.01 or 1.99, 6 of 8 bits dropped.
    """

    def largest(self, h: int, w: int) -> Float64[Tensor, " ops"]:
        return _largest(32.0, 32.0, 0.99, 135.0, 0.99, 6.0)

    def draw(self, b: int, generator: torch.Generator) -> tuple[Int64[Tensor, "b 1"], Int64[Tensor, "b 1"]]:
        """Operation and signed strength for the next `b` images."""
        operation = torch.randint(len(OPERATIONS), (b, 1), generator=generator)
        sign = 2 * torch.randint(2, (b, 1), generator=generator) - 1
        return operation, torch.randint(STRONGEST + 1, (b, 1), generator=generator) * sign
