"""Sites: where the teacher supervises the student."""

from dataclasses import dataclass
from typing import Any, Literal

from letkd.errors import RecipeError
from letkd.layer import KDLayer
from letkd.limits import Number
from letkd.methods.base import as_table, collected, construct
from letkd.supervision import SUPERVISIONS, Supervision

# A start of the KD layer that is not the paper's: a pixel matches few templates, and their vectors are about as large as its features.
# The paper's layer matches half of all templates at first, and short runs may hardly change this (docs/evidence.md).
SHARP: dict[str, Any] = {"beta": -2.0, "scale_nu": "auto"}


@dataclass(frozen=True)
class Site:
    """Where the teacher supervises the student: a role that both networks have, the supervision, and the settings of the KD layer.

    Args:
        role: `penultimate` or `intermediate`, or any role that both tap tables name.
        supervision: computes p_T.
        alpha: α of the KD layer (not used by QUEST). Paper: 1, for RN50-MNV2 less.
        scale_omega: initial value of the templates' scale. The authors use 3.0.
        scale_nu: initial value of the semantic vectors' scale. The authors use 1.0. `"auto"` is 0.44 √K: x' then has the same size
            for every K, 0.44 per channel if the vectors are random.
        beta: initial value of BN's shift, the threshold of a match; see `KDLayer`. The authors use 0.
        normalize_value_input: see `KDLayer`.
        match: how the teacher's map is brought to the student's grid. Integer ratios are average-pooled, as in the paper. Other
            ratios are an error with `pool`; with `resize` the map is resized, by area if it shrinks and bilinearly if it grows.

    Examples:
        >>> from letkd import KMeansSupervision
        >>> Site("penultimate", KMeansSupervision(K=64), alpha=0.5).layer(d=16, K=64).alpha
        0.5
    """

    role: str
    supervision: Supervision
    alpha: Number = 1.0
    scale_omega: Number = 3.0
    scale_nu: Number | Literal["auto"] = 1.0
    beta: Number = 0.0
    normalize_value_input: bool = True
    match: str = "resize"

    def __post_init__(self):
        if self.match not in ("pool", "resize"):
            raise RecipeError(f"the site {self.role!r} has match={self.match!r}; write 'pool' or 'resize'")

    @classmethod
    def from_recipe(cls, role: str, table: Any) -> "Site":
        """A site from the recipe's table `sites.<role>`, whose `supervision` table names its kind and settings."""
        where, wrong = f"sites.{role}", []
        settings = as_table(table, where)
        with collected(wrong):
            settings["supervision"] = _supervision(settings.get("supervision", {}), f"{where}.supervision")
        return construct(cls, {"role": role, **settings}, where, wrong=wrong)

    def layer(self, d: int, K: int) -> KDLayer:
        return KDLayer(
            d,
            K,
            alpha=self.alpha,
            scale_omega=self.scale_omega,
            scale_nu=0.44 * K**0.5 if self.scale_nu == "auto" else self.scale_nu,
            beta=self.beta,
            normalize_value_input=self.normalize_value_input,
        )


def _supervision(table: Any, where: str) -> Supervision:
    settings = as_table(table, where)
    kind = settings.pop("kind", "kmeans")
    if not isinstance(kind, str) or kind not in SUPERVISIONS:
        raise RecipeError(f"{where}.kind is {kind!r}; the kinds are {', '.join(SUPERVISIONS)}")
    return construct(SUPERVISIONS[kind], settings, where)


def module_name(role: str) -> str:
    """The role without dots, which a module's name cannot contain."""
    return role.replace(".", "_")
