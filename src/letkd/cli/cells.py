"""`letkd list`: every cell of the tables, with the paper's number."""

from typing import Annotated

import typer

from letkd.errors import RecipeError, nearest


def cells(
    text: Annotated[
        str | None, typer.Option("--filter", metavar="TEXT", help="Only cells with this in their name.", show_default=False)
    ] = None,
) -> None:
    """List every cell, a pair and a method, with the top-1 accuracy in per cent that the paper reports for it."""
    from letkd.recipes import list_cells
    from letkd.report.paper import paper_result

    known = list_cells()
    found = [cell for cell in known if text is None or text in cell]
    if not found:
        raise RecipeError(f"no cell has {text!r} in its name; nearest: {nearest(str(text), known)}")
    width = max(map(len, found))
    print(f"{'cell':<{width}}  paper (top-1 %)")
    for cell in found:
        print(f"{cell:<{width}}  {paper_result(cell) or '–'}")
