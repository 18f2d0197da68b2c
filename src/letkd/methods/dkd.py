"""DKD: Hinton's divergence split into target against rest and within the rest, each with its own weight (Zhao et al. 2022)."""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from letkd.errors import UnsupportedPair
from letkd.limits import Epochs, Number, Scale
from letkd.methods.base import Lessons, Method, Side, View
from letkd.methods.kd import standardise


def tckd(
    logits_S: Float[Tensor, "b C"], logits_T: Float[Tensor, "b C"], y: Int[Tensor, "b"], T: float = 4.0
) -> Float[Tensor, "b"]:
    """KL over (target, rest), per image: KL( (p_t, 1 − p_t) of the teacher ‖ (p_t, 1 − p_t) of the student ), both at temperature T.

    With `nckd`, per image: KD = TCKD + (1 − p_t) NCKD, p_t the teacher's probability of the target.
    """
    log_S, log_T = (_log_target_and_rest(_soft(logits, T), y) for logits in (logits_S, logits_T))
    return (log_T.exp() * (log_T - log_S)).sum(dim=1)


def nckd(
    logits_S: Float[Tensor, "b C"], logits_T: Float[Tensor, "b C"], y: Int[Tensor, "b"], T: float = 4.0
) -> Float[Tensor, "b"]:
    """KL over the classes other than the target, renormalised without it, per image.

    The target is left out by a mask. Common code lowers its logit by 1000 instead, which is the same within the precision of
    floats.
    """
    is_target = _is_target(logits_S, y)
    log_S, log_T = (
        F.log_softmax(_soft(logits, T).masked_fill(is_target, -torch.inf), dim=1).masked_fill(is_target, 0.0)
        for logits in (logits_S, logits_T)
    )
    return (log_T.exp() * (log_T - log_S)).sum(dim=1)  # at the target 1 · (0 − 0)


def dkd_loss(
    logits_S: Float[Tensor, "b C"],
    logits_T: Float[Tensor, "b C"],
    y: Int[Tensor, "b"],
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    T: float = 4.0,
) -> Float[Tensor, ""]:
    """T² · (α · TCKD + β · NCKD), averaged over the batch."""
    return T**2 * (alpha * tckd(logits_S, logits_T, y, T) + beta * nckd(logits_S, logits_T, y, T)).mean()


def _soft(logits: Tensor, T: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / T


def _is_target(logits: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, y[:, None], True)


def _log_target_and_rest(logits: Tensor, y: Tensor) -> Tensor:
    """log p_t and log (1 − p_t), the latter without the cancellation of 1 − p_t: [b 2]."""
    rest = logits.masked_fill(_is_target(logits, y), -torch.inf).logsumexp(dim=1, keepdim=True)
    return F.log_softmax(torch.cat([logits.gather(1, y[:, None]), rest], dim=1), dim=1)


class DKD(Method):
    """`dkd_loss` on the predictions, times a warm-up factor min(epoch / warmup, 1). Adds nothing to the student.

    Args:
        alpha: weight α of the target's part. Usual value: 1.
        beta: weight β of the rest. Usual value: 8, for some pairs 2 or 6; on ImageNet 0.5 or 2.
        T: temperature. Usual value: 4 on CIFAR, 1 on ImageNet.
        warmup: epochs until the full weight, 0 for none. Usual value: 20, on ImageNet 1. A batch without an epoch has the full
            weight; in your own loop, pass `letkd.Batch(x, y, epoch=…)`.
        standardise: standardise the logits of both networks first (Sun et al., CVPR 2024; see KD).

    Term: `dkd`. Usual weight: 1, with 1 for `ce`.
    """

    name: ClassVar[str] = "dkd"
    paper: ClassVar[str] = "Zhao et al., 2022"
    loss: ClassVar[str] = "T² · (α · target-class KL + β · non-target-class KL), warmed up"
    formulae: ClassVar = (tckd, nckd, dkd_loss)
    needs_labels: ClassVar[str] = "its target is the class of each image"

    def __init__(
        self, alpha: Number = 1.0, beta: Number = 8.0, *, T: Scale = 4.0, warmup: Epochs = 20, standardise: bool = False
    ):
        super().__init__()
        self.standardise = standardise
        self.alpha, self.beta, self.T, self.warmup = float(alpha), float(beta), float(T), int(warmup)

    def build(self, student: Side, teacher: Side) -> None:
        if student.num_classes < 3:
            raise UnsupportedPair(
                f"DKD compares the classes other than the target, and with {student.num_classes} classes only one is left, so there is "
                "nothing to compare; use KD"
            )

    def lessons(self) -> Lessons:
        return Lessons(vectors=("logits",))

    def terms(self, view: View) -> dict[str, Tensor]:
        factor = self.warmed_up(view.batch.epoch)
        logits_S, logits_T = view.student["logits"], view.teacher["logits"]
        if self.standardise:
            logits_S, logits_T = standardise(logits_S), standardise(logits_T)
        loss = partial(dkd_loss, alpha=self.alpha, beta=self.beta, T=self.T)
        return {self.name: factor * view.batch.over_labels(loss, logits_S, logits_T)}
