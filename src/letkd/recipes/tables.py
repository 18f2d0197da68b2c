"""Merging of tables, and the paths of their values."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from letkd.errors import RecipeError, nearest

TAP_KEYS = ("path", "io", "layout", "prefix", "grid")


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; any other value of `over` replaces that of `under`."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its path; an empty table counts as a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def with_taps_as_text(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer with taps given as tables converted to text: `{path = "blocks.10", layout = "tokens"}` is `blocks.10:tokens`."""
    found = dict(layer)
    for side in ("teacher", "student"):
        network = found.get(side)
        taps = network.get("taps") if isinstance(network, Mapping) else None
        if isinstance(network, Mapping) and isinstance(taps, Mapping):
            written = {role: _tap_as_text(tap, f"{side}.taps.{role}") for role, tap in taps.items()}
            found[side] = {**network, "taps": written}
    return found


def with_auto_weights(layers: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The layers, with `weights = "auto"` in one of them applied to every term but `ce` that the layers below it give a weight.

    Without a method there is no such term, so that one setting can be given for all rows of a comparison.
    """
    alone = not any(layer.get("methods") for _, layer in layers)
    found: list[tuple[str, dict[str, Any]]] = []
    below: dict[str, Any] = {}
    for source, layer in layers:
        if isinstance(weights := layer.get("weights"), str):
            known = below.get("weights", {})
            names = (
                [name for name, weight in known.items() if name != "ce" and weight != 0] if isinstance(known, Mapping) else []
            )
            if not names and not alone:
                raise RecipeError(f'{source}: weights = "{weights}" applies to no term; name one, as in weights.kd = "auto"')
            layer = {**layer, "weights": dict.fromkeys(names, weights)}
        found.append((source, layer))
        below = merge(below, layer)
    return found


def _tap_as_text(tap: Any, key: str) -> Any:
    if not isinstance(tap, Mapping):
        return tap
    if unknown := [name for name in tap if name not in TAP_KEYS]:
        raise RecipeError(f"{key} has no key {unknown[0]!r} (nearest: {nearest(unknown[0], TAP_KEYS)})")
    if not isinstance(tap.get("path"), str):
        raise RecipeError(f'{key} needs a path, as in {{path = "blocks.10", layout = "tokens"}}')
    grid = tap.get("grid")
    size = "x".join(map(str, grid)) if isinstance(grid, list | tuple) else grid
    options = [
        tap.get("io"),
        tap.get("layout"),
        *(f"{name}={value}" for name, value in (("prefix", tap.get("prefix")), ("grid", size))),
    ]
    return ":".join(
        [tap["path"], *(str(option) for option in options if option is not None and not str(option).endswith("=None"))]
    )


def has(table: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the table has a value at this path."""
    found: Any = table
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def dotted(path: tuple[str, ...]) -> str:
    """The path as a TOML key, quoted if necessary: `weights."kd/penultimate"`."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part, ensure_ascii=False) for part in path)


def as_toml(value: Any) -> str:
    """A value of a recipe on one line of TOML."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{dotted((key,))} = {as_toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
