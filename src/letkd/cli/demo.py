"""`letkd demo`: the whole job on embedded data, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = ("ce", "kd", "quest", "letkd-1", "letkd-2")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    trials: Annotated[int, typer.Option(min=1, help="Seeds for each method.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="key=value for every recipe, e.g. train.epochs=2.")
    ] = None,
) -> None:
    """Train a teacher on scikit-learn's digits, then the same small student by CE, KD, QUEST, letKD-1 and letKD-2, and compare."""
    from rich.console import Console

    from letkd.files import write_whole
    from letkd.report.tables import as_markdown, as_rich
    from letkd.train.trials import compare

    rows = compare("digits/tiny", METHODS, out, trials=trials, settings=settings or [])
    write_whole(out / "table.md", as_markdown(rows).encode())
    Console().print(as_rich(rows, "digits: one small student, five ways to teach it"))
    print(f"run folder: {out}")
