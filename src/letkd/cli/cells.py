"""`letkd list`: every cell (pair and method) with its published accuracy."""

from typing import Annotated

import typer

from letkd.errors import RecipeError, nearest


def cells(
    text: Annotated[
        str | None,
        typer.Option("--filter", metavar="TEXT", help="Only cells whose name contains this text.", show_default=False),
    ] = None,
) -> None:
    """List every cell (a pair and a method) with the top-1 accuracy in per cent reported by the paper or another source."""
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
