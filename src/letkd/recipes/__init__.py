"""Recipes: TOML tables merged from base <- pair (a column of the table) <- method (a row) <- preset <- user.

A pair and a preset can hold exceptions for a method, as `[exceptions.METHOD]`; those of a pair follow the method, those of a preset follow
the preset. A user's file takes the place of the pair: base <- method <- preset <- the file <- its table `[rows.METHOD]`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from letkd.errors import RecipeError, nearest
from letkd.plugins import plugin_recipes, plugins
from letkd.recipes.cached import cached_layer
from letkd.recipes.label_free import label_free_layer
from letkd.recipes.own_size import own_size_layer
from letkd.recipes.quick import quick_layer
from letkd.recipes.scale import scaled_layer, scaled_warmup_layer
from letkd.recipes.schema import Recipe, full_path, validate
from letkd.recipes.tables import dotted, has, leaves, merge, with_auto_weights, with_taps_as_text

HERE = Path(__file__).parent
MAX_DOTS = 20  # in a key: more than any recipe has
TRAINED_TEACHER_KEYS = ("weights", "mean", "std", "size", "classes")

__all__ = [
    "Recipe",
    "derived_values",
    "list_cells",
    "list_methods",
    "list_pairs",
    "list_presets",
    "list_rows",
    "merge",
    "parse_setting",
    "resolve",
    "resolve_with_sources",
]


def list_pairs() -> list[str]:
    """Every pair, as `data/teacher-student`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in (HERE / "pairs").glob("*/*.toml"))


def list_methods() -> list[str]:
    """Every row: the methods with a recipe in this package, and those of installed plugins."""
    return sorted({path.stem for path in (HERE / "methods").glob("*.toml")} | _plugin_rows().keys())


def list_presets() -> list[str]:
    """Every preset: training settings for any cell."""
    return sorted(path.stem for path in (HERE / "presets").glob("*.toml"))


def list_cells() -> list[str]:
    """Every pair with every method, as `data/teacher-student/method`."""
    return [f"{pair}/{method}" for pair in list_pairs() for method in list_methods()]


def list_rows(path: str | Path) -> list[str]:
    """The rows that a user's file defines as `[rows.NAME]`."""
    return list(_own_rows(_read(Path(path)), str(path)))


def resolve(
    name: str | Path | None,
    *,
    method: str | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    quick: bool = False,
) -> Recipe:
    """The recipe of a cell such as `cifar100/rn56-rn20/letkd-2`, of a pair with `method`, or of a user's TOML file.

    Args:
        name: the cell, the pair, or the path of a file (which need only hold what it changes). None for the base only.
        method: a row of the table, or one that the file defines as `[rows.NAME]`; default: `ce` (the student without a teacher). In
            the row `teacher`, the pair's teacher takes the student's place.
        preset: training settings that override pair and method and are overridden by a user's file; see `list_presets`. The file
            or its row may also name a preset, with `preset = "fast"`.
        overrides: values by dotted key, set by the caller.
        settings: `key=value` strings with TOML values, set by the user; applied last.
        quick: shrink the recipe of the files to a smoke run; overrides and settings still apply.

    Examples:
        >>> resolve("digits/tiny/kd", settings=["optim.lr=0.02", "methods.kd.T=2.0"]).methods
        {'kd': {'T': 2.0}}
    """
    return resolve_with_sources(name, method=method, preset=preset, overrides=overrides, settings=settings, quick=quick)[0]


def resolve_with_sources(
    name: str | Path | None,
    *,
    method: str | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    quick: bool = False,
) -> tuple[Recipe, dict[str, str]]:
    """Like `resolve`, and the source of each value by dotted key: a file, `override`, `--quick` or `--set`.

    A key with the schema's default has no source. If only the number of epochs is set, milestones and the warm-up of methods are scaled
    with it; automatic views of the cache follow from the epochs; a folder of images without `data.size` gets the input size of the
    student. Their sources say so.
    """
    layers, method = _files(name, method, preset)
    if quick:
        layers.append(("--quick", quick_layer(_merged(layers))))
    layers += [("override", _nested(key.split("."), value)) for key, value in (overrides or {}).items()]
    layers += [("--set", parse_setting(text)) for text in settings]
    layers = [(source, with_taps_as_text(layer)) for source, layer in layers]
    if method == "teacher":
        layers = [(source, _teacher_as_student(layer)) for source, layer in layers]
    layers = with_auto_weights(layers)
    for derive in (scaled_layer, scaled_warmup_layer, cached_layer, label_free_layer, own_size_layer):
        if (derived := derive(layers)) is not None:
            layers.append(derived)
    table = _merged(layers)
    recipe = validate(table, f"recipe {name or 'base'}")
    sources = {}
    for path, _ in leaves(table):
        sources[dotted(path)] = next(source for source, layer in reversed(layers) if has(layer, path))
    return recipe, sources


def derived_values(recipe: Recipe, sources: Mapping[str, str]) -> list[str]:
    """A line for the user on each value that `resolve_with_sources` derived: scaled epochs, views of the cache, the size of images."""
    lines = []
    for key, source in sources.items():
        if ", scaled from " in source:
            value = recipe.optim.milestones if key == "optim.milestones" else recipe.methods[key.split(".")[1]]["warmup"]
            lines.append(f"{key} = {value} ({source}); set {key} to choose another value")
    source = sources.get("train.cache_views", "")
    if source.startswith("a third of the epochs "):
        lines.append(
            f"train.cache_views = {recipe.train.cache_views} ({source}); set train.cache_views to choose another number"
        )
    source = sources.get("data.size", "")
    if source.startswith("input size of "):
        lines.append(f"data.size = {recipe.data.size} ({source}); set data.size to choose another")
    return lines


_Layer = tuple[str, dict[str, Any]]  # source and values


def _files(name: str | Path | None, method: str | None, preset: str | None) -> tuple[list[_Layer], str | None]:
    """The layers of the files, lowest priority first, and the resolved method."""
    layers = [_packaged("base.toml")]
    own: list[_Layer] = []
    exceptions: dict[str, _Layer] = {}
    rows: dict[str, _Layer] = {}
    chain: list[tuple[str, _Layer]] = []
    presets: list[str | None] = []  # that the file and its rows name, lowest priority first
    if name is not None and str(name).endswith(".toml"):
        table = _read(Path(name))
        rows = _own_rows(table, str(name))
        presets = [table.pop("preset", None)]
        own = [(str(name), table)]
    elif name is not None:
        pair_name, method = _split(str(name), method)
        layer, exceptions = _with_exceptions(f"pairs/{pair_name}.toml")
        layers.append(layer)
    if method is None and not any(table.get("methods") for _, table in own):
        method = "ce"
    if method is not None:
        while method in rows:  # a row of the user's file overrides the rest of that file
            source, row = rows.pop(method)
            own.insert(1, (source, {key: value for key, value in row.items() if key not in ("like", "preset")}))
            presets.insert(1, row.get("preset"))
            method = row.get("like", method)
        if method not in list_methods():
            raise RecipeError(f"unknown method {method!r}; nearest: {nearest(str(method), [*rows, *list_methods()])}")
        chain = _chain(method)
        for known, layer in chain:
            layers += [layer, exceptions[known]] if known in exceptions else [layer]
    preset = preset or next((found for found in reversed(presets) if found is not None), None)
    if preset is not None:
        if preset not in list_presets():
            raise RecipeError(f"unknown preset {preset!r:.60}; choose one of {', '.join(list_presets())}")
        layer, exceptions = _with_exceptions(f"presets/{preset}.toml")
        layers += [layer, *(exceptions[known] for known, _ in chain if known in exceptions)]
    return layers + own, method


def _with_exceptions(path: str) -> tuple[_Layer, dict[str, _Layer]]:
    """A packaged file, and its exceptions by method."""
    source, table = _packaged(path)
    exceptions = {key: (f"{source}, exceptions.{key}", layer) for key, layer in table.pop("exceptions", {}).items()}
    return (source, table), exceptions


def _own_rows(table: dict[str, Any], name: str) -> dict[str, _Layer]:
    """The rows of a user's file: `[rows.NAME]` holds the differences from the method in `like`, or from the method NAME."""
    rows = table.pop("rows", {})
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise RecipeError(f"{name}: 'rows' must hold one table per row, as in [rows.my-kd] with like = \"kd\"")
    for key, row in rows.items():
        if not isinstance(row.get("like", ""), str):
            raise RecipeError(
                f"{name}: 'like' of the row {key!r} is {row['like']!r:.60}; name one method or row, as in like = \"kd\""
            )
    return {key: (f"{name}, rows.{key}", row) for key, row in rows.items()}


def _chain(method: str, below: tuple[str, ...] = ()) -> list[tuple[str, _Layer]]:
    """The layers of a method: first those of the methods in `like`, if any, then its own file, which holds the differences.

    Args:
        below: the methods that are like this one.
    """
    packaged = (HERE / "methods" / f"{method}.toml").exists()
    source, table = _packaged(f"methods/{method}.toml") if packaged else _plugin_rows()[method]
    like = table.pop("like", [])
    parents = like if isinstance(like, list) else [like]
    known = parents if packaged else list_methods()
    if wrong := [name for name in parents if name not in known or name in (*below, method)]:
        raise RecipeError(
            f"{source}: 'like' is {wrong[0]!r:.60}, which is not another method; nearest: {nearest(str(wrong[0]), known)}"
        )
    return [*(layer for name in parents for layer in _chain(name, (*below, method))), (method, (source, table))]


def _plugin_rows() -> dict[str, _Layer]:
    """Rows of installed plugins: from their recipe files or, for a method without one, its defaults."""
    rows: dict[str, _Layer] = {
        entry.name: (f"plugin {entry.value}", {"title": entry.name, "methods": {entry.name: {}}})
        for entry in plugins("methods")
    }
    return rows | {name: (str(path), _read(path)) for name, path in plugin_recipes().items()}


def _packaged(path: str) -> _Layer:
    return path, _read(HERE / path)


def _merged(layers: Sequence[_Layer]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for _, layer in layers:
        table = merge(table, layer)
    return table


def _teacher_as_student(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer with its teacher in the student's place, to train it from scratch; without methods and weights."""
    rest = {key: value for key, value in layer.items() if key not in ("teacher", "student", "methods", "weights", "phases")}
    if "teacher" not in layer:
        return rest
    teacher = layer["teacher"]
    if isinstance(teacher, Mapping):
        teacher = {key: value for key, value in teacher.items() if key not in TRAINED_TEACHER_KEYS}
    return {**rest, "student": teacher}


def _split(name: str, method: str | None) -> tuple[str, str | None]:
    pairs = list_pairs()
    if name in pairs:
        return name, method
    pair, _, last = name.rpartition("/")
    if pair in pairs:
        if method is not None and method != last:
            raise RecipeError(f"the cell {name!r} names the method {last!r}, but `method=` is {method!r}; name only one")
        return pair, last
    raise RecipeError(
        f"unknown recipe {name!r}; nearest: {nearest(name, pairs)} (each followed by /method); or name a file that ends in .toml"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"the recipe file {path} does not exist") from None
    except (ValueError, RecursionError, OSError) as error:
        raise RecipeError(f"{path} is not a valid TOML file: {error}") from None


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def parse_setting(text: str) -> dict[str, Any]:
    """Parse `key=value` as TOML; a key or value that is not valid TOML is used as plain text.

    A key that only one table has may be given without it: `epochs=1` is `train.epochs=1`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or key.count(".") > MAX_DOTS:
        raise RecipeError(f"--set {text!r:.200}: write key=value, as in optim.lr=0.01")
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()
    try:
        ((path, _),) = leaves(tomllib.loads(f"{key} = 0"))
    except ValueError:  # not TOML, or a comment
        path = tuple(key.strip().split("."))
    return _nested(full_path(path), found)
