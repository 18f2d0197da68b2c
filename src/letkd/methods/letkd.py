"""letKD: the teacher's knowledge inside the student (section 4 of the paper)."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import nn

from letkd.errors import TapError
from letkd.functional import pixel_kl
from letkd.layer import KDLayer
from letkd.methods.base import Side, View
from letkd.methods.per_pixel import PerPixelMethod, Scores
from letkd.methods.site import SHARP, Site, module_name
from letkd.supervision import KMeansSupervision, SubclassSupervision
from letkd.taps import Tap


class LetKD(PerPixelMethod):
    """A KD layer at each site *inside* the student: the teacher supervises its templates, and the layer feeds the knowledge forward.

        x ─ ω ─ a ─ BN-ReLU ─ p ─ ν ─ x′        x̂ = x + α x′        L_KD = KL(p_T ‖ softmax(a))

    Args:
        sites: letKD-1 has one, `penultimate`; letKD-2 also has `intermediate`.

    The layers are grafted into the student and stay there at inference. `letkd1` and `letkd2` create the paper's two forms. Terms:
    `kd/<role>` for each site.

    Examples:
        >>> LetKD([Site("stage2", KMeansSupervision(K=64, tau=0.1), alpha=0.5)]).term_names()
        ('kd/stage2',)
    """

    name: ClassVar[str] = "letkd"
    paper: ClassVar[str] = "Görgün, Gürbüz, Alatan, letKD, BMVC 2023"
    loss: ClassVar[str] = "KL(p_T ‖ p_S) at every pixel of each site, on the templates of a KD layer in the student"
    formulae: ClassVar = (KDLayer, pixel_kl)

    def __init__(self, sites: Sequence[Site]):
        super().__init__(sites)
        self._layers: dict[str, KDLayer] = {}  # by role; they are registered in the student

    def place_templates(self, site: Site, student: Side, d: int, K: int) -> None:
        layer = self._layers[site.role] = site.layer(d, K)
        layer.fused = self.fused
        path = student.graft(layer, site.role, f"kd_{module_name(site.role)}")  # section 3: f_{l+1} ∘ f_KD ∘ f_l
        self.reads.student[f"{site.role}.x"] = Tap(path, channels=d, io="input")
        if self.fused:
            self.reads.student[f"{site.role}.log_Z"] = Tap(f"{path}.log_Z")
        else:
            self.reads.student[f"{site.role}.a"] = Tap(f"{path}.omega", channels=K)

    def measured_at(self, term: str) -> tuple[str, ...]:
        return (f"{term.removeprefix('kd/')}.x",)

    def scores(self, role: str, view: View) -> Scores:
        read, omega = view.student, self._layers[role].omega.kernels()
        scores = Scores(read[f"{role}.x"], omega, a=read.get(f"{role}.a"), log_Z=read.get(f"{role}.log_Z"))
        if omega.requires_grad and not any(t is not None and t.requires_grad for t in (scores.a, scores.log_Z)):
            raise TapError(f"the KD layer at {role!r} ran without gradients; for checkpointing, pass use_reentrant=False")
        return scores

    def grafted(self) -> dict[str, str]:
        return {self.reads.student[f"{role}.x"].path: f"kd/{role}" for role, site in self.sites.items() if site.alpha}

    def export(self, student: nn.Module) -> nn.Module:
        for layer in student.modules():
            if isinstance(layer, KDLayer):
                layer.fused = False
        return student


def letkd1(
    K: int | Literal["auto"] = 4096, *, tau: float | Literal["auto"] = 1.0, alpha: float = 1.0, sharp: bool = False
) -> LetKD:
    """letKD-1: one KD layer at the penultimate map, labels by K-means (Alg. 1 and 3).

    Args:
        K: number of templates. Paper: 4096.
        tau: see `KMeansSupervision`.
        alpha: see `KDLayer`.
        sharp: whether the layer starts with a threshold (`SHARP`), and not as in the paper.

    Examples:
        >>> list(letkd1(K=256).sites)
        ['penultimate']
    """
    return LetKD([Site("penultimate", KMeansSupervision(K, tau), alpha=alpha, **SHARP if sharp else {})])


def letkd2(
    K_penult: int | Literal["auto"] = 4096,
    K_inter: int = 8,
    *,
    tau: float | Literal["auto"] = 1.0,
    alpha_penult: float = 1.0,
    alpha_inter: float = 1.0,
    sharp: bool = False,
) -> LetKD:
    """letKD-2: letKD-1 and a second layer after the first block of the last stage, labels by sub-class decisions (Alg. 1 to 3).

    Args:
        K_penult: templates at `penultimate`. Paper: 4096.
        K_inter: templates per class at `intermediate`. Paper: 8.
        tau: see `KMeansSupervision`.
        alpha_penult, alpha_inter: see `KDLayer`.
        sharp: for both layers; see `letkd1`.

    Examples:
        >>> list(letkd2(K_penult=256, K_inter=4).sites)
        ['intermediate', 'penultimate']
    """
    start = SHARP if sharp else {}
    return LetKD(
        [
            Site("intermediate", SubclassSupervision(K_inter), alpha=alpha_inter, **start),
            Site("penultimate", KMeansSupervision(K_penult, tau), alpha=alpha_penult, **start),
        ]
    )
