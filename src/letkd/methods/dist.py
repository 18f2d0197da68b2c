"""DIST: match the relations between predictions, by correlation instead of KL divergence (Huang et al. 2022)."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from letkd.errors import UnsupportedPair
from letkd.limits import Number, Scale
from letkd.methods.base import Lessons, Method, Side, View


def correlation(u: Float[Tensor, "n m"], v: Float[Tensor, "n m"]) -> Float[Tensor, "n"]:
    """Pearson's correlation of each row: ρ(u, v) = Σ (u−ū)(v−v̄) / (‖u−ū‖ ‖v−v̄‖ + 1e-8).

    A shift and a positive factor on a row have no effect.
    """
    u, v = (rows - rows.mean(dim=1, keepdim=True) for rows in (u, v))
    return (u * v).sum(dim=1) / (u.norm(dim=1) * v.norm(dim=1) + 1e-8)


def dist_loss(
    logits_S: Float[Tensor, "b C"], logits_T: Float[Tensor, "b C"], T: float = 4.0, *, beta: float = 1.0, gamma: float = 1.0
) -> Float[Tensor, ""]:
    """Correlation of the predictions, image by image (inter-class) and class by class over the batch (intra-class).

        q = softmax(logits / T)      L = T² · [ β · (1 − mean_i ρ(q_S, q_T rows i)) + γ · (1 − mean_c ρ(q_S, q_T columns c)) ]

    The second part depends on the batch: with a single image it is constant.
    """
    dtype = torch.promote_types(logits_S.dtype, torch.float32)
    q_S, q_T = (torch.softmax(logits.to(dtype) / T, dim=1) for logits in (logits_S, logits_T))
    inter = 1 - correlation(q_S, q_T).mean()
    intra = 1 - correlation(q_S.T, q_T.T).mean()
    return T**2 * (beta * inter + gamma * intra)


class DIST(Method):
    """`dist_loss` on the predictions. Adds nothing to the student.

    Args:
        T: temperature. The authors use 4 on CIFAR, 1 on ImageNet.
        beta: weight β of the correlation over classes. The authors use 1.
        gamma: weight γ of the correlation over images. The authors use 1.

    With several processes, each correlates its own part of the batch. Term: `dist`. The authors use weight 2, with 1 for `ce`.
    """

    name: ClassVar[str] = "dist"
    paper: ClassVar[str] = "Huang et al., 2022"
    loss: ClassVar[str] = "T² · (1 − correlation of the predictions per image, plus the same per class over the batch)"
    formulae: ClassVar = (correlation, dist_loss)

    def __init__(self, T: Scale = 4.0, *, beta: Number = 1.0, gamma: Number = 1.0):
        super().__init__()
        self.T, self.beta, self.gamma = float(T), float(beta), float(gamma)

    def build(self, student: Side, teacher: Side) -> None:
        if student.num_classes < 3:
            raise UnsupportedPair(
                f"DIST correlates predictions over classes, and those of {student.num_classes} classes are always fully correlated; use KD"
            )

    def lessons(self) -> Lessons:
        return Lessons(vectors=("logits",))

    def terms(self, view: View) -> dict[str, Tensor]:
        logits_S, logits_T = view.student["logits"], view.teacher["logits"]
        return {self.name: dist_loss(logits_S, logits_T, self.T, beta=self.beta, gamma=self.gamma)}
