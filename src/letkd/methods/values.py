"""What a recipe's table gives to a constructor, held against the constructor's annotations and against what a number can mean."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

LARGEST = 1_000_000  # as in a student file: of clusters, channels, negatives
# From, to. The same name means the same thing in every method and supervision.
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("K", "feat_dim", "r", "f", "k", "C", "mid", "iterations"), (1, LARGEST)),
    **dict.fromkeys(("pixels_per_centre", "pixels_per_class"), (1, 2**31)),
    **dict.fromkeys(("momentum", "threshold"), (0, 1)),
    **dict.fromkeys(("T", "tau", "init_var", "eps"), (1e-12, 1e12)),
    "memory": (1, 2**62),
    "perplexity": (1.01, LARGEST),
    "seed": (0, 2**32 - 1),
    "warmup": (0, LARGEST),
    "smoothing": (0, 1e12),
    "least": (1e-30, 0.5),
}
ANY = (-1e12, 1e12)
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "nothing"}


def wrong_values(make: Callable[..., Any], table: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that the constructor's annotation, or the range of its name, does not allow."""
    found = []
    for key, parameter in inspect.signature(make).parameters.items():
        if key not in table:
            continue
        low, high = LIMITS.get(key, ANY)
        if not _fits(table[key], parameter.annotation):
            found.append(f"{key} is {str(table[key])!r:.60} and must be {_said(parameter.annotation)}")
        elif isinstance(table[key], int | float) and not low <= table[key] <= high:
            found.append(f"{key} is {table[key]!s:.60} and must be from {low:g} to {high:g}")
    return found


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind == Sequence[str]:
        return isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
    if kind is float:
        return type(value) in (int, float) and not (isinstance(value, float) and math.isnan(value))
    return type(value) is kind if kind in NAMES else True


def _said(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_said(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return "a list of texts" if kind == Sequence[str] else NAMES.get(kind, str(kind))
