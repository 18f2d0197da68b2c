"""Recipes: TOML tables merged from base <- pair (a column of the table) <- method (a row) <- exceptions <- what the user sets."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from letkd.errors import RecipeError, nearest
from letkd.recipes.schema import Recipe, validate

HERE = Path(__file__).parent

__all__ = ["Recipe", "list_methods", "list_pairs", "resolve"]


def list_pairs() -> list[str]:
    """Every pair, as `data/teacher-student`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in (HERE / "pairs").glob("*/*.toml"))


def list_methods() -> list[str]:
    """Every method that has a recipe."""
    return sorted(path.stem for path in (HERE / "methods").glob("*.toml"))


def resolve(
    name: str | Path | None,
    *,
    method: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """The recipe of a cell such as `cifar100/rn56-rn20/letkd-2`, of a pair with `method`, or of a TOML file of one's own.

    Args:
        name: the cell, the pair, or the path of a file (which may hold only what it changes). None for the base alone.
        method: a row of the table; `ce` (the student alone) where nothing says otherwise. In the row `teacher` the pair's
            teacher, whatever sets it, takes the student's place.
        overrides: what the caller sets, by dotted keys.
        settings: what the user sets last, as `key=value` strings with TOML values.
    """
    layers: list[dict[str, Any]] = [_read(HERE / "base.toml")]
    pair: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if name is not None and str(name).endswith(".toml"):
        own = _read(Path(name))
    elif name is not None:
        pair_name, method = _split(str(name), method)
        pair = _read(HERE / "pairs" / f"{pair_name}.toml")
    exceptions = pair.pop("exceptions", {})
    method = method or ("ce" if not own.get("methods") else None)
    layers.append(pair)
    if method is not None:
        if method not in list_methods():
            raise RecipeError(f"there is no method {method!r}; nearest: {nearest(method, list_methods())}")
        layers += [_read(HERE / "methods" / f"{method}.toml"), exceptions.get(method, {})]
    table: dict[str, Any] = {}
    for layer in [*layers, own]:
        table = merge(table, layer)
    sets = [_nested(key.split("."), value) for key, value in (overrides or {}).items()]
    for layer in [*sets, *map(_parse, settings)]:
        table = merge(table, layer)
    if method == "teacher":
        table["student"] = {**table.pop("teacher", {}), "weights": None}
    return validate(table, f"recipe {name or 'base'}")


def _split(name: str, method: str | None) -> tuple[str, str | None]:
    pairs = list_pairs()
    if name in pairs:
        return name, method
    pair, _, last = name.rpartition("/")
    if pair in pairs:
        if method is not None and method != last:
            raise RecipeError(f"the cell {name!r} names the method {last!r} and --method names {method!r}; name one")
        return pair, last
    raise RecipeError(
        f"there is no recipe {name!r}; nearest: {nearest(name, pairs)} (each followed by /method), or a file that ends in .toml"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{path} is no TOML file: {error}") from None


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; any other value of `over` replaces that of `under`."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def _parse(text: str) -> dict[str, Any]:
    """`key=value` as TOML has it, quotes and all; a key or value that TOML does not know is taken as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {text!r}: write key=value, as in optim.lr=0.01")
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()
    try:
        (path,) = _paths(tomllib.loads(f"{key} = 0"))
    except tomllib.TOMLDecodeError:
        path = key.strip().split(".")
    return _nested(path, found)


def _paths(table: Any) -> list[list[str]]:
    if not isinstance(table, Mapping):
        return [[]]
    return [[key, *rest] for key, value in table.items() for rest in _paths(value)]
