"""ReviewKD: the student's shallow maps are fused with its deeper ones, then compared with the teacher's (Chen et al. 2021)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import DataError
from letkd.limits import Count, Epochs
from letkd.methods.ab import preacts
from letkd.methods.base import Method, Side, View, paired_stages


def hcl_loss(o_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b d h w"]) -> Float[Tensor, ""]:
    """Hierarchical context loss: squared errors of the maps and of their averages over increasingly coarse grids.

        L = [ MSE(o_S, f_T) + Σ_l w_l MSE(P_l o_S, P_l f_T) ] / (1 + Σ_l w_l)        l ∈ {4, 2, 1}, l < min(h, w)

    P_l averages to l x l; w_l is ½ for the first l used, and half as large for each further l. MSE is the mean over all elements.
    """
    dtype = torch.promote_types(o_S.dtype, torch.float32)
    o_S, f_T = o_S.to(dtype), f_T.to(dtype)
    loss, weight, total = F.mse_loss(o_S, f_T), 1.0, 1.0
    for size in (4, 2, 1):
        if size < min(f_T.shape[-2:]):
            weight /= 2
            loss = loss + weight * F.mse_loss(F.adaptive_avg_pool2d(o_S, size), F.adaptive_avg_pool2d(f_T, size))
            total += weight
    return loss / total


class Fusion(nn.Module):
    """Attention-based fusion of a student's map with the residual r of the deeper maps, in the teacher's shape.

        u = BN(1x1(f_S))        u ← a₁ u + a₂ r,  (a₁, a₂) = sigmoid(1x1([u, r]))        o = BN(3x3(u))

    Args:
        d_S, d_T: channels of the two maps.
        m: channels in between.
        last: whether this is the deepest map, so that there is no r.
    """

    def __init__(self, d_S: int, d_T: int, m: int, *, last: bool):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(d_S, m, 1, bias=False), nn.BatchNorm2d(m))
        self.attention = None if last else nn.Conv2d(2 * m, 2, 1)
        self.leave = nn.Sequential(nn.Conv2d(m, d_T, 3, padding=1, bias=False), nn.BatchNorm2d(d_T))
        for conv in (self.enter[0], self.leave[0]):
            nn.init.kaiming_uniform_(conv.get_parameter("weight"), a=1)

    def forward(self, f_S: Tensor, r: Tensor | None, size_T: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """o and the residual for the next shallower map, both in the height and width of the teacher's map."""
        u = self.enter(f_S)
        if self.attention is not None and r is not None:
            r = F.interpolate(r, size=u.shape[-2:], mode="nearest")
            a_1, a_2 = torch.sigmoid(self.attention(torch.cat([u, r], dim=1))).split(1, dim=1)
            u = a_1 * u + a_2 * r
        if u.shape[-2:] != size_T:
            u = F.interpolate(u, size=size_T, mode="nearest")
        return self.leave(u), u


class ReviewKD(Method):
    """`hcl_loss` between the fused maps of the student and the teacher's, summed. The fusions are dropped at inference.

    Reads the student's stages after their activation, the teacher's before it, and both pooled vectors as 1x1 maps.

    Args:
        mid: largest number of channels inside the fusions; the student's pooled width if that is smaller. The authors use 512, and
            256 for RN50-MobileNet on ImageNet.
        warmup: epochs until the full weight, 0 for none: the factor is min((epoch − 1) / warmup, 1), 0 in the first epoch. The
            authors use 20, and 0 on ImageNet. In your own loop, pass `letkd.Batch(x, y, epoch=…)`; without an epoch it is 1.

    Term: `reviewkd`. The authors use weights from 0.6 to 8, depending on the pair, with 1 for `ce`.
    """

    name: ClassVar[str] = "reviewkd"
    paper: ClassVar[str] = "Chen, Liu, Zhao, Jia, 2021"
    loss: ClassVar[str] = "squared errors over increasingly coarse grids between fused student's and teacher's maps, warmed up"
    formulae: ClassVar = (Fusion, hcl_loss)
    reads_logits: ClassVar[bool] = False

    def __init__(self, mid: Count = 512, *, warmup: Epochs = 20):
        super().__init__()
        self.mid, self.warmup = mid, int(warmup)
        self.fusions = nn.ModuleList()

    def build(self, student: Side, teacher: Side) -> None:
        preacts(teacher, "ReviewKD")  # every stage must have one
        stages = paired_stages(student, teacher)
        before = [f"{role}.preact" for role in stages]
        widths = [(student.map_shape(s)[0], teacher.map_shape(t)[0]) for s, t in zip(stages, before, strict=True)]
        widths.append((d := student.width("pooled"), teacher.width("pooled")))
        self.fusions = nn.ModuleList(Fusion(*w, min(self.mid, d), last=k == len(stages)) for k, w in enumerate(widths))
        self.reads.student = {role: student.taps[role] for role in [*stages, "pooled"]}
        self.reads.teacher = {role: teacher.taps[role] for role in [*before, "pooled"]}

    def outputs(self, maps_S: Sequence[Tensor], maps_T: Sequence[Tensor]) -> list[Tensor]:
        """The fused maps of the student, from shallow to deep, in the teacher's shapes; computed from the deepest map on."""
        found, r = [], None
        for fusion, f_S, f_T in zip(reversed(self.fusions), reversed(maps_S), reversed(maps_T), strict=True):
            o, r = fusion(f_S, r, f_T.shape[-2:])
            found.append(o)
        return found[::-1]

    def terms(self, view: View) -> dict[str, Tensor]:
        maps_S = [_as_map(view.student[role]) for role in self.reads.student]
        maps_T = [_as_map(view.teacher[role]) for role in self.reads.teacher]
        if self.training and len(maps_S[0]) < 2:
            raise DataError("ReviewKD normalises over the batch, but this one has a single image; give every process two")
        losses = [hcl_loss(o, f_T) for o, f_T in zip(self.outputs(maps_S, maps_T), maps_T, strict=True)]
        factor = self.warmed_up(None if view.batch.epoch is None else view.batch.epoch - 1)
        return {self.name: factor * torch.stack(losses).sum()}


def _as_map(f: Tensor) -> Tensor:
    return f if f.ndim == 4 else f[:, :, None, None]
