"""TDD: tree-like decision distillation, with coarse decisions in early stages and fine ones in late stages (Song et al. 2021)."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.limits import Bytes, Count, Seed, Share
from letkd.methods.base import Fitting, Lessons, Method, Side, View
from letkd.methods.site import module_name
from letkd.supervision.tree import ClassTree


def group_loss(logits: Float[Tensor, "b m"], y: Int[Tensor, "b"], group: Int[Tensor, "C"]) -> Float[Tensor, ""]:
    """Cross-entropy with the group of the true class, each group weighted by 1 / its number of classes.

        Σ_i w_i · (−log softmax(logits_i)[group(y_i)]) / Σ_i w_i,  w_i = 1 / size(group(y_i))

    Groups are numbered from 0; logits without a group are not used. With a single group the loss is 0.
    """
    size = torch.bincount(group, minlength=logits.shape[1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(size == 0, -torch.inf)
    return F.cross_entropy(logits, group[y], weight=1 / size.clamp_min(1).to(logits.dtype))


class TDD(Method):
    """The student's stages learn to distinguish the groups of classes that the teacher's stages distinguish.

    Args:
        roles: of the stages, in both networks. The authors' example reads the BN before a block's sum in the teacher
            (`layer1.2.bn2` and so on) and stage outputs in the student; the default is stage outputs in both, which every
            network has. For the authors' choice: `teacher_taps={"stage1": "layer1.2.bn2", …}`.
        k: see `ClassTree`. The authors use 20.
        threshold: see `ClassTree`. The authors use 0.2.
        memory: see `ClassTree`; per stage.
        seed: see `ClassTree`.

    Each stage's map is averaged and passed to a linear layer, which is trained and dropped at inference. The number G of groups is
    known only after the fit, so the layer has a row per class, of which the first G are used. Term: `tdd`, the sum over stages; a
    stage whose tree has a single group adds 0. The authors use weight 0.1, with 0.1 for `ce` and 0.9 for `kd`.
    """

    name: ClassVar[str] = "tdd"
    paper: ClassVar[str] = "Song et al., 2021"
    loss: ClassVar[str] = "cross-entropy with the teacher's class groups, at every stage"
    formulae: ClassVar = (group_loss,)
    reads_logits: ClassVar[bool] = False
    needs_labels: ClassVar[str] = "its trees are those of the classes"

    def __init__(
        self,
        roles: Sequence[str] = ("stage1", "stage2", "stage3"),
        *,
        k: Count = 20,
        threshold: Share = 0.2,
        memory: Bytes = 2**30,
        seed: Seed = 1029,
    ):
        super().__init__()
        if isinstance(roles, str) or not roles or len(set(roles)) != len(roles):
            raise UnsupportedPair(f"TDD needs a list of roles, at least one and each only once; it got {roles!r}")
        self.roles = tuple(roles)
        self.trees = {role: ClassTree(k, threshold, memory=memory, seed=seed) for role in roles}
        self.tree = nn.ModuleDict({module_name(role): tree for role, tree in self.trees.items()})
        self.heads = nn.ModuleDict()

    def build(self, student: Side, teacher: Side) -> None:
        C = student.num_classes
        if C < 2:
            raise UnsupportedPair("TDD distinguishes groups of classes, but there is only one class")
        for role, tree in self.trees.items():
            tree.bind(f"{self.name}/{role}", d=teacher.map_shape(role)[0], C=C)
            self.heads[module_name(role)] = nn.Linear(student.map_shape(role)[0], C)
            self.reads.student[role] = student.taps[role]
            self.reads.teacher[role] = teacher.taps[role]

    def fittings(self) -> dict[str, Fitting[ClassTree]]:
        return {f"{self.name}/{role}": Fitting(tree, role, self.name) for role, tree in self.trees.items()}

    def lessons(self) -> Lessons:
        return Lessons()  # the groups are fitted; a step needs nothing from the teacher

    def terms(self, view: View) -> dict[str, Tensor]:
        losses = []
        for role, tree in self.trees.items():
            logits = self.heads[module_name(role)](view.student[role].mean(dim=(2, 3)))
            losses.append(view.batch.over_labels(partial(group_loss, group=tree.groups()), logits))
        return {self.name: torch.stack(losses).sum()}
