"""What QUEST and letKD share: the teacher's labels for every pixel of a few sites, and the loss that compares them with the student's."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.functional import GridMatch, match_to, pixel_kl
from letkd.methods.base import Fitting, Lessons, Method, Side, View, as_table, collected, construct
from letkd.methods.site import Site, module_name
from letkd.supervision import Supervision
from letkd.supervision.labels import as_maps, label_kl


@dataclass(frozen=True)
class Scores:
    """How the student's pixels match the templates of a site.

    Args:
        x: the student's map, as the templates see it.
        omega: kernels of the templates in use.
        a: all scores a_{k|i}; None in the fused form, which never computes all of them at once.
        log_Z: log Σ_k exp a_{k|i} of every pixel, in the fused form.
    """

    x: Tensor
    omega: Tensor
    a: Tensor | None = None
    log_Z: Tensor | None = None

    def all(self) -> Tensor:
        """The scores `a [b K h w]`."""
        if self.a is None:
            raise TypeError("the fused form does not compute all scores at once")
        return self.a


class PerPixelMethod(Method):
    """KL(p_T ‖ p_S) at every pixel of each site, p_S = softmax(a). A subclass defines where the templates are and returns their scores.

    Terms: `kd/<role>` for each of its `sites`.
    """

    reads_logits: ClassVar[bool] = False

    def __init__(self, sites: Sequence[Site]):
        super().__init__()
        roles, supervisions = [site.role for site in sites], {id(site.supervision) for site in sites}
        if not roles or not len(set(map(module_name, roles))) == len(supervisions) == len(roles):
            raise UnsupportedPair(f"{type(self).__name__} needs sites, each with its own role and supervision; it got {roles}")
        self.sites = {site.role: site for site in sites}
        self.supervision = nn.ModuleDict({module_name(site.role): site.supervision for site in sites})
        self._match: dict[str, GridMatch] = {}

    @abstractmethod
    def place_templates(self, site: Site, student: Side, d: int, K: int) -> None:
        """Make K templates of d channels for a site, and fill `self.reads.student` with what `scores` reads."""

    @abstractmethod
    def scores(self, role: str, view: View) -> Scores:
        """The scores at a site in this step."""

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
            d_T, *size_T = teacher.map_shape(self._teacher_role(role))
            self._match[role] = GridMatch.of((size_T[0], size_T[1]), (size[0], size[1]), role, match=site.match)
            site.supervision.pixels = None if self.images is None else self.images * size[0] * size[1]
            site.supervision.bind(role, d=d_T, C=student.num_classes)
        for role, site in self.sites.items():
            self.reads.teacher[self._teacher_role(role)] = teacher.taps[self._teacher_role(role)]
            self.place_templates(site, student, student.map_shape(role)[0], site.supervision.num_labels())

    def _teacher_role(self, role: str) -> str:
        return role + self.sites[role].supervision.reads

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
        roles = [role for role in self.sites if f"kd/{role}" not in view.unused]
        losses = {role: partial(self._loss, role, view, self.scores(role, view)) for role in roles}
        return {f"kd/{role}": view.over_images(self.sites[role].supervision, loss) for role, loss in losses.items()}

    def _loss(self, role: str, view: View, scores: Scores, images: Tensor, y: Tensor) -> Tensor:
        """L_KD over the images at these positions, with classes `y`."""
        supervision, cached = self.sites[role].supervision, view.labels.get(role)
        size = (scores.x.shape[-2], scores.x.shape[-1])
        y = torch.zeros_like(view.batch.y).index_copy(0, images, y)  # the values for other images are not used
        if scores.log_Z is not None:
            labels = cached or supervision.labels(self._f_T(role, view, size), y)  # Alg. 1, online; Alg. 2, online
            return label_kl(labels, scores.x, scores.omega, scores.log_Z, images)  # Alg. 3: L_KD
        p_T = as_maps(cached, size) if cached else supervision.p_T(self._f_T(role, view, size), y)
        return pixel_kl(p_T[images], scores.all()[images])  # Alg. 3: L_KD, p_S = softmax(a)

    def _f_T(self, role: str, view: View, size: tuple[int, int]) -> Tensor:
        return match_to(view.teacher[self._teacher_role(role)], size, role, match=self.sites[role].match)
