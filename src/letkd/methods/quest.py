"""QUEST: predict the teacher's per-pixel labels from the student's features (Jain et al. 2020; the paper's letKD with α = 0)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.functional import GridMatch, match_to, pixel_kl
from letkd.layer import CosineConv1x1
from letkd.layer.fused import log_partition
from letkd.methods.base import Fitting, Lessons, Method, Side, View, as_table, collected, construct
from letkd.methods.site import Site
from letkd.supervision import KMeansSupervision, Supervision
from letkd.supervision.labels import as_maps, label_kl


class QUEST(Method):
    """KL(p_T ‖ p_S) at each site, p_S = softmax of scaled cosines with K templates. The predictor is dropped at inference.

    Args:
        sites: where; a site's `alpha` plays no part here.

    Terms: `kd/<role>` for each site.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Jain et al., QUEST, 2020"
    loss: ClassVar[str] = "KL(p_T ‖ p_S) at every pixel of each site"
    formulae: ClassVar = (pixel_kl,)
    reads_logits: ClassVar[bool] = False

    def __init__(self, sites: Sequence[Site]):
        super().__init__()
        roles = [site.role for site in sites]
        if not roles or len(set(roles)) != len(roles):
            raise UnsupportedPair(f"{type(self).__name__} needs one site or more, each role once; it was given {roles}")
        self.sites = {site.role: site for site in sites}
        self.supervision = nn.ModuleDict({module_name(site.role): site.supervision for site in sites})
        self.predictor = nn.ModuleDict()
        self._omega: dict[str, CosineConv1x1] = {}  # the templates by role, wherever they are registered
        self._match: dict[str, GridMatch] = {}

    @classmethod
    def from_recipe(cls, table: Any) -> Self:
        table, sites, wrong = as_table(table, cls.name), [], []
        with collected(wrong):
            for role, site in as_table(table.get("sites", {}), f"{cls.name}.sites").items():
                with collected(wrong):
                    sites.append(Site.from_recipe(role, site))
        return construct(cls, {**table, "sites": sites}, cls.name, wrong=wrong)

    def build(self, student: Side, teacher: Side) -> None:
        for role, site in self.sites.items():
            _, *size = student.map_shape(role)
            d_T, *size_T = teacher.map_shape(role + site.supervision.reads)
            self._match[role] = GridMatch.of((size_T[0], size_T[1]), (size[0], size[1]), role, match=site.match)
            site.supervision.pixels = None if self.images is None else self.images * size[0] * size[1]
            site.supervision.bind(role, d=d_T, C=student.num_classes)
        for role, site in self.sites.items():
            self.reads.teacher[self._teacher_role(role)] = teacher.taps[self._teacher_role(role)]
            self._place(site, student, student.map_shape(role)[0], site.supervision.num_labels())

    def _place(self, site: Site, student: Side, d: int, K: int) -> None:
        self._omega[site.role] = self.predictor[module_name(site.role)] = CosineConv1x1(d, K, scale=site.scale_omega)
        self.reads.student[site.role] = student.taps[site.role]

    def _a(self, role: str, view: View) -> Tensor:
        return self._omega[role](view.student[role])

    def _log_Z(self, role: str, view: View) -> Tensor:
        return log_partition(view.student[role], self._omega[role].kernels())

    def _student_role(self, role: str) -> str:
        return role  # of the student's map that the templates match

    def _teacher_role(self, role: str) -> str:
        return role + self.sites[role].supervision.reads

    def _f_T(self, role: str, view: View, x: Tensor) -> Tensor:
        f_T, size = view.teacher[self._teacher_role(role)], (x.shape[-2], x.shape[-1])
        return match_to(f_T, size, role, match=self.sites[role].match)

    def fittings(self) -> dict[str, Fitting[Supervision]]:
        return {
            role: Fitting(site.supervision, self._teacher_role(role), f"kd/{role}", self._match[role])
            for role, site in self.sites.items()
        }

    def lessons(self) -> Lessons:
        return Lessons(labels=self.fittings())

    def term_names(self) -> tuple[str, ...]:
        return tuple(f"kd/{role}" for role in self.sites)

    def terms(self, view: View) -> dict[str, Tensor]:
        losses = {role: partial(self._loss, role, site, view) for role, site in self.sites.items()}
        return {f"kd/{role}": view.over_images(self.sites[role].supervision, loss) for role, loss in losses.items()}

    def _loss(self, role: str, site: Site, view: View, images: Tensor, y: Tensor) -> Tensor:
        x, held = view.student[self._student_role(role)], view.labels.get(role)
        y = torch.zeros_like(view.batch.y).index_copy(0, images, y)  # the others are left out
        if self.fused:
            labels = held or site.supervision.labels(self._f_T(role, view, x), y)  # Alg. 1, online; Alg. 2, online
            return label_kl(labels, x, self._omega[role].kernels(), self._log_Z(role, view), images)  # Alg. 3: L_KD
        p_T = as_maps(held, (x.shape[-2], x.shape[-1])) if held else site.supervision.p_T(self._f_T(role, view, x), y)
        return pixel_kl(p_T[images], self._a(role, view)[images])  # Alg. 3: L_KD, p_S = softmax(a)


def module_name(role: str) -> str:
    """A role as a module's name: without dots."""
    return role.replace(".", "_")


def quest(K: int | Literal["auto"] = 4096, *, tau: float | Literal["auto"] = 1.0) -> QUEST:
    """QUEST at the penultimate layer with K-means labels, as the paper compares with. QUEST itself used τ = 5."""
    return QUEST([Site("penultimate", KMeansSupervision(K, tau))])
