"""AT: match where the networks look, stage by stage (Zagoruyko and Komodakis 2017)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.functional import fit_spatially
from letkd.methods.base import Method, Side, View, paired_stages


def attention(f: Float[Tensor, "b d h w"]) -> Float[Tensor, "b n"]:
    """Mean over channels of the squared map, as one vector of unit length per image: n = h·w."""
    return F.normalize(f.square().mean(dim=1).flatten(1), dim=1, eps=1e-12)


def at_loss(f_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b e H W"]) -> Float[Tensor, ""]:
    """Mean over images and positions of the squared difference of the attentions; the larger map is average-pooled first.

        Q(f) = mean_d f_d² ∈ R^n        L = 1/(b·n) Σ_b ‖ Q(f_S)/‖Q(f_S)‖ − Q(f_T)/‖Q(f_T)‖ ‖²

    Channel counts need not match. The loss does not depend on the order of the channels or on the scale of a map.
    """
    dtype = torch.promote_types(f_S.dtype, torch.float32)
    f_S, f_T = fit_spatially(f_S.to(dtype), f_T.to(dtype))
    return (attention(f_S) - attention(f_T)).square().mean()


class AT(Method):
    """`at_loss` at every stage, summed. Adds nothing to the student.

    Term: `at`. Usual weight: 1000.
    """

    name: ClassVar[str] = "at"
    paper: ClassVar[str] = "Zagoruyko, Komodakis, 2017"
    loss: ClassVar[str] = "squared difference of normalised attention maps, summed over stages"
    formulae: ClassVar = (at_loss,)
    reads_logits: ClassVar[bool] = False

    def build(self, student: Side, teacher: Side) -> None:
        for role in paired_stages(student, teacher):
            self.reads.student[role] = student.taps[role]
            self.reads.teacher[role] = teacher.taps[role]

    def terms(self, view: View) -> dict[str, Tensor]:
        losses = [at_loss(view.student[role], view.teacher[role]) for role in self.reads.student]
        return {self.name: torch.stack(losses).sum()}
