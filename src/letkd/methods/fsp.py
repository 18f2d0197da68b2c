"""FSP: match how features flow from one stage to the next (Yim et al. 2017, flow of solution procedure)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from letkd.errors import UnsupportedPair
from letkd.functional import fit_spatially
from letkd.methods.base import Method, Side, View, paired_stages


def fsp_matrix(lower: Float[Tensor, "b d h w"], upper: Float[Tensor, "b e H W"]) -> Float[Tensor, "b e d"]:
    """Inner product of each channel of the upper map with each channel of the lower map: G_ed = 1/n Σ_i upper_e(i) · lower_d(i).

    The larger map is average-pooled to the smaller one's size first; n is its number of pixels.
    """
    dtype = torch.promote_types(lower.dtype, torch.float32)
    lower, upper = fit_spatially(lower.to(dtype), upper.to(dtype))
    with torch.autocast(lower.device.type, enabled=False):  # autocast would multiply in half precision
        return torch.einsum("behw,bdhw->bed", upper, lower) / (lower.shape[-2] * lower.shape[-1])


def fsp_loss(features_S: Sequence[Tensor], features_T: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Σ over consecutive maps of mean (G_S − G_T)², the mean over images and both channels; G is `fsp_matrix`.

    Args:
        features_S: the student's maps [b d h w], from input to output. Their sizes may differ from the teacher's.
        features_T: the teacher's maps, with the same numbers of channels.
    """
    pairs = zip(pairwise(features_S), pairwise(features_T), strict=True)
    return torch.stack([(fsp_matrix(*ours) - fsp_matrix(*theirs)).square().mean() for ours, theirs in pairs]).sum()


class FSP(Method):
    """`fsp_loss` over stem and stages. Adds nothing to the student, which must have the teacher's numbers of channels.

    Term: `fsp`. Usual training: 30 epochs with this term alone, which does not train the classifier, then cross-entropy alone.
    """

    name: ClassVar[str] = "fsp"
    paper: ClassVar[str] = "Yim et al., 2017"
    loss: ClassVar[str] = "squared difference of the products between consecutive stages, before the main training"
    formulae: ClassVar = (fsp_matrix, fsp_loss)
    reads_logits: ClassVar[bool] = False

    def build(self, student: Side, teacher: Side) -> None:
        roles = ["stem", *paired_stages(student, teacher)]
        ours, theirs = ([side.map_shape(role)[0] for role in roles] for side in (student, teacher))
        if ours != theirs:
            raise UnsupportedPair(
                "FSP compares channel with channel, so both networks need the same channels; from stem to last stage the student "
                f"{type(student.model).__name__} has {', '.join(map(str, ours))} and the teacher {type(teacher.model).__name__} "
                f"{', '.join(map(str, theirs))}"
            )
        self.reads.student = {role: student.taps[role] for role in roles}
        self.reads.teacher = {role: teacher.taps[role] for role in roles}

    def terms(self, view: View) -> dict[str, Tensor]:
        roles = self.reads.student
        return {self.name: fsp_loss([view.student[role] for role in roles], [view.teacher[role] for role in roles])}
