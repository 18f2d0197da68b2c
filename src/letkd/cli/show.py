"""`letkd show`: a resolved recipe with the source of each value."""

from typing import TYPE_CHECKING, Annotated

import typer

from letkd.cli import options as o

if TYPE_CHECKING:
    from letkd.recipes import Recipe


def show(
    cell: Annotated[
        str, typer.Argument(help="Cell, such as cifar100/rn56-rn20/letkd-2, a pair, or a TOML file.", show_default=False)
    ],
    method: o.Method = None,
    preset: o.Preset = None,
    settings: o.Settings = None,
    quick: o.Quick = False,
) -> None:
    """Show a resolved recipe, each value with the file or option it comes from.

    The output is a valid recipe file.
    """
    from letkd.recipes import resolve_with_sources
    from letkd.report.paper import paper_result

    recipe, sources = resolve_with_sources(cell, method=method, preset=preset, settings=settings or [], quick=quick)
    paper = paper_result(cell) or paper_result(f"{cell}/{method or 'ce'}")
    print(f"# {cell}: {recipe.title or 'a recipe of your own'}")
    if paper is not None:
        trials = "" if paper.n is None else f", mean of {paper.n} trials"
        mark = f" ({paper.mark})" if paper.mark else ""
        print(f"# {paper.source or 'the paper'} reports {paper} % top-1{trials}{mark}")
    print("\n".join(lines(recipe, sources)))


def lines(recipe: "Recipe", sources: dict[str, str]) -> list[str]:
    """One line of TOML per key, with the source of its value as a comment. Keys without a value follow as comments."""
    from letkd.recipes.tables import as_toml, dotted, leaves

    values = {dotted(path): value for path, value in leaves(recipe.model_dump(exclude_none=True))}
    texts = {key: f"{key} = {as_toml(value)}" for key, value in values.items()}
    width = max(map(len, texts.values()))
    unset = [f"# {dotted(path)} is not set" for path, value in leaves(recipe.model_dump()) if value is None]
    return [f"{text:<{width}}  # {sources.get(key, 'default')}" for key, text in texts.items()] + unset
