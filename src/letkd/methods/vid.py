"""VID: a variational bound on the mutual information of the two networks' maps (Ahn et al. 2019)."""

import math
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import RecipeError
from letkd.functional import fit_spatially
from letkd.limits import Scale
from letkd.methods.base import Method, Side, View, paired_stages


def vid_loss(
    mu: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b d h w"], alpha: Float[Tensor, "d"], eps: float = 1e-5
) -> Float[Tensor, ""]:
    """Negative log-likelihood, without its constant, of the teacher's map under a Gaussian with one variance per channel.

        σ_d² = softplus(α_d) + ε        L = mean over b, d, h, w of ½ [ (μ − f_T)² / σ_d² + log σ_d² ]

    Args:
        mu: μ, predicted from the student's map.
        alpha: unbounded parameters of the variances.
        eps: ε, a lower bound of the variances.
    """
    dtype = torch.promote_types(mu.dtype, torch.float32)
    var = F.softplus(alpha.to(dtype)) + eps  # [d]
    error = (mu.to(dtype) - f_T.to(dtype)).square().mean(dim=(0, 2, 3))  # [d]
    return 0.5 * (error / var + var.log()).mean()


def predictor(d_S: int, d_T: int) -> nn.Sequential:
    """μ of the student's map: three 1x1 convolutions without bias, d_S → d_T → d_T → d_T, ReLU between them."""
    widths = (d_S, d_T, d_T, d_T)
    convs = [nn.Conv2d(d_in, d_out, 1, bias=False) for d_in, d_out in pairwise(widths)]
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])


class VID(Method):
    """`vid_loss` at every stage, summed; the larger map is average-pooled first. The predictors are dropped at inference.

    Args:
        init_var: initial σ² of every channel. Usual value: 5.
        eps: lower bound of σ². Usual value: 1e-5.

    The variances are trained, too, as in the original. Term: `vid`. Usual weight: 1.
    """

    name: ClassVar[str] = "vid"
    paper: ClassVar[str] = "Ahn et al., 2019"
    loss: ClassVar[str] = (
        "negative log-likelihood of the teacher's map under a Gaussian predicted from the student's, summed over stages"
    )
    formulae: ClassVar = (vid_loss,)
    reads_logits: ClassVar[bool] = False

    def __init__(self, init_var: Scale = 5.0, eps: Scale = 1e-5):
        super().__init__()
        if init_var <= eps:
            raise RecipeError(f"VID with init_var={init_var:g}: the variance is at least eps={eps:g}; choose a larger init_var")
        self.init_var, self.eps = float(init_var), float(eps)
        self.predictor = nn.ModuleDict()
        self.alpha = nn.ParameterDict()

    def build(self, student: Side, teacher: Side) -> None:
        above = self.init_var - self.eps
        start = above + math.log(-math.expm1(-above))  # softplus(start) + eps = init_var
        self.predictor, self.alpha = nn.ModuleDict(), nn.ParameterDict()
        for role in paired_stages(student, teacher):
            d_S, d_T = student.map_shape(role)[0], teacher.map_shape(role)[0]
            self.predictor[role] = predictor(d_S, d_T)
            self.alpha[role] = nn.Parameter(torch.full((d_T,), start))
            self.reads.student[role] = student.taps[role]
            self.reads.teacher[role] = teacher.taps[role]

    def terms(self, view: View) -> dict[str, Tensor]:
        losses = []
        for role, predict in self.predictor.items():
            f_S, f_T = fit_spatially(view.student[role], view.teacher[role])
            losses.append(vid_loss(predict(f_S), f_T, self.alpha[role], self.eps))
        return {self.name: torch.stack(losses).sum()}
