"""Where knowledge passes from teacher to student."""

from dataclasses import dataclass
from typing import Any

from letkd.errors import RecipeError
from letkd.layer import KDLayer
from letkd.limits import Number
from letkd.methods.base import as_table, collected, construct
from letkd.supervision import SUPERVISIONS, Supervision


@dataclass(frozen=True)
class Site:
    """Where knowledge passes: a role that both networks have, the supervision there, and how the KD layer starts.

    Args:
        role: `penultimate` or `intermediate`, or any role that both tap tables name.
        supervision: gives p_T there.
        alpha: α of the KD layer (QUEST has none). Paper uses 1; RN50-MNV2 less.
        scale_omega: first value of the templates' scale. The authors use 3.0.
        scale_nu: first value of the semantic vectors' scale. The authors use 1.0.
        normalize_value_input: see `KDLayer`.
        match: how the teacher's map comes to the student's grid. Whole ratios are average-pooled, as in the paper. Others are an error
            with `pool`; with `resize` the map is resized, down by area and up bilinearly, before labels are fitted and given.
    """

    role: str
    supervision: Supervision
    alpha: Number = 1.0
    scale_omega: Number = 3.0
    scale_nu: Number = 1.0
    normalize_value_input: bool = True
    match: str = "resize"

    def __post_init__(self):
        if self.match not in ("pool", "resize"):
            raise RecipeError(f"the site {self.role!r} has match={self.match!r}; there are 'pool' and 'resize'")

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
            scale_nu=self.scale_nu,
            normalize_value_input=self.normalize_value_input,
        )


def _supervision(table: Any, where: str) -> Supervision:
    settings = as_table(table, where)
    kind = settings.pop("kind", "kmeans")
    if not isinstance(kind, str) or kind not in SUPERVISIONS:
        raise RecipeError(f"{where}.kind is {kind!r}; there are: {', '.join(SUPERVISIONS)}")
    return construct(SUPERVISIONS[kind], settings, where)


def module_name(role: str) -> str:
    """A role as a module's name: without dots."""
    return role.replace(".", "_")
