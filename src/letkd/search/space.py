"""The search space: `key=log:0.01..0.3`, `key=4..64` or `key=a|b|c`."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from letkd.errors import RecipeError, nearest
from letkd.recipes import parse_setting
from letkd.recipes.schema import Recipe
from letkd.recipes.tables import dotted, leaves

FORMS = "write key=LOW..HIGH, key=log:LOW..HIGH or key=A|B|C, as in optim.lr=log:0.01..0.3"
FIXED = ("train.seed", "data.name", "data.root", "data.val", "title")  # trials with different values could not be compared


@dataclass(frozen=True)
class Range:
    """One key of the recipe and the values it may take.

    Args:
        key: as the user wrote it; dotted, as for `--set`.
        low, high: ends of a range; integers if both are written as integers.
        log: sample uniformly in the logarithm.
        choices: TOML values as text, instead of a range.
    """

    key: str
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> tuple[Any, ...]:
        """The extreme values, or all choices."""
        return self.choices or (self.low, self.high)

    def setting(self, value: Any) -> str:
        """A value of this key in the form of `--set`."""
        return f"{self.key}={value}"

    def distribution(self, optuna: Any) -> Any:
        if self.choices:
            return optuna.distributions.CategoricalDistribution(self.choices)
        if self.whole:
            return optuna.distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return optuna.distributions.FloatDistribution(float(self.low), float(self.high), log=self.log)

    def __str__(self) -> str:
        spec = "|".join(self.choices) or f"{'log:' if self.log else ''}{self.low}..{self.high}"
        return f"{self.key}={spec}"


def parse_ranges(texts: Sequence[str]) -> tuple[Range, ...]:
    """The ranges of all `--over` options."""
    if not texts:
        raise RecipeError(f"nothing to search: name at least one range with --over; {FORMS}")
    ranges = tuple(parse_range(text) for text in texts)
    keys = [range_.key for range_ in ranges]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise RecipeError(f"--over names {twice[0]} twice; give it one range")
    return ranges


def parse_range(text: str) -> Range:
    """One `--over` option."""
    key, equals, spec = (part.strip() for part in text.partition("="))
    if not (key and equals and spec):
        raise RecipeError(f"--over {text!r:.200}: {FORMS}")
    if "|" in spec:
        choices = tuple(part.strip() for part in spec.split("|"))
        if not all(choices) or len(set(choices)) < len(choices):
            raise RecipeError(f"--over {text!r:.200}: a choice is empty or repeated; {FORMS}")
        return Range(key, choices=choices)
    log = spec.startswith("log:")
    low, dots, high = spec.removeprefix("log:").partition("..")
    try:
        ends = [_number(part) for part in (low, high)]
    except (ValueError, tomllib.TOMLDecodeError):
        raise RecipeError(f"--over {text!r:.200}: {FORMS}") from None
    if not dots or not ends[0] < ends[1]:
        raise RecipeError(f"--over {text!r:.200}: the range is empty; write the smaller number first, as in 0.01..0.3")
    if log and ends[0] <= 0:
        raise RecipeError(f"--over {text!r:.200}: a logarithmic range must start above 0")
    return Range(key, *ends, log=log)


def _number(text: str) -> float:
    value = tomllib.loads(f"value = {text}")["value"]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(text)
    return value


def check_keys(ranges: Sequence[Range], recipe: Recipe) -> None:
    """Raise an error for a key that the recipe does not have. Otherwise a misspelt method would be added as a second one."""
    table = recipe.model_dump()
    for range_ in ranges:
        ((path, _),) = leaves(parse_setting(range_.setting(range_.ends()[0])))
        if dotted(path) in FIXED:
            raise RecipeError(f"--over {range_}: trials with another {dotted(path)} cannot be compared; search over other keys")
        current: Any = table
        for k, part in enumerate(path[:-1]):
            if not isinstance(current, dict) or part not in current:
                parent = dotted(path[:k]) or "the recipe"
                known = nearest(part, current if isinstance(current, dict) else [])
                raise RecipeError(f"--over {range_}: {parent} has no {part!r} here; nearest: {known}")
            current = current[part]
