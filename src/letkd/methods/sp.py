"""SP: images that look alike to the teacher should look alike to the student (Tung and Mori 2019)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from letkd.methods.base import Method, Side, View


def similarity(f: Float[Tensor, "b *s"]) -> Float[Tensor, "b b"]:
    """Inner products of the batch's flattened features, each row scaled to unit length."""
    flat = f.flatten(1)
    return F.normalize(flat @ flat.T, dim=1)


def sp_loss(f_S: Float[Tensor, "b *s"], f_T: Float[Tensor, "b *t"]) -> Float[Tensor, ""]:
    """Squared difference of the two similarity matrices, per pair of images.

        G(f) = f fᵀ, rows scaled to length 1        L = 1/b² Σ_ij (G(f_S)_ij − G(f_T)_ij)²

    Shapes need not match. The loss does not depend on the scale of the flattened features or on a rotation of them.
    """
    dtype = torch.promote_types(f_S.dtype, torch.float32)
    with torch.autocast(f_S.device.type, enabled=False):  # autocast would compute these products in half precision
        return (similarity(f_S.to(dtype)) - similarity(f_T.to(dtype))).square().mean()


class SP(Method):
    """`sp_loss` at the last map of each network. Adds nothing to the student.

    Args:
        role: of the maps, in both networks; default, as is usual: the last stage of each (`penultimate` if a network has no
            stages), which may be `stage3` in one and `stage4` in the other.

    Term: `sp`. Usual weight: 3000.
    """

    name: ClassVar[str] = "sp"
    paper: ClassVar[str] = "Tung, Mori, 2019"
    loss: ClassVar[str] = "squared difference of the batch's normalised similarity matrices"
    formulae: ClassVar = (sp_loss,)
    reads_logits: ClassVar[bool] = False

    def __init__(self, role: str | None = None):
        super().__init__()
        self.role = role
        self._roles = ("", "")

    def build(self, student: Side, teacher: Side) -> None:
        here, there = self._roles = self._last(student), self._last(teacher)
        self.reads.student[here] = student.taps[here]
        self.reads.teacher[there] = teacher.taps[there]

    def _last(self, side: Side) -> str:
        role = self.role or (side.stages() or ["penultimate"])[-1]
        side.map_shape(role)
        return role

    def terms(self, view: View) -> dict[str, Tensor]:
        here, there = self._roles
        return {self.name: sp_loss(view.student[here], view.teacher[there])}
