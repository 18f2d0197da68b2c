"""`letkd compare`: several methods side by side, from one command."""

from pathlib import Path
from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.errors import RecipeError


def compare(
    pair: Annotated[
        str | None, typer.Argument(help="A pair such as digits/tiny or cifar100/rn56-rn20.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Instead of a pair: the first one of this data set.", show_default=False)
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated rows of the table, or groups of them: paper, modern, all.")
    ] = "all",
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds for each method.")] = 3,
    root: o.Root = None,
    teacher_weights: o.TeacherWeights = None,
    settings: o.Settings = None,
    trust: o.Trust = False,
    quick: o.Quick = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.", show_default="runs/compare-<pair>")] = None,
) -> None:
    """Teach the same student by several methods and print one table. Stopped half-way, the same command goes on."""
    from letkd.recipes import list_pairs, resolve_with_sources
    from letkd.report.paper import named_methods

    if pair is None:
        pair = next((name for name in list_pairs() if name.startswith(f"{data}/")), None)
        if pair is None:
            raise RecipeError(f"name a pair ({', '.join(list_pairs())}), or --data with one of them; {data!r} has none")
    folder = out or Path("runs") / f"compare-{pair.replace('/', '-')}{'-quick' if quick else ''}"
    values = [*([] if root is None else [f"data.root={str(root)!r}"]), *(settings or [])]
    rows = named_methods(methods)
    for method in () if trust else rows:
        o.refuse_code(pair, *resolve_with_sources(pair, method=method, settings=values, quick=quick))
    show(
        pair,
        rows,
        folder,
        trials=trials,
        settings=values,
        quick=quick,
        teacher_weights=teacher_weights,
        title=f"{pair}: one student, side by side",
    )


def show(
    pair: str,
    methods: list[str],
    folder: Path,
    *,
    trials: int,
    settings: list[str],
    teacher_weights: Path | None,
    title: str,
    quick: bool = False,
) -> None:
    """Run the comparison, print the table and keep it as `table.md` beside the runs."""
    from rich.console import Console

    from letkd.files import write_whole
    from letkd.report.tables import as_markdown, as_rich
    from letkd.train.trials import compare as run

    rows = run(pair, methods, folder, trials=trials, settings=settings, teacher_weights=teacher_weights, quick=quick)
    write_whole(folder / "table.md", as_markdown(rows).encode())
    Console().print(as_rich(rows, title))
    print(f"run folder: {folder}")
