"""`letkd demo`: the whole workflow on built-in data, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

from letkd.cli import options as o
from letkd.cli.compare import show

METHODS = ("ce", "kd", "quest", "letkd-1", "letkd-2")
# An extra row: letKD-1 with as many unlabelled as labelled images per batch, taken from the images that the other rows do not use.
UNLABELLED = "letKD-1, other images without labels"
SETTINGS = (f"title={UNLABELLED!r}", "data.unlabelled='rest'", "data.unlabelled_share=0.5", "data.batch_size=32")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds per method.")] = 3,
    settings: o.Settings = None,
) -> None:
    """Train a teacher on scikit-learn's digits, then the same small student in six ways; compare them and write a report."""
    from letkd.training.trials import Variant

    title = "digits: one small student, six ways to teach it"
    methods = [*METHODS, Variant("letkd-1-unlabelled", "letkd-1", SETTINGS)]
    show("digits/tiny", methods, out, trials=trials, settings=settings or [], teacher_weights=None, title=title)

    from letkd.report.write import write_report

    print(f"report: {write_report([out], out)}")
