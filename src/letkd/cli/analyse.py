"""`letkd analyse`: the paper's analyses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from letkd.cli import options as o

if TYPE_CHECKING:
    from letkd.runs.grid import Grid

COST = "cost"


def analyse(
    name: Annotated[
        str, typer.Argument(help="alpha, geometry, k-inter, 3x3, multi-layer, fitnet or cost.", show_default=False)
    ],
    pair: Annotated[str | None, typer.Option(help="Pair, such as cifar100/rn56-rn20.", show_default="the paper's")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Use the first pair of this data set (e.g. digits) instead of --pair.", show_default=False),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds per row.")] = 3,
    classes: Annotated[
        int | None, typer.Option(min=2, help="For cost: number of classes.", show_default="the data set's")
    ] = None,
    root: o.Root = None,
    teacher_weights: o.TeacherWeights = None,
    settings: o.Settings = None,
    quick: o.Quick = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and tables; all analyses of a pair share it.", show_default="runs/analyse-<pair>"),
    ] = None,
) -> None:
    """Run an analysis of the paper and print its table next to the paper's numbers. Run the same command again to resume.

    alpha: the parts of letKD-2. geometry: LDA on the student's features. k-inter: sub-classes per class. 3x3: kernels instead of
    K-means centres. multi-layer: QUEST and letKD at two layers. fitnet: with and without layer and supervision. cost: inference
    time by K, without training.
    """
    from letkd.recipes import resolve
    from letkd.report.analyses import ANALYSES, find_analysis

    analysis = None if name == COST else find_analysis(name, COST)
    if pair is None and data is not None:
        pair = o.first_pair(data)
    pair = pair or (ANALYSES["alpha"] if analysis is None else analysis).pair
    folder = out or Path("runs") / f"analyse-{pair.replace('/', '-')}{'-quick' if quick else ''}"
    if analysis is None:
        from letkd.data import load_data
        from letkd.report.layer_cost import layer_cost

        recipe = resolve(pair, settings=settings or [])
        C = classes or load_data(recipe.data.name, root=root or recipe.data.root).num_classes
        _show(layer_cost(recipe.student.model, C), folder, name)
        return

    from letkd.report.analyses import as_chart, as_grid
    from letkd.training.trials import compare

    values = [*([] if root is None else [f"data.root={str(root)!r}"]), *(settings or [])]
    variants = analysis.variants()
    rows = compare(pair, variants, folder, trials=trials, settings=values, teacher_weights=teacher_weights, quick=quick)[
        -len(variants) :
    ]
    results = {variant.name: row.results for variant, row in zip(variants, rows, strict=True)}
    if analysis.measure is None:
        found = [[r.last_test for r in results[line.name] if r.last_test is not None] for line in analysis.lines]
    else:
        runs = {row.name: [folder / row.name / f"seed-{seed}" for seed in row.seeds] for row in rows}
        found = analysis.measure(analysis.lines, runs)
    notes = [f"{row.title} {row.note}." for row in rows if row.note]
    _show(as_grid(analysis, pair, found, notes), folder, name)
    if analysis.x_label:
        from letkd.report.charts import draw
        from letkd.report.write import write_file

        write_file(folder / f"{name}-curve", draw(as_chart(analysis, pair, found)))
        print(f"curve: {folder / f'{name}-curve.png'}")


def _show(grid: "Grid", folder: Path, name: str) -> None:
    """Print a table and save it as Markdown, LaTeX and CSV."""
    from rich.console import Console

    from letkd.files import write_whole
    from letkd.runs.grid import as_csv, as_latex, as_markdown, as_rich

    Console().print(as_rich(grid))
    for ending, content in {
        "md": as_markdown(grid),
        "tex": as_latex(grid),
        "csv": as_csv(grid.head, [[cell.text for cell in row] for row in grid.rows]),
    }.items():
        write_whole(folder / f"{name}.{ending}", content.encode())
    print(f"table: {folder / f'{name}.md'}")
