"""Tensor functions shared by several packages: pixels as rows, resizing of maps, the per-pixel KL divergence."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.errors import UnsupportedPair


def pixels(f: Float[Tensor, "b d h w"]) -> Float[Tensor, "n d"]:
    """Every pixel of a map as one row, in the order image, height, width: n = b·h·w."""
    return f.permute(0, 2, 3, 1).reshape(-1, f.shape[1])


def unit(x: Float[Tensor, "n d ..."]) -> Float[Tensor, "n d ..."]:
    """x / ‖x‖ along the second dimension. A zero vector stays zero, and its gradient is zero.

    `F.normalize` multiplies the gradient of a zero vector by 10¹², and in half precision divides by zero.
    """
    length = x.norm(dim=1, keepdim=True)
    return x / torch.where(length > 1e-12, length, torch.inf)


def pool_ratio(have: tuple[int, int], want: tuple[int, int], role: str) -> tuple[int, int]:
    """Teacher pixels per student pixel, in height and width; both must be whole numbers."""
    ratio = (have[0] // want[0], have[1] // want[1])
    if min(ratio) < 1 or (ratio[0] * want[0], ratio[1] * want[1]) != have:
        raise UnsupportedPair(
            f"the teacher's map at {role!r} is {have[0]}x{have[1]} and the student's {want[0]}x{want[1]}: average pooling needs "
            "a whole ratio of teacher to student size; use match='resize', or choose taps whose sizes divide"
        )
    return ratio


def resize_to(f: Float[Tensor, "b d H W"], size: tuple[int, int]) -> Float[Tensor, "b d h w"]:
    """Resize a map, each axis separately: down by area, up bilinearly. Downscaling by a whole ratio is average pooling.

    By area, pixel i of h is the mean of those from ⌊i·H/h⌋ to ⌈(i+1)·H/h⌉ − 1; bilinearly, its centre lies at (i + ½)·H/h − ½.
    """
    H, W = f.shape[-2:]
    smaller = min(H, size[0]), min(W, size[1])
    f = f if smaller == (H, W) else F.adaptive_avg_pool2d(f, smaller)
    return f if smaller == tuple(size) else F.interpolate(f, size=size, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class GridMatch:
    """Brings the teacher's map to the student's grid: average-pooled by a whole ratio or, if `size` is given, resized to it."""

    ratio: tuple[int, int] = (1, 1)
    size: tuple[int, int] | None = None

    @classmethod
    def of(cls, have: tuple[int, int], want: tuple[int, int], role: str, *, match: str = "pool") -> "GridMatch":
        """The match from the teacher's size to the student's. With `match="pool"` a ratio that is not whole raises `UnsupportedPair`."""
        if match == "resize" and (have[0] % want[0] or have[1] % want[1]):
            return cls(size=want)
        return cls(pool_ratio(have, want, role))

    def __call__(self, f_T: Tensor) -> Tensor:
        """[b d H W] to [b d h w]; vectors are returned unchanged."""
        if self.size is not None:
            return resize_to(f_T, self.size)
        return f_T if self.ratio == (1, 1) else F.avg_pool2d(f_T, self.ratio)  # supplement 2.2

    def __str__(self) -> str:
        return f"pooled {self.ratio[0]}x{self.ratio[1]}" if self.size is None else f"resized to {self.size[0]}x{self.size[1]}"


AS_IT_IS = GridMatch()


def match_to(
    f_T: Float[Tensor, "b d H W"], size: tuple[int, int], role: str, *, match: str = "pool"
) -> Float[Tensor, "b d h w"]:
    """The teacher's map at the student's size (supplement, "Heterogeneous distillation cases"); see `GridMatch.of`."""
    have = (f_T.shape[-2], f_T.shape[-1])
    return f_T if have == tuple(size) else GridMatch.of(have, (size[0], size[1]), role, match=match)(f_T)


def fit_spatially(f_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b e H W"]) -> tuple[Tensor, Tensor]:
    """Average-pool the larger map to the size of the smaller one, as published feature methods do."""
    size = (min(f_S.shape[-2], f_T.shape[-2]), min(f_S.shape[-1], f_T.shape[-1]))
    return _shrink(f_S, size), _shrink(f_T, size)


def _shrink(f: Tensor, size: tuple[int, int]) -> Tensor:
    return f if f.shape[-2:] == size else F.adaptive_avg_pool2d(f, size)


def pixel_kl(p_T: Float[Tensor, "b K h w"], a: Float[Tensor, "b K h w"]) -> Float[Tensor, ""]:
    """KL(p_T ‖ p_S), summed over the K labels and averaged over all pixels of the batch; p_S = softmax(a).

        L_KD = 1/(b·h·w) Σ_i Σ_k p_T(i)_k · (log p_T(i)_k − log p_S(i)_k)                          (3.1), Alg. 3

    It is 0 if the two are equal. Adding a constant to all K values of a pixel in `a` does not change it.
    """
    p_T = p_T.to(torch.promote_types(p_T.dtype, torch.float32))
    log_p_S = F.log_softmax(a.to(p_T.dtype), dim=1)  # section 4.1: p_S(i) = softmax(a_{|i})
    return (torch.xlogy(p_T, p_T) - p_T * log_p_S).sum(dim=1).mean()  # (3.1); Alg. 3: KL(p_T ‖ p_S)
