"""Generates docs/recipe.md: every key of a recipe, from the schema."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from letkd.recipes import HERE, _read
from letkd.recipes.schema import Recipe
from letkd.recipes.tables import as_toml

HEAD = """# Recipe reference

Generated from the schema by `python -m letkd.recipes.reference > docs/recipe.md`; do not edit by hand.

A recipe is a TOML file. The file of a pair, or your own, only needs the keys that differ from the base. "Default" is the value of a
key that is not set; a dash means no default. On the command line, `--set KEY=VALUE` sets any key, as in `--set optim.lr=0.01`; a key that
only one table has may be given without it (`--set epochs=20`). `letkd show CELL` prints a complete recipe and the source of each value.

A file of your own can also name a preset (`preset = "fast"`, [Training](training.md)) and define rows (`[rows.NAME]`,
[Experiments at scale](experiments.md)).
"""
NESTED = {
    "methods": "Settings: the arguments of the classes on [Python](api.md): `letkd.methods`, `letkd.Site` under "
    "`methods.NAME.sites.ROLE`, and the supervision classes under `….supervision`, whose `kind` is `kmeans`, `subclass` or `conv3x3`.",
    "weights": "Terms are named in [Methods](methods.md).",
}


def tables() -> dict[str, type[BaseModel]]:
    """The tables of a recipe by their dotted path, `""` for the recipe itself."""
    found: dict[str, type[BaseModel]] = {}

    def add(path: str, model: type[BaseModel]) -> None:
        found[path] = model
        for name, field in model.model_fields.items():
            if (inner := _model(field.annotation)) is not None:
                add(f"{path}.{name}".removeprefix("."), inner)

    add("", Recipe)
    return found


def as_markdown() -> str:
    """The whole page."""
    base, text = _read(HERE / "base.toml"), HEAD
    for path, model in tables().items():
        defaults: Any = base
        for part in path.split(".") if path else ():
            defaults = defaults.get(part, {}) if isinstance(defaults, dict) else {}
        title = f"`[{path}]`" if path else "The recipe"
        title = f"`[[{path}]]`" if path in ("phases", "optim.groups") else title
        text += f"\n## {title}\n\n{(model.__doc__ or '').strip().splitlines()[0]}\n\n"
        text += "| Key | Value | Default | |\n| --- | --- | --- | --- |\n"
        for name, field in model.model_fields.items():
            more = f". {NESTED[name]}" if not path and name in NESTED else ""
            cells = (f"`{name}`", _kind(field), _default(name, field, defaults), f"{_sentence(field.description or '')}{more}")
            text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def _model(annotation: Any) -> type[BaseModel] | None:
    """The table class of a field, or of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model(part)) is not None), None)


def _kind(field: FieldInfo) -> str:
    limits = {type(item).__name__.lower(): item for item in field.metadata}
    kind = _words(field.annotation)
    sides = [
        f"{sign} {getattr(limits[name], name):,}"
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if name in limits and abs(getattr(limits[name], name)) < 2**31 - 1
    ]
    return f"{kind}, {' and '.join(sides)}" if sides else kind


WORDS = {int: "integer", float: "number", str: "string", bool: "true or false", type(None): "", Any: "any value"}


def _words(annotation: Any) -> str:
    if _model(annotation) is not None:
        return "tables" if get_origin(annotation) is list else "table"
    if annotation in WORDS:
        return WORDS[annotation]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inside[0])
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in _choices(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_words, inside)))
    if origin is list:
        return f"list of {_words(inside[0])}s"
    if origin is tuple:
        return f"{len(inside)} {_words(inside[0])}s"
    return "table"


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal, including nested Literals."""
    return [
        value for part in get_args(annotation) for value in (_choices(part) if get_origin(part) is Literal else [str(part)])
    ]


def _default(name: str, field: FieldInfo, base: dict[str, Any]) -> str:
    value = base.get(name, None if field.is_required() else field.default)
    return "–" if value is None or value in ({}, [], "") or isinstance(value, dict) else f"`{as_toml(value)}`"


if __name__ == "__main__":
    print(as_markdown(), end="")
