"""`letkd report`: a report page with tables and figures, from run folders."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders that contain runs.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html.", show_default="RUN, or the common parent of several")
    ] = None,
    features: Annotated[Literal["pca", "tsne"], typer.Option(help="Projection of the features to two dimensions.")] = "pca",
    root: o.Root = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also open custom networks named by the runs; this runs their code.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Row to compare the other rows with.", show_default="the first student"),
    ] = None,
) -> None:
    """Write report.html (tables, curves, classes, health of the KD layers, transferred knowledge, features) and its files."""
    from letkd.report.write import write_report

    folder = out or Path(os.path.commonpath([path.resolve() for path in runs]) if len(runs) > 1 else runs[0])
    print(f"report: {write_report(runs, folder, features=features, root=root, trust=trust, against=against)}")
