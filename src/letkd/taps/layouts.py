"""Conversion of patch tokens [b n d] and channels-last maps [b h w d] to maps [b d h w] and back."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, cat, nn

from letkd.errors import TapError

Size = tuple[int, int]
MOST_PREFIX = 16  # largest number of class, distillation and register tokens to try if the model does not define it
PREFIX_TOKENS = {
    *("cls_token", "class_token", "class_embedding"),
    *("dist_token", "distillation_token", "reg_token", "register_tokens"),
}


@dataclass(frozen=True)
class Tokens:
    """Tokens [b n d]: `prefix` tokens without a pixel, then one per pixel of `grid`, row by row.

    If the number of tokens differs from `grid`, a grid with the same proportions is assumed.

    Examples:
        >>> import torch
        >>> tokens = torch.randn(2, 1 + 2 * 3, 8)
        >>> layout = Tokens(prefix=1, grid=(2, 3))
        >>> layout.to_map(tokens).shape
        torch.Size([2, 8, 2, 3])
        >>> torch.equal(layout.from_map(layout.to_map(tokens), tokens), tokens)
        True
    """

    prefix: int
    grid: Size

    def to_map(self, f: Tensor) -> Tensor:
        """[b n d] to [b d h w]; a view."""
        return f[:, self.prefix :].transpose(1, 2).unflatten(2, self._grid(f.shape[1]))

    def from_map(self, x: Tensor, f: Tensor) -> Tensor:
        """[b d h w] back to [b n d], with the prefix tokens of `f`."""
        pixels = x.flatten(2).transpose(1, 2)
        if not self.prefix:
            return pixels
        if pixels.shape[2] != f.shape[2]:
            raise TapError(
                f"a layer that turns {f.shape[2]} channels into {pixels.shape[2]} cannot be used on tokens with {self.prefix} prefix "
                "tokens, which keep their channels; choose a layer or a method that keeps the number of channels"
            )
        return cat([f[:, : self.prefix], pixels], dim=1)

    def _grid(self, n: int) -> Size:
        (h, w), pixels = self.grid, n - self.prefix
        if pixels == h * w:
            return self.grid
        scale = math.gcd(h, w)
        h, w = h // scale, w // scale
        times = math.isqrt(max(pixels, 0) // (h * w))
        if times < 1 or times * times * h * w != pixels:
            raise TapError(
                f"a layer was built for {self.prefix + self.grid[0] * self.grid[1]} tokens but gets {n}, which do not form a grid with the "
                "same proportions; use images of one shape, and do not drop tokens"
            )
        return times * h, times * w

    def __str__(self) -> str:
        return f"tokens:prefix={self.prefix}:grid={self.grid[0]}x{self.grid[1]}"


@dataclass(frozen=True)
class ChannelsLast:
    """Maps [b h w d]."""

    def to_map(self, f: Tensor) -> Tensor:
        """[b h w d] to [b d h w]; a view."""
        return f.permute(0, 3, 1, 2)

    def from_map(self, x: Tensor, f: Tensor) -> Tensor:
        """[b d h w] back to [b h w d]."""
        return x.permute(0, 2, 3, 1)

    def __str__(self) -> str:
        return "channels-last"


Layout = Tokens | ChannelsLast


def first_tensor(output: Any) -> Any:
    """The tokens in a block's output: if it is a tuple, as in some transformers, its first tensor."""
    return output[0] if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else output


def through(layer: Callable[[Tensor], Tensor], layout: Layout, output: Any) -> Any:
    """A block's output with its pixels passed through a layer for maps; everything else in it is unchanged."""
    f = first_tensor(output)
    changed = layout.from_map(layer(layout.to_map(f)), f)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


WRITTEN = r"^(channels-last|tokens:prefix=\d{1,4}:grid=[1-9]\d{0,4}x[1-9]\d{0,4})$"


def layout_of(text: str) -> Layout:
    """The layout that `str(layout)` wrote, a text that matches `WRITTEN`."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return Tokens(numbers[0], (numbers[1], numbers[2])) if numbers else ChannelsLast()


@dataclass(frozen=True)
class TokenFacts:
    """A model's number of tokens before the patches and its patch size; None if it does not define them."""

    prefix: int | None = None
    patch: Size | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "TokenFacts":
        """Read `num_prefix_tokens` (timm), the parameters of class and register tokens, and `patch_size`, also of a `config`."""
        return cls(_prefix_of(model), _patch_of(model))

    def place(self, n: int, image: Size, prefix: int | None = None, grid: Size | None = None) -> Tokens | None:
        """The positions of an image's pixels among `n` tokens; None if they cannot be inferred.

        Args:
            image: height and width.
            prefix, grid: given by the user; inferred if None.
        """
        if grid is not None:
            rest = n - grid[0] * grid[1]
            return Tokens(rest, grid) if rest == (rest if prefix is None else prefix) and rest >= 0 else None
        return _place(n, image, prefix, self.prefix, self.patch)


def no_grid(path: str, n: int, x: Tensor, prefix: int | None, grid: Size | None) -> str:
    """Why `TokenFacts.place` found nothing, and what to do."""
    has = f"has {n} tokens for images of {x.shape[-2]}x{x.shape[-1]}"
    if prefix is not None and prefix >= n:
        return f"{has}, and prefix={prefix} leaves none for the patches; prefix is the number of class and register tokens"
    given = [] if prefix is None else [f"prefix={prefix}"]
    given += [] if grid is None else [f"grid={grid[0]}x{grid[1]}"]
    with_what = f" with {' and '.join(given)}" if given else ""
    return (
        f"{has}, and their positions in the image cannot be inferred{with_what}; write {path}:tokens:prefix=N:grid=HxW, in Python "
        f"Tap({path!r}, layout='tokens', prefix=N, grid=(H, W)), so that N + H·W = {n}"
    )


@lru_cache(maxsize=256)
def _place(n: int, image: Size, prefix: int | None, said: int | None, patch: Size | None) -> Tokens | None:
    tries = [prefix] if prefix is not None else [*([] if said is None else [said]), *range(MOST_PREFIX + 1)]
    for found in tries:
        for grid in _grids(image, patch):
            if grid[0] * grid[1] == n - found:
                return Tokens(found, grid)
        if (grid := _same_proportions(n - found, image)) is not None:
            return Tokens(found, grid)
    return None


def _grids(image: Size, patch: Size | None) -> Iterator[Size]:
    """Every grid of equal patches of an image, without and with padding."""
    H, W = image
    for s, t in [*([] if patch is None else [patch]), *((s, s) for s in range(1, max(image) + 1))]:
        yield max(H // s, 1), max(W // t, 1)
        yield -(-H // s), -(-W // t)


def _same_proportions(pixels: int, image: Size) -> Size | None:
    """The grid with exactly the image's proportions, for models that resize images themselves."""
    scale = math.gcd(*image)
    h, w = image[0] // scale, image[1] // scale
    times = math.isqrt(max(pixels, 0) // (h * w))
    return (times * h, times * w) if times and times * times * h * w == pixels else None


def _prefix_of(model: nn.Module) -> int | None:
    for module in model.modules():
        said = getattr(module, "num_prefix_tokens", None)
        if isinstance(said, int):
            return said
    named = [parameter for name, parameter in model.named_parameters() if name.rpartition(".")[2] in PREFIX_TOKENS]
    return sum(1 if parameter.ndim < 2 else parameter.shape[-2] for parameter in named) if named else None


def _patch_of(model: nn.Module) -> Size | None:
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            if (size := _pair(getattr(holder, "patch_size", None))) is not None:
                return size
    return None


def _pair(size: Any) -> Size | None:
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size):
        return size[0], size[1]
    return None
