"""Strong views: two random operations and a grey square, after any other augmentation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from letkd.data.augment import Augment
from letkd.data.pictures import as_picture, as_tensor

EACH = 2  # operations per image, possibly the same one twice
GREY = (125, 123, 114)
LARGEST = 0.5  # side of the square, as a share of the width


class Operation(NamedTuple):
    """An operation on a picture, with a value drawn uniformly between `low` and `high`."""

    name: str
    low: float
    high: float
    apply: Callable[[Image.Image, float], Image.Image]


def _moved(picture: Image.Image, *matrix: float) -> Image.Image:
    """Each pixel (x, y) gets the nearest pixel to (a x + b y + c, d x + e y + f), or black outside the picture."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


OPERATIONS = (
    Operation("autocontrast", 0, 1, lambda picture, _: ImageOps.autocontrast(picture)),
    Operation("brightness", 0.05, 0.95, lambda picture, v: ImageEnhance.Brightness(picture).enhance(v)),
    Operation("color", 0.05, 0.95, lambda picture, v: ImageEnhance.Color(picture).enhance(v)),
    Operation("contrast", 0.05, 0.95, lambda picture, v: ImageEnhance.Contrast(picture).enhance(v)),
    Operation("equalize", 0, 1, lambda picture, _: ImageOps.equalize(picture)),
    Operation("identity", 0, 1, lambda picture, _: picture),
    Operation("posterize", 4, 8, lambda picture, v: ImageOps.posterize(picture, int(v))),
    Operation("rotate", -30, 30, lambda picture, v: picture.rotate(v)),
    Operation("sharpness", 0.05, 0.95, lambda picture, v: ImageEnhance.Sharpness(picture).enhance(v)),
    Operation("shear-x", -0.3, 0.3, lambda picture, v: _moved(picture, 1, v, 0, 0, 1, 0)),
    Operation("shear-y", -0.3, 0.3, lambda picture, v: _moved(picture, 1, 0, 0, v, 1, 0)),
    Operation("solarize", 0, 256, lambda picture, v: ImageOps.solarize(picture, int(v))),
    Operation("translate-x", -0.3, 0.3, lambda picture, v: _moved(picture, 1, 0, v * picture.width, 0, 1, 0)),
    Operation("translate-y", -0.3, 0.3, lambda picture, v: _moved(picture, 1, 0, 0, 0, 1, v * picture.height)),
)


def strong_view(
    image: UInt8[Tensor, "3 h w"],
    operations: Int64[Tensor, " n"],
    values: Float64[Tensor, " n"],
    square: Float64[Tensor, "3"],
) -> UInt8[Tensor, "3 h w"]:
    """The operations in sequence, then a grey square, clipped at the border.

    Args:
        operations: indices into `OPERATIONS`.
        values: from 0 to 1, for `low` to `high` of each operation.
        square: side, row and column of the centre, each from 0 to 1, as a share of half the width, the height and the width.
    """
    picture = as_picture(image)
    for k, value in zip(operations.tolist(), values.tolist(), strict=True):
        operation = OPERATIONS[k]
        picture = operation.apply(picture, operation.low + (operation.high - operation.low) * value)
    view = as_tensor(picture)
    h, w = view.shape[-2:]
    share, row, column = square.tolist()
    side = round(share * LARGEST * w)
    top, left = round(row * h - side / 2), round(column * w - side / 2)
    view[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = torch.tensor(GREY, dtype=torch.uint8)[
        :, None, None
    ]
    return view


@dataclass(frozen=True)
class Strong(Augment):
    """Another augmentation, then `strong_view` with random operations: the strong view of MLKD's authors.

    Args:
        first: the augmentation before it, such as the recipe's crop and flip.
    """

    first: Augment

    def check(self, h: int, w: int) -> None:
        self.first.check(h, w)

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The draws of `first`, then `operations`, `values` and `square` of `strong_view`."""
        before = self.first.draw(b, generator)
        operations = torch.randint(len(OPERATIONS), (b, EACH), generator=generator)
        values = torch.rand(b, EACH, generator=generator, dtype=torch.float64)
        return *before, operations, values, torch.rand(b, 3, generator=generator, dtype=torch.float64)

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        return self.first.picture(picture, *draws[:-3], size=size, resize=resize)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        return _strong(self.first.batch(images, *draws[:-3]), *draws[-3:])

    def normalised(self, x: Tensor, *draws: Tensor) -> Tensor:
        return self.first.normalised(x, *draws[:-3])

    def __call__(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        return _strong(self.first(images, *draws[:-3]), *draws[-3:])


def _strong(images: Tensor, operations: Tensor, values: Tensor, square: Tensor) -> Tensor:
    views = [strong_view(*one) for one in zip(images, operations, values, square, strict=True)]
    return torch.stack(views) if views else images
