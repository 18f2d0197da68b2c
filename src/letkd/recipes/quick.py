"""`--quick`: shrinks any recipe to a smoke run, which shows that it works but says nothing about accuracy."""

from collections.abc import Mapping
from typing import Any

EPOCHS, K = 1, 4
LIMITS = {
    "train": {"epochs": EPOCHS, "steps": 2},
    "data": {"fraction": 0.02, "batch_size": 16},  # ten images per class of CIFAR-100: seconds for the largest teacher
}


def quick_layer(table: Mapping[str, Any]) -> dict[str, Any]:
    """The layer that makes a merged table a smoke run; no value becomes larger.

    A value of a wrong type is left unchanged, for the schema to report.
    """
    layer: dict[str, Any] = {}
    for section, limits in LIMITS.items():
        values = table.get(section, {})
        if isinstance(values, Mapping):
            layer[section] = {key: _at_most(values.get(key, limit), limit) for key, limit in limits.items()}
    if methods := _small(table.get("methods")):
        layer["methods"] = methods
    phases = table.get("phases")
    if isinstance(phases, list) and phases:
        layer["phases"] = [_short(phase) if isinstance(phase, Mapping) else phase for phase in phases]
    return layer


def _small(table: Any) -> dict[str, Any]:
    """The numbers of clusters, sub-classes and negatives in a method's tables, each at most `K`."""
    found = {}
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if key == "K":
            found[key] = _at_most(value, K)
        elif inside := _small(value):
            found[key] = inside
    return found


def _short(phase: Mapping[str, Any]) -> dict[str, Any]:
    return {**phase, "epochs": _at_most(phase.get("epochs", EPOCHS), EPOCHS)}


def _at_most(value: Any, limit: float) -> Any:
    return min(value, limit) if isinstance(value, int | float) else value
