"""`letkd report`: one page, and tables and figures beside it, from run folders."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders with runs below them.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html.", show_default="the folder named, or what several share")
    ] = None,
    features: Annotated[Literal["pca", "tsne"], typer.Option(help="How features are laid in the plane.")] = "pca",
    root: o.Root = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also open networks of your own that the runs name; their code is run.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Row that the others are compared with.", show_default="the first student"),
    ] = None,
) -> None:
    """Write report.html (tables, curves, classes, health of the KD layers, transferred knowledge, features) and files beside it."""
    from letkd.report.write import write_report

    folder = out or Path(os.path.commonpath([path.resolve() for path in runs]) if len(runs) > 1 else runs[0])
    print(f"report: {write_report(runs, folder, features=features, root=root, trust=trust, against=against)}")
