"""FitNet: regress the teacher's map from the student's, through an adapter (Romero et al. 2015)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.methods.base import Method, Side, View


def fitnet_loss(r_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b d h w"]) -> Float[Tensor, ""]:
    """1/(b·d·h·w) Σ (r_S − f_T)², r_S being the student's map after the adapter."""
    dtype = torch.promote_types(r_S.dtype, torch.float32)
    return F.mse_loss(r_S.to(dtype), f_T.to(dtype))


def regressor(d_S: int, d_T: int, size_S: tuple[int, int], size_T: tuple[int, int], *, relu: bool) -> nn.Sequential:
    """The usual adapter from the student's map to the teacher's shape: one convolution with bias, BN and, if requested, ReLU.

    Args:
        d_S, d_T: channels of the student's and the teacher's map.
        size_S, size_T: their heights and widths. Equal: 1x1. Student twice as large: 3x3, stride 2. Student half as large:
            transposed 4x4, stride 2. Student larger by another factor: a kernel of 1 + size_S − size_T without padding. The
            rule applies to height and width separately.
        relu: whether to end with a ReLU. FitNet does; AB, which compares pre-activations, does not.
    """
    axes = list(zip(size_S, size_T, strict=True))
    grows, shrinks = any(s < t for s, t in axes), any(s > t for s, t in axes)
    if (grows and shrinks) or any(s < t != 2 * s for s, t in axes):
        raise UnsupportedPair(
            f"no adapter maps the student's {size_S[0]}x{size_S[1]} map to the teacher's {size_T[0]}x{size_T[1]}: the student's map must "
            "be as large, larger, or exactly half as large; choose taps with such sizes"
        )
    h, w = (_kernel_stride_padding(s, t) for s, t in axes)
    make = nn.ConvTranspose2d if grows else nn.Conv2d
    conv = make(d_S, d_T, (h[0], w[0]), stride=(h[1], w[1]), padding=(h[2], w[2]))
    return nn.Sequential(conv, nn.BatchNorm2d(d_T), *([nn.ReLU()] if relu else []))


def _kernel_stride_padding(s: int, t: int) -> tuple[int, int, int]:
    """From s to t pixels along one axis."""
    if s == 2 * t:
        return 3, 2, 1
    if 2 * s == t:
        return 4, 2, 1
    return 1 + s - t, 1, 0


class FitNet(Method):
    """Squared error between the adapted student map and the teacher map at one role. The adapter is dropped at inference.

    Args:
        role: of the maps, in both networks. Usual value: `stage2`.

    Trained jointly with the cross-entropy, as is usual, not in the two stages of the original. Term: `fitnet`. Usual weight: 100.
    """

    name: ClassVar[str] = "fitnet"
    paper: ClassVar[str] = "Romero et al., FitNets, 2015"
    loss: ClassVar[str] = "mean squared error between the adapted student's and the teacher's map"
    formulae: ClassVar = (fitnet_loss,)
    reads_logits: ClassVar[bool] = False
    adapter: nn.Module

    def __init__(self, role: str = "stage2"):
        super().__init__()
        self.role = role

    def build(self, student: Side, teacher: Side) -> None:
        d_S, h_S, w_S = student.map_shape(self.role)
        d_T, h_T, w_T = teacher.map_shape(self.role)
        self.adapter = regressor(d_S, d_T, (h_S, w_S), (h_T, w_T), relu=True)
        self.reads.student[self.role] = student.taps[self.role]
        self.reads.teacher[self.role] = teacher.taps[self.role]

    def terms(self, view: View) -> dict[str, Tensor]:
        return {self.name: fitnet_loss(self.adapter(view.student[self.role]), view.teacher[self.role])}
