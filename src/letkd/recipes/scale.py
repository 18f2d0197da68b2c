"""Scaling of milestones with the number of epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

from letkd.recipes.tables import has, merge

EPOCHS, MILESTONES, SCHEDULE = ("train", "epochs"), ("optim", "milestones"), ("optim", "schedule")


def scaled_layer(layers: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """The layer that scales the milestones, if a layer after theirs sets only the epochs; else None.

    A milestone m of E epochs becomes round(m E'/E) of E'. Equal milestones are merged, and those at E' or later are dropped. A smoke
    run (`--quick`) is too short for milestones to matter. Values of a wrong type are left to the schema.
    """
    setting = [source for source, layer in layers if has(layer, EPOCHS)]
    at = max((k for k, (_, layer) in enumerate(layers) if has(layer, MILESTONES)), default=None)
    if at is None or not setting or setting[-1] == "--quick":
        return None
    before, now = _merged(layers[: at + 1]), _merged(layers)
    old, new = _value(before, EPOCHS), _value(now, EPOCHS)
    milestones = _value(now, MILESTONES)
    counts = [old, new, *(milestones if isinstance(milestones, list) else [None])]
    if not all(type(count) is int and count > 0 for count in counts):
        return None
    if old == new or not milestones or _value(now, SCHEDULE) != "milestones":
        return None
    moved = sorted({(2 * m * new + old) // (2 * old) for m in milestones})
    return f"{layers[at][0]}, scaled from {old} to {new} epochs", {"optim": {"milestones": [m for m in moved if 0 < m < new]}}


def _merged(layers: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    return table


def _value(table: Mapping[str, Any], path: tuple[str, str]) -> Any:
    return table[path[0]][path[1]] if has(table, path) else None
