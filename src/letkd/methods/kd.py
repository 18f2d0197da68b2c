"""KD: match the teacher's softened predictions (Hinton et al. 2015)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.methods.base import Lessons, Method, View


def kd_loss(logits_S: Float[Tensor, "b C"], logits_T: Float[Tensor, "b C"], T: float = 4.0) -> Float[Tensor, ""]:
    """T² · KL(softmax(logits_T / T) ‖ softmax(logits_S / T)), summed over classes, averaged over the batch."""
    dtype = torch.promote_types(logits_S.dtype, torch.float32)
    log_p_S = F.log_softmax(logits_S.to(dtype) / T, dim=1)
    log_p_T = F.log_softmax(logits_T.to(dtype) / T, dim=1)
    return T**2 * F.kl_div(log_p_S, log_p_T, reduction="batchmean", log_target=True)  # (3.1): scaled soft-max, KL


class KD(Method):
    """Softened predictions of the teacher as targets.

    Args:
        T: temperature. The field uses 4 on CIFAR, 1 on ImageNet.

    Term: `kd`. The field weighs it 0.9 beside 0.1 for `ce`.
    """

    name: ClassVar[str] = "kd"
    paper: ClassVar[str] = "Hinton, Vinyals, Dean, 2015"
    loss: ClassVar[str] = "T² · KL(teacher's ‖ student's softened predictions)"
    formulae: ClassVar = (kd_loss,)

    def __init__(self, T: float = 4.0):
        super().__init__()
        self.T = float(T)

    def lessons(self) -> Lessons:
        return Lessons(vectors=("logits",))

    def terms(self, view: View) -> dict[str, Tensor]:
        return {"kd": kd_loss(view.student["logits"], view.teacher["logits"], self.T)}
