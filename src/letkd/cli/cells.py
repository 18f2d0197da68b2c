"""`letkd list`: every cell of the tables, with the paper's or another published number."""

from typing import Annotated

import typer

from letkd.errors import RecipeError, nearest


def cells(
    text: Annotated[
        str | None, typer.Option("--filter", metavar="TEXT", help="Only cells with this in their name.", show_default=False)
    ] = None,
) -> None:
    """List every cell, a pair and a method, with the top-1 accuracy in per cent that the paper or another source reports for it."""
    from letkd.recipes import list_cells
    from letkd.report.paper import paper_result

    known = list_cells()
    found = [cell for cell in known if text is None or text in cell]
    if not found:
        raise RecipeError(f"no cell has {text!r} in its name; nearest: {nearest(str(text), known)}")
    width = max(map(len, found))
    print(f"{'cell':<{width}}  {'top-1 %':<14}  source (mark)")
    for cell in found:
        result = paper_result(cell)
        number, source = (str(result), result.source or "paper") if result else ("–", "")
        mark = f" ({result.mark})" if result and result.mark else ""
        print(f"{cell:<{width}}  {number:<14}  {source}{mark}".rstrip())
