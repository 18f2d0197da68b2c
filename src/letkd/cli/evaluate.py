"""`letkd eval`: the accuracy of a trained student, without its teacher."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from letkd.cli import options as o


def evaluate(
    what: Annotated[Path, typer.Argument(help="A run folder, or a student.safetensors file.", show_default=False)],
    data: o.Data = None,
    root: o.Root = None,
    student: Annotated[str | None, typer.Option(help="The network, where it is not of the zoo.", show_default=False)] = None,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which split.")] = "test",
) -> None:
    """Evaluate a student on a split of its data set, or of another with the same classes."""
    from rich.console import Console
    from rich.table import Table

    from letkd.train.students import evaluate_student

    accuracy = evaluate_student(what, data=data, root=root, split=split, student=student)
    table = Table(title=str(what), title_justify="left")
    for name in ("split", "top-1 (%)", "top-5 (%)", "loss", "images"):
        table.add_column(name, justify="right")
    table.add_row(split, f"{accuracy.top1:.2f}", f"{accuracy.top5:.2f}", f"{accuracy.loss:.4f}", f"{accuracy.n:,}")
    Console().print(table)
