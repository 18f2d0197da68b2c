"""SRD: a linear projector, batch normalisation and a log-sum distance (Miles and Mikolajczyk 2024)."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import DataError
from letkd.limits import Scale
from letkd.methods.base import Lessons, Method, Side, View


def normalise(p: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Batch normalisation without affine part: N(p) = (p − mean_i p) / √(1/b Σ_i (p − mean_i p)² + 1e-4), per channel."""
    var, mean = torch.var_mean(p, dim=0, correction=0, keepdim=True)
    return (p - mean) / (var + 1e-4).sqrt()


def srd_loss(r_S: Float[Tensor, "b d"], p_T: Float[Tensor, "b d"], eps: float = 1e-5) -> Float[Tensor, ""]:
    """L = log( Σ_ij |N(r_S)_ij − N(p_T)_ij|⁴ + ε ): the sum runs over the batch and the channels.

    A shift and a positive factor on a channel have no effect, except through the 1e-4 in N. A factor on the differences only shifts L,
    so its gradient does not shrink as the student improves.

    Args:
        r_S: the student's pooled vectors after the projector.
        p_T: the teacher's pooled vectors.
        eps: ε, which bounds the logarithm if the two agree.
    """
    dtype = torch.promote_types(r_S.dtype, torch.float32)
    return torch.log((normalise(r_S.to(dtype)) - normalise(p_T.to(dtype))).pow(4).sum() + eps)


class SRD(Method):
    """`srd_loss` on the pooled vectors. The projector is dropped at inference.

    Args:
        eps: see `srd_loss`.

    The projector has no bias: batch normalisation would remove it. With several processes, each normalises its own part of
    the batch. Term: `srd`. The authors use weight 2, with 1 for `ce` and 1 for `kd` at T = 1.
    """

    name: ClassVar[str] = "srd"
    paper: ClassVar[str] = "Miles, Mikolajczyk, 2024"
    loss: ClassVar[str] = (
        "logarithm of the summed fourth powers between projected student's and teacher's normalised pooled vectors"
    )
    formulae: ClassVar = (normalise, srd_loss)
    reads_logits: ClassVar[bool] = False
    least_images: ClassVar[int] = 2
    projector: nn.Linear

    def __init__(self, eps: Scale = 1e-5):
        super().__init__()
        self.eps = float(eps)

    def build(self, student: Side, teacher: Side) -> None:
        self.projector = nn.Linear(student.width("pooled"), teacher.width("pooled"), bias=False)
        self.reads.student["pooled"] = student.taps["pooled"]
        self.reads.teacher["pooled"] = teacher.taps["pooled"]

    def lessons(self) -> Lessons:
        return Lessons(vectors=("pooled",))

    def terms(self, view: View) -> dict[str, Tensor]:
        p_S, p_T = (features["pooled"].flatten(1) for features in (view.student, view.teacher))
        if len(p_S) < self.least_images:
            raise DataError("SRD normalises over the batch, but this batch has a single image; give every process at least two")
        with torch.autocast(p_S.device.type, enabled=False):
            r_S = self.projector(p_S.to(self.projector.weight.dtype))
        return {self.name: srd_loss(r_S, p_T, self.eps)}
