"""The image operations of RandAugment and TrivialAugment, for a batch in which every image has its own operation.

Each operation gives the same pixels as Pillow, bit for bit. Images are grouped by the kind of work: one gather for all geometric
operations, one gather through tables of 256 entries for all that map a level to a level, and one blend for the rest. Operations are
assigned to images on the CPU, so nothing waits for a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from jaxtyping import Float64, Int32, Int64, UInt8
from torch import Tensor

ONE = 1 << 16  # Pillow moves pixels with fixed-point coordinates of 16 fractional bits
Work = TypeVar("Work")


def affine(images: UInt8[Tensor, "n c h w"], matrix: Float64[Tensor, "n 6"]) -> UInt8[Tensor, "n c h w"]:
    """Move pixels: (x, y) gets the nearest pixel to (a·x + b·y + c, d·x + e·y + f), or black outside the image.

    As `Image.transform(size, AFFINE, (a, b, c, d, e, f))`, in the same fixed-point arithmetic; pixel centres lie at halves.
    """
    h, w = images.shape[-2:]
    a, b, c, d, e, f = matrix.unbind(1)
    start = torch.stack([c + 0.5 * (a + b), f + 0.5 * (d + e)])  # source of the first pixel's centre
    fixed = (torch.cat([start, torch.stack([a, d, b, e])]) * ONE + 0.5).floor().long()  # [6 n]
    x0, y0, right_x, right_y, down_x, down_y = fixed.to(images.device)[:, :, None, None]
    x, y = torch.arange(w, device=images.device), torch.arange(h, device=images.device)[:, None]
    col = (x0 + right_x * x + down_x * y) >> 16  # [n h w]
    row = (y0 + right_y * x + down_y * y) >> 16
    inside = (col >= 0) & (col < w) & (row >= 0) & (row < h)
    source = (row.clamp_(0, h - 1) * w + col.clamp_(0, w - 1)).flatten(1)[:, None]
    moved = images.flatten(2).gather(2, source.expand(-1, images.shape[1], -1)).view_as(images)
    return moved.mul_(inside[:, None])


def look_up(images: UInt8[Tensor, "n c h w"], table: UInt8[Tensor, "n c 256"]) -> UInt8[Tensor, "n c h w"]:
    """Replace every level v of a channel by `table[…, v]`."""
    return table.gather(2, images.flatten(2).long()).view_as(images)


def blend(base: Tensor, levels: Tensor, factor: Float64[Tensor, " n"]) -> UInt8[Tensor, "n ..."]:
    """base + factor · (levels − base), clipped to 0 … 255 and rounded down, as `Image.blend`."""
    factor = factor.to(torch.float32).to(levels.device).view(-1, *[1] * (levels.ndim - 1))
    base = base.to(torch.float32)
    return (base + factor * (levels.to(torch.float32) - base)).clamp_(0, 255).to(torch.uint8)


def luma(images: UInt8[Tensor, "n 3 h w"]) -> Int32[Tensor, "n 1 h w"]:
    """Brightness of every pixel, as `convert("L")`: 0.299 R + 0.587 G + 0.114 B, rounded."""
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def smooth(images: UInt8[Tensor, "n c h w"]) -> Int32[Tensor, "n c h w"]:
    """Mean over 3x3 pixels with weight 5/13 for the centre, rounded, as `ImageFilter.SMOOTH`; the border is unchanged."""
    levels = images.int()
    if min(levels.shape[-2:]) < 3:
        return levels
    rows = levels[:, :, :-2] + levels[:, :, 1:-1] + levels[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * levels[:, :, 1:-1, 1:-1]
    out = levels.clone()
    out[:, :, 1:-1, 1:-1] = (2 * total + 13).div(26, rounding_mode="floor")
    return out


def _histogram(images: UInt8[Tensor, "n c h w"]) -> Int64[Tensor, "n c 256"]:
    levels = images.flatten(2).long()
    return levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels))


def _grey(images: Tensor) -> Int64[Tensor, " 256"]:
    return torch.arange(256, device=images.device)


def _brightness(images: Tensor, level: Tensor) -> UInt8[Tensor, "n 1 256"]:
    return blend(_grey(images).new_zeros(1), _grey(images).expand(len(images), 1, 256), 1 + level)


def _contrast(images: Tensor, level: Tensor) -> UInt8[Tensor, "n 1 256"]:
    mean = (luma(images).double().mean(dim=(1, 2, 3)) + 0.5).floor()
    return blend(mean[:, None, None], _grey(images).expand(len(images), 1, 256), 1 + level)


def _posterize(images: Tensor, level: Tensor) -> UInt8[Tensor, "n 1 256"]:
    dropped = level.abs().round().long().to(images.device)[:, None, None]  # bits
    return (_grey(images) >> dropped << dropped).to(torch.uint8)


def _solarize(images: Tensor, level: Tensor) -> UInt8[Tensor, "n 1 256"]:
    grey, threshold = _grey(images), (255 - level.abs()).to(images.device)[:, None, None]
    return torch.where(grey < threshold, grey, 255 - grey).to(torch.uint8)


def _autocontrast(images: Tensor, level: Tensor) -> UInt8[Tensor, "n c 256"]:
    lowest, highest = (part[:, :, None].double() for part in images.flatten(2).aminmax(dim=2))
    scale = torch.full_like(lowest, 255) / (highest - lowest)  # 255 / … would multiply by a rounded reciprocal
    stretched = (_grey(images) * scale - lowest * scale).clamp(0, 255)
    return torch.where(highest > lowest, stretched, _grey(images).double()).to(torch.uint8)


def _equalize(images: Tensor, level: Tensor) -> UInt8[Tensor, "n c 256"]:
    count, grey = _histogram(images), _grey(images)
    last = torch.where(count > 0, grey, 0).amax(dim=2, keepdim=True)
    step = (count.sum(dim=2, keepdim=True) - count.gather(2, last)).div(255, rounding_mode="floor")
    below = count.cumsum(dim=2) - count
    equal = (step // 2 + below).div(step.clamp_min(1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, equal, grey).to(torch.uint8)


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Float64[Tensor, "n 6"]:
    return torch.stack([a, b, c, d, e, f], dim=1)


def _rotation(level: Tensor, h: int, w: int) -> Float64[Tensor, "n 6"]:
    cos, sin = level.deg2rad().cos(), level.deg2rad().sin()
    x, y = w / 2, h / 2
    return _matrix(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def _shift(level: Tensor, *, across: bool) -> Float64[Tensor, "n 6"]:
    one, none, pixels = torch.ones_like(level), torch.zeros_like(level), -level.trunc()
    return _matrix(one, none, pixels if across else none, none, one, none if across else pixels)


def _shear(level: Tensor, *, across: bool) -> Float64[Tensor, "n 6"]:
    one, none = torch.ones_like(level), torch.zeros_like(level)
    return _matrix(one, level if across else none, none, none if across else level, one, none)


# A level of 0 changes nothing or almost nothing (solarize turns white to black). Its sign matters only in the first two groups.
GEOMETRY: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "shear_x": lambda level, h, w: _shear(level, across=True),  # pixels across per pixel down
    "shear_y": lambda level, h, w: _shear(level, across=False),
    "translate_x": lambda level, h, w: _shift(level, across=True),  # pixels to the right
    "translate_y": lambda level, h, w: _shift(level, across=False),  # pixels down
    "rotate": _rotation,  # degrees counter-clockwise, about the centre
}
BLENDS: dict[str, Callable[[Tensor], Tensor]] = {"color": luma, "sharpness": smooth}  # by 1 + level
TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": _brightness,  # by 1 + level, as a blend with black
    "contrast": _contrast,  # by 1 + level, as a blend with the mean grey
    "posterize": _posterize,  # bits dropped
    "solarize": _solarize,  # 255 − level and brighter are inverted
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
OPERATIONS = ("identity", *GEOMETRY, *BLENDS, *TABLES)


def operate(
    images: UInt8[Tensor, "b 3 h w"], operation: Int64[Tensor, " b"], level: Float64[Tensor, " b"]
) -> UInt8[Tensor, "b 3 h w"]:
    """Apply one operation to each image.

    Args:
        operation: index into `OPERATIONS`; on the CPU.
        level: strength of the operation; on the CPU.
    """
    h, w = images.shape[-2:]
    out = images.clone()
    moves = [(at, matrix(level[at], h, w)) for at, matrix in _groups(operation, GEOMETRY)]
    if moves:
        at, matrix = (torch.cat(parts) for parts in zip(*moves, strict=True))
        _put(out, at, affine(_take(images, at), matrix))
    maps = [(at, table(_take(images, at), level[at]).expand(-1, 3, -1)) for at, table in _groups(operation, TABLES)]
    if maps:
        at, table = (torch.cat(parts) for parts in zip(*maps, strict=True))
        _put(out, at, look_up(_take(images, at), table))
    for at, base in _groups(operation, BLENDS):
        taken = _take(images, at)
        _put(out, at, blend(base(taken), taken, 1 + level[at]))
    return out


def _take(images: Tensor, at: Tensor) -> Tensor:
    return images.index_select(0, at.to(images.device))


def _put(images: Tensor, at: Tensor, made: Tensor) -> None:
    images.index_copy_(0, at.to(images.device), made)


def _groups(operation: Tensor, kind: Mapping[str, Work]) -> Iterator[tuple[Int64[Tensor, " n"], Work]]:
    """For each operation of a kind that is used: the indices of its images, and its function."""
    for name, work in kind.items():
        at = (operation == OPERATIONS.index(name)).nonzero().flatten()
        if len(at):
            yield at, work
