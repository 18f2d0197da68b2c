"""Random crops, rotations, mirror images and erased parts: what is drawn at random, apart from what is then done to the images."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from letkd.data.pictures import as_picture, as_tensor, centred
from letkd.errors import DataError

TRIES = 10  # boxes drawn for a resized crop before the image is given up as too long for all of them


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
    inside_row, inside_col = (row >= 0) & (row < h), (col >= 0) & (col < w)
    row = (h - 1) - ((h - 1) - row.abs()).abs()
    col = (w - 1) - ((w - 1) - col.abs()).abs()
    if mode == "zero":
        row, col = row.clamp(0, h - 1), col.clamp(0, w - 1)
    # First whole rows move, then pixels within them: so the indices are those of rows and of columns, never one for every pixel.
    b, c = images.shape[:2]
    rows = torch.arange(0, b * c * h, h).view(b, c, 1) + row[:, None]
    cut = images.reshape(-1, w).index_select(0, rows.flatten()).view(b, c * h, w)
    cut = cut.gather(2, col[:, None].expand(-1, c * h, -1)).view_as(images)
    if mode == "zero":
        cut *= (inside_row[:, :, None] & inside_col[:, None, :])[:, None]
    return cut


def rotate_flip(
    images: UInt8[Tensor, "b c h w"], degrees: Float64[Tensor, " b"], *, flip: Bool[Tensor, " b"]
) -> UInt8[Tensor, "b c h w"]:
    """Turns every image about its centre, then mirrors it where `flip` says so.

    Each pixel takes the nearest one of the image, black where there is none: what Pillow's `rotate` does when nothing else is
    asked, and with it the field's Tiny-ImageNet recipes.

    Args:
        degrees: counter-clockwise.
    """
    h, w = images.shape[-2:]
    x = torch.arange(w, dtype=torch.float64) + 0.5 - w / 2
    y = torch.arange(h, dtype=torch.float64)[:, None] + 0.5 - h / 2
    x = torch.where(flip[:, None, None], -x, x)  # [b 1 w]
    cos, sin = (f(degrees.deg2rad())[:, None, None] for f in (torch.cos, torch.sin))
    col = (cos * x - sin * y + w / 2).floor().long()  # [b h w], in the image before the turn
    row = (sin * x + cos * y + h / 2).floor().long()
    inside = (row >= 0) & (row < h) & (col >= 0) & (col < w)
    source = (row.clamp(0, h - 1) * w + col.clamp(0, w - 1)).flatten(1)[:, None]  # [b 1 hw], in the flattened image
    moved = images.flatten(2).gather(2, source.expand(-1, images.shape[1], -1)).view_as(images)
    return moved.mul_(inside[:, None])


def resized_crop_box(
    w: int,
    h: int,
    shape: Float64[Tensor, "tries 2"],
    place: Float64[Tensor, "2"],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part of a w x h image.

    Its share of the area is uniform in `scale`, its width over its height log-uniform in `ratio`. The first of the tries that
    fits is taken; where none does, the largest part in the centre whose ratio is allowed.

    Args:
        shape: uniform numbers from 0 to 1: for each try one for the area, one for the ratio.
        place: likewise, for top and left.
    """
    low, high = (math.log(r) for r in ratio)
    for area, aspect in shape.tolist():
        part = (scale[0] + (scale[1] - scale[0]) * area) * w * h
        wide = math.exp(low + (high - low) * aspect)
        cw, ch = round(math.sqrt(part * wide)), round(math.sqrt(part / wide))
        if 0 < cw <= w and 0 < ch <= h:
            top, left = (int(u * (free + 1)) for u, free in zip(place.tolist(), (h - ch, w - cw), strict=True))
            return left, top, left + cw, top + ch
    cw = min(w, max(round(h * ratio[1]), 1))
    ch = min(h, max(round(w / ratio[0]), 1))
    left, top = (w - cw) // 2, (h - ch) // 2
    return left, top, left + cw, top + ch


@dataclass(frozen=True)
class Augment:
    """What is done to images on their way to a network; this one does nothing and is the base of the others.

    All random numbers are drawn first, by `draw`, for a whole batch; the rest is a function of them. So a part of a batch gets
    exactly what it would get in the whole, in whatever process it is made. `draws` is the number of tensors that `draw` gives.
    """

    draws: ClassVar[int] = 0

    def check(self, h: int, w: int) -> None:
        """Raises where images of this size cannot be augmented so."""

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The random numbers of the next `b` images: tensors of `b` rows."""
        return ()

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        """A decoded file as an image of height and width `size`: here the view of evaluation. The draws are its own rows."""
        return centred(picture, size, resize)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        """What remains to be done to images that `picture` gave."""
        return images

    def __call__(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        """All of it, for images of one size that are held in memory."""
        return self.batch(images, *draws)

    def normalised(self, x: Float32[Tensor, "b c h w"], *draws: Tensor) -> Float32[Tensor, "b c h w"]:
        """What is done to the images after normalisation."""
        return x


def _coins(b: int, generator: torch.Generator, flip: bool) -> Bool[Tensor, " b"]:
    return torch.randint(2, (b,), generator=generator) == 1 if flip else torch.zeros(b, dtype=torch.bool)


@dataclass(frozen=True)
class CropFlip(Augment):
    """The random crop and flip of the CIFAR recipes; the authors use `pad=4`, `reflect` and flips.

    Args:
        pad: pixels added on each side before the crop; 0 for no crop.
        mode: what is added, see `crop_flip`.
        flip: whether every second image, by chance, is mirrored; leave it off where a mirror image changes its class.
    """

    draws: ClassVar[int] = 3
    pad: int = 4
    mode: str = "reflect"
    flip: bool = True

    def __post_init__(self):
        if self.pad < 0:
            raise DataError(f"augmentation with pad={self.pad}: the padding is a number of pixels, 0 or more")
        if self.mode not in ("reflect", "zero"):
            raise DataError(f"augmentation with mode={self.mode!r}: there are 'reflect' and 'zero'")

    def check(self, h: int, w: int) -> None:
        if self.mode == "reflect" and self.pad >= min(h, w):
            raise DataError(
                f"reflect padding of {self.pad} pixels on images of {h}x{w}: it must be smaller than both sides; "
                "choose a smaller pad or mode='zero'"
            )

    def draw(self, b: int, generator: torch.Generator) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """The `top`, `left` and `flip` of the next `b` images."""
        top = torch.randint(2 * self.pad + 1, (b,), generator=generator)
        left = torch.randint(2 * self.pad + 1, (b,), generator=generator)
        return top, left, _coins(b, generator, self.flip)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        self.check(*images.shape[-2:])
        if self.pad == 0 and not self.flip:
            return images
        top, left, flip = draws
        return crop_flip(images, top, left, flip=flip, pad=self.pad, mode=self.mode)


@dataclass(frozen=True)
class RotateFlip(Augment):
    """The rotation and flip of the Tiny-ImageNet recipes; the authors use ±20°.

    Args:
        degrees: the angle is uniform between minus and plus this.
        flip: as for `CropFlip`.
    """

    draws: ClassVar[int] = 2
    degrees: float = 20.0
    flip: bool = True

    def __post_init__(self):
        if not 0 <= self.degrees <= 180:
            raise DataError(f"augmentation with degrees={self.degrees}: the largest angle is 0 to 180")

    def draw(self, b: int, generator: torch.Generator) -> tuple[Float64[Tensor, " b"], Bool[Tensor, " b"]]:
        """The `degrees` and `flip` of the next `b` images."""
        turn = self.degrees * (2 * torch.rand(b, generator=generator, dtype=torch.float64) - 1)
        return turn, _coins(b, generator, self.flip)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        turn, flip = draws
        return rotate_flip(images, turn, flip=flip)


@dataclass(frozen=True)
class ResizedCropFlip(Augment):
    """The random part of the image, scaled to the network's size (bilinear), and the flip of the ImageNet recipes.

    Args:
        scale: from and to which share of the image's area.
        ratio: from and to which width over height.
        flip: as for `CropFlip`.
    """

    draws: ClassVar[int] = 3
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Bool[Tensor, " b"]]:
        """The `shape` and `place` of `resized_crop_box`, and `flip`; as many numbers whatever the images' sizes."""
        shape = torch.rand(b, TRIES, 2, generator=generator, dtype=torch.float64)
        place = torch.rand(b, 2, generator=generator, dtype=torch.float64)
        return shape, place, _coins(b, generator, self.flip)

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        return self._cut(picture, (size[1], size[0]), *draws)

    def _cut(self, picture: Image.Image, size: tuple[int, int], shape: Tensor, place: Tensor, flip: Tensor) -> Image.Image:
        box = resized_crop_box(*picture.size, shape, place, scale=self.scale, ratio=self.ratio)
        # Cut first: with resize(box=…) the filter would look at pixels outside the box.
        cut = picture.crop(box).resize(size, Image.Resampling.BILINEAR)
        return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if bool(flip) else cut

    def __call__(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        h, w = images.shape[-2:]
        cut = [as_tensor(self._cut(as_picture(image), (w, h), *rows)) for image, *rows in zip(images, *draws, strict=True)]
        return torch.stack(cut) if cut else images


@dataclass(frozen=True)
class Erase(Augment):
    """Random erasing (Zhong et al. 2020): a rectangle of the normalised image is set to 0, the mean colour.

    Args:
        p: share of the images that lose a part.
        scale: from and to which share of the image's area.
        ratio: from and to which height over width. Both ranges are torchvision's.

    The first of ten rectangles that fits is taken; if none does, the image stays whole.
    """

    draws: ClassVar[int] = 3
    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self):
        if not 0 <= self.p <= 1:
            raise DataError(f"erasing with p={self.p}: the share of images that lose a part is 0 to 1")

    def draw(self, b: int, generator: torch.Generator) -> tuple[Bool[Tensor, " b"], Tensor, Tensor]:
        """Whether an image loses a part; uniform numbers for area and ratio of every try, and for top and left."""
        chosen = torch.rand(b, generator=generator, dtype=torch.float64) < self.p
        shape = torch.rand(b, TRIES, 2, generator=generator, dtype=torch.float64)
        return chosen, shape, torch.rand(b, 2, generator=generator, dtype=torch.float64)

    def normalised(self, x: Float32[Tensor, "b c h w"], *draws: Tensor) -> Float32[Tensor, "b c h w"]:
        chosen, shape, place = draws
        h, w = x.shape[-2:]
        low, high = (math.log(r) for r in self.ratio)
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * shape[:, :, 0]) * h * w
        tall = (low + (high - low) * shape[:, :, 1]).exp()
        eh, ew = (area * tall).sqrt().round(), (area / tall).sqrt().round()  # [b tries]
        fits = (eh < h) & (ew < w)
        first = fits.long().argmax(dim=1, keepdim=True)
        eh, ew = (size.gather(1, first).squeeze(1) for size in (eh, ew))
        top, left = (place[:, 0] * (h - eh + 1)).floor(), (place[:, 1] * (w - ew + 1)).floor()
        gone = torch.stack([top, top + eh, left, left + ew]) * (chosen & fits.any(dim=1))
        top, bottom, left, right = gone.to(x.device)[:, :, None]
        row, col = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
        rows, cols = (row >= top) & (row < bottom), (col >= left) & (col < right)  # [b h], [b w]
        return x.masked_fill((rows[:, :, None] & cols[:, None, :])[:, None], 0.0)


@dataclass(frozen=True)
class Chain(Augment):
    """Several augmentations, one after the other. The first decides how a decoded file becomes an image."""

    parts: tuple[Augment, ...]

    def check(self, h: int, w: int) -> None:
        for part in self.parts:
            part.check(h, w)

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.draw(b, generator))

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        first, own = next(self._each(draws))
        return first.picture(picture, *own, size=size, resize=resize)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        for part, own in self._each(draws):
            images = part.batch(images, *own)
        return images

    def __call__(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        for part, own in self._each(draws):
            images = part(images, *own)
        return images

    def normalised(self, x: Float32[Tensor, "b c h w"], *draws: Tensor) -> Float32[Tensor, "b c h w"]:
        for part, own in self._each(draws):
            x = part.normalised(x, *own)
        return x

    def _each(self, draws: tuple[Tensor, ...]) -> Iterator[tuple[Augment, tuple[Tensor, ...]]]:
        at = 0
        for part in self.parts:
            yield part, draws[at : at + part.draws]
            at += part.draws
