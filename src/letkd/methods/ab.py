"""AB: match where the teacher's neurons are active, before the activation (Heo et al. 2019, activation boundaries)."""

import re
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.limits import Number
from letkd.methods.base import Method, Side, View
from letkd.methods.fitnet import regressor


def ab_loss(preacts_S: Sequence[Tensor], preacts_T: Sequence[Tensor], m: float = 1.0) -> Float[Tensor, ""]:
    """Push the student's pre-activations s beyond the margin m, to the side of 0 where the teacher's t are.

        L = 3/1000 · 1/b · Σ_{i=0}^{n−1} 2^(i−n+1) · Σ ( (s+m)² [s > −m, t ≤ 0] + (s−m)² [s ≤ m, t > 0] )

    The inner sum runs over all elements of the maps of stage i, which have the same shape in both networks.

    Args:
        preacts_S: the student's maps [b d h w], from the first stage to the last, in the teacher's shapes.
        preacts_T: the teacher's.
        m: margin.
    """
    n = len(preacts_T)
    losses = [2.0 ** (i - n + 1) * _beyond(s, t, m) for i, (s, t) in enumerate(zip(preacts_S, preacts_T, strict=True))]
    return 3 / 1000 * torch.stack(losses).sum() / len(preacts_T[0])


def _beyond(s: Float[Tensor, "b d h w"], t: Float[Tensor, "b d h w"], m: float) -> Float[Tensor, ""]:
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    too_high = (s + m).square() * ((s > -m) & (t <= 0))
    too_low = (s - m).square() * ((s <= m) & (t > 0))
    return (too_high + too_low).sum()


class AB(Method):
    """`ab_loss` over the stages' pre-activations. Connectors are dropped at inference.

    If channels and sizes of a stage are equal, it needs no connector; otherwise the connector is FitNet's adapter without ReLU.

    Args:
        m: margin. Usual value: 1.

    Term: `ab`. Usual training: 30 epochs with this term alone, which does not train the classifier, then cross-entropy alone.
    """

    name: ClassVar[str] = "ab"
    paper: ClassVar[str] = "Heo et al., 2019"
    loss: ClassVar[str] = "margin loss on which side of zero each pre-activation lies, before the main training"
    formulae: ClassVar = (ab_loss,)
    reads_logits: ClassVar[bool] = False

    def __init__(self, m: Number = 1.0):
        super().__init__()
        self.m = float(m)
        self.connectors = nn.ModuleList()

    def build(self, student: Side, teacher: Side) -> None:
        roles = preacts(student, "AB")
        if roles != preacts(teacher, "AB"):
            raise UnsupportedPair(
                f"AB compares networks stage by stage, and the student {type(student.model).__name__} has {len(roles)} "
                f"pre-activation maps, the teacher {type(teacher.model).__name__} {len(preacts(teacher, 'AB'))}; name equally many by taps"
            )
        self.connectors = nn.ModuleList(_connector(student.map_shape(role), teacher.map_shape(role)) for role in roles)
        self.reads.student = {role: student.taps[role] for role in roles}
        self.reads.teacher = {role: teacher.taps[role] for role in roles}

    def terms(self, view: View) -> dict[str, Tensor]:
        roles = self.reads.student
        preacts_S = [connect(view.student[role]) for role, connect in zip(roles, self.connectors, strict=True)]
        return {self.name: ab_loss(preacts_S, [view.teacher[role] for role in roles], self.m)}


def _connector(shape_S: tuple[int, int, int], shape_T: tuple[int, int, int]) -> nn.Module:
    if shape_S == shape_T:
        return nn.Identity()
    return regressor(shape_S[0], shape_T[0], shape_S[1:], shape_T[1:], relu=False)


def preacts(side: Side, method: str) -> list[str]:
    """The roles `stage1.preact` … of a network, from input to output; every stage must have one."""
    found = [role for role in side.taps if re.fullmatch(r"stage\d+\.preact", role)]
    without = [stage for stage in side.stages() if f"{stage}.preact" not in found]
    if without or not found:
        at = f" at {', '.join(without)}" if without else ""
        raise UnsupportedPair(
            f"{method} compares maps before their activation, and the {side.who} {type(side.model).__name__} has none{at}; if it "
            f"has such maps, name them by taps ({without[0] if without else 'stage1'}.preact)"
        )
    return sorted(found, key=lambda role: int(role[5:].removesuffix(".preact")))
