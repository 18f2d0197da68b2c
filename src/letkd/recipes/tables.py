"""Tables laid over tables, and the paths of their values."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; any other value of `over` replaces that of `under`."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its path; an empty table is a value too."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def has(table: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the table says anything at this path."""
    found: Any = table
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def dotted(path: tuple[str, ...]) -> str:
    """The path as TOML writes a key, quoted where it must be: `weights."kd/penultimate"`."""
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
