"""Scaling of milestones and of methods' warm-up with the number of epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

from letkd.recipes.tables import has, leaves, merge

EPOCHS, MILESTONES, SCHEDULE = ("train", "epochs"), ("optim", "milestones"), ("optim", "schedule")
_Layer = tuple[str, dict[str, Any]]


def scaled_layer(layers: Sequence[_Layer]) -> _Layer | None:
    """The layer that scales the milestones, if a layer after theirs sets only the epochs; else None.

    A milestone m of E epochs becomes round(m E'/E) of E'. Equal milestones are merged, and those at E' or later are dropped. A smoke
    run (`--quick`) is too short for milestones to matter. Values of a wrong type are left to the schema.
    """
    found = _lengths(layers, MILESTONES)
    now = _merged(layers)
    milestones = _value(now, MILESTONES)
    if found is None or not isinstance(milestones, list) or not milestones or _value(now, SCHEDULE) != "milestones":
        return None
    source, old, new = found
    if not all(type(m) is int and m > 0 for m in milestones):
        return None
    moved = sorted({_scaled(m, old, new) for m in milestones})
    return source, {"optim": {"milestones": [m for m in moved if 0 < m < new]}}


def scaled_warmup_layer(layers: Sequence[_Layer]) -> _Layer | None:
    """The layer that scales `methods.NAME.warmup` as `scaled_layer` does milestones; else None."""
    now, source, methods = _merged(layers), "", {}
    for path, warmup in leaves({"methods": now.get("methods", {})}):
        found = _lengths(layers, path) if len(path) == 3 and path[2] == "warmup" else None
        if found is not None and type(warmup) is int and warmup > 0:
            source, old, new = found
            methods[path[1]] = {"warmup": _scaled(warmup, old, new)}
    return (source, {"methods": methods}) if methods else None


def _lengths(layers: Sequence[_Layer], path: tuple[str, ...]) -> tuple[str, int, int] | None:
    """The source of a scaled value, and the number of epochs that it was meant for and now; None if they are the same or not known."""
    setting = [source for source, layer in layers if has(layer, EPOCHS)]
    at = max((k for k, (_, layer) in enumerate(layers) if has(layer, path)), default=None)
    if at is None or not setting or setting[-1] == "--quick":
        return None
    while at + 1 < len(layers) and layers[at + 1][0] == layers[at][0]:  # the order of several `--set` does not matter
        at += 1
    old, new = _value(_merged(layers[: at + 1]), EPOCHS), _value(_merged(layers), EPOCHS)
    if not all(type(count) is int and count > 0 for count in (old, new)) or old == new:
        return None
    return f"{layers[at][0]}, scaled from {old} to {new} epochs", old, new


def _scaled(epoch: int, old: int, new: int) -> int:
    return (2 * epoch * new + old) // (2 * old)


def _merged(layers: Sequence[_Layer]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    return table


def _value(table: Mapping[str, Any], path: tuple[str, str]) -> Any:
    return table[path[0]][path[1]] if has(table, path) else None
