"""KD: match the teacher's softened predictions (Hinton et al. 2015)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.errors import UnsupportedPair
from letkd.limits import Scale
from letkd.methods.base import Lessons, Method, Side, View


def kd_loss(logits_S: Float[Tensor, "b C"], logits_T: Float[Tensor, "b C"], T: float = 4.0) -> Float[Tensor, ""]:
    """T² · KL(softmax(logits_T / T) ‖ softmax(logits_S / T)), summed over classes, averaged over the batch."""
    dtype = torch.promote_types(logits_S.dtype, torch.float32)
    log_p_S = F.log_softmax(logits_S.to(dtype) / T, dim=1)
    log_p_T = F.log_softmax(logits_T.to(dtype) / T, dim=1)
    return T**2 * F.kl_div(log_p_S, log_p_T, reduction="batchmean", log_target=True)  # (3.1): scaled soft-max, KL


def standardise(logits: Float[Tensor, "b C"]) -> Float[Tensor, "b C"]:
    """Logit standardisation (Sun et al., CVPR 2024): Z(z) = (z − mean z) / (s + 1e-7) per image, s² = 1/(C−1) Σ_c (z_c − mean z)².

    A shift and a positive factor on an image's logits have no effect. Gradients flow through mean and s.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (z - z.mean(dim=1, keepdim=True)) / (z.std(dim=1, keepdim=True) + 1e-7)


def need_three_classes(student: Side) -> None:
    """Standardised logits of two classes are always ±1/√2, so they carry no information."""
    if student.num_classes < 3:
        raise UnsupportedPair(
            f"standardised logits of {student.num_classes} classes are the same for every image; use standardise=False"
        )


class KD(Method):
    """Softened predictions of the teacher as targets.

    Args:
        T: temperature. Usual value: 4 on CIFAR, 1 on ImageNet; with `standardise`, 2.
        standardise: standardise the logits of both networks first (Sun et al., CVPR 2024).

    Term: `kd`. Usual weight: 0.9, with 0.1 for `ce`; with `standardise`, 9, with 0.1 for `ce`.

    Examples:
        >>> import letkd
        >>> student, teacher = (letkd.create_model(name, num_classes=10) for name in ("resnet8_tiny", "resnet14_tiny"))
        >>> distiller = letkd.Distiller(student, teacher, KD(T=4.0), weights={"kd": 0.9, "ce": 0.1})
        >>> distiller.weights
        {'ce': 0.1, 'kd': 0.9}
    """

    name: ClassVar[str] = "kd"
    paper: ClassVar[str] = "Hinton, Vinyals, Dean, 2015"
    loss: ClassVar[str] = "T² · KL(teacher's ‖ student's softened predictions)"
    formulae: ClassVar = (kd_loss, standardise)

    def __init__(self, T: Scale = 4.0, *, standardise: bool = False):
        super().__init__()
        self.T, self.standardise = float(T), standardise

    def build(self, student: Side, teacher: Side) -> None:
        if self.standardise:
            need_three_classes(student)

    def lessons(self) -> Lessons:
        return Lessons(vectors=("logits",))

    def terms(self, view: View) -> dict[str, Tensor]:
        logits_S, logits_T = view.student["logits"], view.teacher["logits"]
        if self.standardise:
            logits_S, logits_T = standardise(logits_S), standardise(logits_T)
        return {self.name: kd_loss(logits_S, logits_T, self.T)}
