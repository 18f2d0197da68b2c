"""Random crops, rotations, flips and erasing. Drawing the random numbers is separate from applying them to images."""

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

TRIES = 10  # boxes drawn for a resized crop before the centre is used instead


def crop_flip(
    images: UInt8[Tensor, "b c h w"],
    top: Int64[Tensor, " b"],
    left: Int64[Tensor, " b"],
    *,
    flip: Bool[Tensor, " b"],
    pad: int,
    mode: str,
) -> UInt8[Tensor, "b c h w"]:
    """Pad every image, crop it to its original size, then flip it left to right if `flip` is set.

    Args:
        top: first row of the crop in the padded image, 0 to 2·pad.
        left: first column of the crop in the padded image, 0 to 2·pad.
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
    # First move whole rows, then pixels within rows: this needs an index per row and per column, not one per pixel.
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
    """Rotate every image about its centre, then flip it left to right if `flip` is set.

    Nearest-neighbour interpolation, black outside the image: the default of Pillow's `rotate`, which the usual Tiny-ImageNet
    recipes use.

    Args:
        degrees: counter-clockwise.
    """
    h, w = images.shape[-2:]
    x = torch.arange(w, dtype=torch.float64) + 0.5 - w / 2
    y = torch.arange(h, dtype=torch.float64)[:, None] + 0.5 - h / 2
    x = torch.where(flip[:, None, None], -x, x)  # [b 1 w]
    cos, sin = (f(degrees.deg2rad())[:, None, None] for f in (torch.cos, torch.sin))
    col = (cos * x - sin * y + w / 2).floor().long()  # [b h w], in the image before the rotation
    row = (sin * x + cos * y + h / 2).floor().long()
    inside = (row >= 0) & (row < h) & (col >= 0) & (col < w)
    source = (row.clamp(0, h - 1) * w + col.clamp(0, w - 1)).flatten(1)[:, None]  # [b 1 hw], in the flattened image
    moved = images.flatten(2).gather(2, source.expand(-1, images.shape[1], -1)).view_as(images)
    return moved.mul_(inside[:, None])


def resized_crop_box(
    w: int,
    h: int,
    shape: Float64[Tensor, "tries 2"],
    position: Float64[Tensor, "2"],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop of a w x h image.

    Its share of the area is uniform in `scale`, its width over its height log-uniform in `ratio`. The first try that fits the
    image is used; if none fits, the largest centre crop with an allowed ratio.

    Args:
        shape: uniform numbers from 0 to 1, two per try: for the area and for the ratio.
        position: uniform numbers from 0 to 1 for top and left.
    """
    low, high = (math.log(r) for r in ratio)
    for area, aspect in shape.tolist():
        part = (scale[0] + (scale[1] - scale[0]) * area) * w * h
        wide = math.exp(low + (high - low) * aspect)
        cw, ch = round(math.sqrt(part * wide)), round(math.sqrt(part / wide))
        if 0 < cw <= w and 0 < ch <= h:
            top, left = (int(u * (free + 1)) for u, free in zip(position.tolist(), (h - ch, w - cw), strict=True))
            return left, top, left + cw, top + ch
    cw = min(w, max(round(h * ratio[1]), 1))
    ch = min(h, max(round(w / ratio[0]), 1))
    left, top = (w - cw) // 2, (h - ch) // 2
    return left, top, left + cw, top + ch


@dataclass(frozen=True)
class Augment:
    """Base class of augmentations; it leaves images unchanged.

    `draw` draws all random numbers of a whole batch first; the other methods are functions of them. Each image therefore gets
    the same augmentation in any process, whichever part of the batch it is in. `draws` is the number of tensors that `draw` returns.
    """

    draws: ClassVar[int] = 0

    def check(self, h: int, w: int) -> None:
        """Raise if images of this size cannot be augmented."""

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The random numbers for the next `b` images: tensors with `b` rows."""
        return ()

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        """A decoded file as an image of height and width `size`: here the centre crop of evaluation. `draws` are the image's rows."""
        return centred(picture, size, resize)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        """Augment a batch of images that `picture` returned."""
        return images

    def __call__(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        """The whole augmentation, for images of one size in memory."""
        return self.batch(images, *draws)

    def normalised(self, x: Float32[Tensor, "b c h w"], *draws: Tensor) -> Float32[Tensor, "b c h w"]:
        """Augment images after normalisation."""
        return x


def _coins(b: int, generator: torch.Generator, flip: bool) -> Bool[Tensor, " b"]:
    return torch.randint(2, (b,), generator=generator) == 1 if flip else torch.zeros(b, dtype=torch.bool)


@dataclass(frozen=True)
class CropFlip(Augment):
    """The random crop and flip of the CIFAR recipes; the authors use `pad=4`, `reflect` and flips.

    Args:
        pad: pixels added on each side before the crop; 0 for no crop.
        mode: padding mode, see `crop_flip`.
        flip: flip each image with probability 1/2; turn it off if a mirror image changes the class.
    """

    draws: ClassVar[int] = 3
    pad: int = 4
    mode: str = "reflect"
    flip: bool = True

    def __post_init__(self):
        if self.pad < 0:
            raise DataError(f"augmentation with pad={self.pad}: the padding must be 0 pixels or more")
        if self.mode not in ("reflect", "zero"):
            raise DataError(f"augmentation with mode={self.mode!r}: choose 'reflect' or 'zero'")

    def check(self, h: int, w: int) -> None:
        if self.mode == "reflect" and self.pad >= min(h, w):
            raise DataError(
                f"reflect padding of {self.pad} pixels on images of {h}x{w}: it must be smaller than both sides; "
                "choose a smaller pad or mode='zero'"
            )

    def draw(self, b: int, generator: torch.Generator) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """`top`, `left` and `flip` for the next `b` images."""
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
        degrees: largest angle; angles are uniform from −degrees to +degrees.
        flip: as for `CropFlip`.
    """

    draws: ClassVar[int] = 2
    degrees: float = 20.0
    flip: bool = True

    def __post_init__(self):
        if not 0 <= self.degrees <= 180:
            raise DataError(f"augmentation with degrees={self.degrees}: the largest angle must be from 0 to 180")

    def draw(self, b: int, generator: torch.Generator) -> tuple[Float64[Tensor, " b"], Bool[Tensor, " b"]]:
        """`degrees` and `flip` for the next `b` images."""
        turn = self.degrees * (2 * torch.rand(b, generator=generator, dtype=torch.float64) - 1)
        return turn, _coins(b, generator, self.flip)

    def batch(self, images: UInt8[Tensor, "b c h w"], *draws: Tensor) -> UInt8[Tensor, "b c h w"]:
        turn, flip = draws
        return rotate_flip(images, turn, flip=flip)


@dataclass(frozen=True)
class ResizedCropFlip(Augment):
    """The random resized crop (bilinear) and flip of the ImageNet recipes.

    Args:
        scale: range of the crop's share of the image's area.
        ratio: range of the crop's width over height.
        flip: as for `CropFlip`.
    """

    draws: ClassVar[int] = 3
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def draw(self, b: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Bool[Tensor, " b"]]:
        """`shape` and `position` of `resized_crop_box`, and `flip`. The number of draws does not depend on the images' sizes."""
        shape = torch.rand(b, TRIES, 2, generator=generator, dtype=torch.float64)
        position = torch.rand(b, 2, generator=generator, dtype=torch.float64)
        return shape, position, _coins(b, generator, self.flip)

    def picture(self, picture: Image.Image, *draws: Tensor, size: tuple[int, int], resize: int | None) -> Image.Image:
        return self._cut(picture, (size[1], size[0]), *draws)

    def _cut(self, picture: Image.Image, size: tuple[int, int], shape: Tensor, position: Tensor, flip: Tensor) -> Image.Image:
        box = resized_crop_box(*picture.size, shape, position, scale=self.scale, ratio=self.ratio)
        # Crop first: with resize(box=…) the filter would read pixels outside the box.
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
        p: probability that a rectangle of an image is erased.
        scale: range of the rectangle's share of the image's area.
        ratio: range of the rectangle's height over width. Both ranges are torchvision's.

    The first of ten random rectangles that fits is erased; if none fits, the image stays unchanged.
    """

    draws: ClassVar[int] = 3
    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self):
        if not 0 <= self.p <= 1:
            raise DataError(f"erasing with p={self.p}: the probability must be from 0 to 1")

    def draw(self, b: int, generator: torch.Generator) -> tuple[Bool[Tensor, " b"], Tensor, Tensor]:
        """Whether to erase; uniform numbers for area and ratio of every try, and for top and left."""
        chosen = torch.rand(b, generator=generator, dtype=torch.float64) < self.p
        shape = torch.rand(b, TRIES, 2, generator=generator, dtype=torch.float64)
        return chosen, shape, torch.rand(b, 2, generator=generator, dtype=torch.float64)

    def normalised(self, x: Float32[Tensor, "b c h w"], *draws: Tensor) -> Float32[Tensor, "b c h w"]:
        chosen, shape, position = draws
        h, w = x.shape[-2:]
        low, high = (math.log(r) for r in self.ratio)
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * shape[:, :, 0]) * h * w
        tall = (low + (high - low) * shape[:, :, 1]).exp()
        eh, ew = (area * tall).sqrt().round(), (area / tall).sqrt().round()  # [b tries]
        fits = (eh < h) & (ew < w)
        first = fits.long().argmax(dim=1, keepdim=True)
        eh, ew = (size.gather(1, first).squeeze(1) for size in (eh, ew))
        top, left = (position[:, 0] * (h - eh + 1)).floor(), (position[:, 1] * (w - ew + 1)).floor()
        erased = torch.stack([top, top + eh, left, left + ew]) * (chosen & fits.any(dim=1))
        top, bottom, left, right = erased.to(x.device)[:, :, None]
        row, col = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
        rows, cols = (row >= top) & (row < bottom), (col >= left) & (col < right)  # [b h], [b w]
        return x.masked_fill((rows[:, :, None] & cols[:, None, :])[:, None], 0.0)


@dataclass(frozen=True)
class Chain(Augment):
    """Several augmentations in sequence. The first one also turns a decoded file into an image."""

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
