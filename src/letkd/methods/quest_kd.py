"""QUEST: predict the teacher's per-pixel labels from the student's features (Jain et al. 2020; letKD with α = 0)."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import nn

from letkd.functional import pixel_kl
from letkd.layer import CosineConv1x1
from letkd.layer.fused import log_partition
from letkd.methods.base import Side, View
from letkd.methods.per_pixel import PerPixelMethod, Scores
from letkd.methods.site import Site, module_name
from letkd.supervision import KMeansSupervision


class QUEST(PerPixelMethod):
    """KL(p_T ‖ p_S) at each site, p_S = softmax of scaled cosines with K templates. The predictor is dropped at inference.

    Args:
        sites: where labels are predicted; a site's `alpha` is not used.

    Terms: `kd/<role>` for each site.

    Examples:
        >>> QUEST([Site("stage2", KMeansSupervision(K=64, tau=0.1))]).term_names()
        ('kd/stage2',)
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Jain et al., QUEST, 2020"
    loss: ClassVar[str] = "KL(p_T ‖ p_S) at every pixel of each site"
    formulae: ClassVar = (pixel_kl,)

    def __init__(self, sites: Sequence[Site]):
        super().__init__(sites)
        self.predictor = nn.ModuleDict()

    def place_templates(self, site: Site, student: Side, d: int, K: int) -> None:
        self.predictor[module_name(site.role)] = CosineConv1x1(d, K, scale=site.scale_omega)
        self.reads.student[site.role] = student.taps[site.role]

    def templates(self, role: str) -> CosineConv1x1:
        """The predictor of a site."""
        found = self.predictor[module_name(role)]
        assert isinstance(found, CosineConv1x1)
        return found

    def measured_at(self, term: str) -> tuple[str, ...]:
        return (term.removeprefix("kd/"),)

    def scores(self, role: str, view: View) -> Scores:
        x, predictor = view.student[role], self.templates(role)
        omega = predictor.kernels()
        if not self.fused:
            return Scores(x, omega, a=predictor(x))
        # Normalised again: both uses have a gradient of their own. A shared one rounds differently, which changes the demo's row.
        return Scores(x, omega, log_Z=log_partition(x, predictor.kernels()))


def quest(K: int | Literal["auto"] = 4096, *, tau: float | Literal["auto"] = 1.0) -> QUEST:
    """QUEST at the penultimate layer with K-means labels, as in the paper's comparisons. QUEST's authors use τ = 5.

    Args:
        K: number of templates.
        tau: see `KMeansSupervision`.

    Examples:
        >>> list(quest(K=256).sites)
        ['penultimate']
    """
    return QUEST([Site("penultimate", KMeansSupervision(K, tau))])
