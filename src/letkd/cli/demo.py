"""`letkd demo`: the whole job on embedded data, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.cli.compare import show

METHODS = ("ce", "kd", "quest", "letkd-1", "letkd-2")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds for each method.")] = 3,
    settings: o.Settings = None,
) -> None:
    """Train a teacher on scikit-learn's digits, then the same small student by five methods, compare, and write a report."""
    title = "digits: one small student, five ways to teach it"
    show("digits/tiny", list(METHODS), out, trials=trials, settings=settings or [], teacher_weights=None, title=title)

    from letkd.report.write import write_report

    print(f"report: {write_report([out], out)}")
