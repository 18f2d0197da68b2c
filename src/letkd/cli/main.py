"""The `letkd` command."""

import signal
import sys
from types import FrameType

import typer

from letkd import __version__
from letkd.cli import (
    analyse,
    cells,
    compare,
    data,
    demo,
    evaluate,
    export,
    fit,
    methods,
    models,
    predict,
    report,
    show,
    taps,
    train,
)
from letkd.errors import RESUME_ME, LetkdError, Stopped
from letkd.memory import keep_large_blocks

_debug = False
app = typer.Typer(
    name="letkd",
    help="Distil image classifiers, with a layer that puts the teacher's knowledge inside the student.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("fit")(fit.fit)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("predict")(predict.predict)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("analyse")(analyse.analyse)
app.command("methods")(methods.methods)
app.command("models")(models.models)
app.command("taps")(taps.taps)
app.command("list")(cells.cells)
app.command("show")(show.show)
app.add_typer(data.app, name="data")


def _show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    global _debug
    _debug = debug


def main() -> None:
    """Run the command line: a wrong input is one sentence and exit code 2, a stop that can go on is 75, a hard one by Ctrl-C 130."""
    signal.signal(signal.SIGTERM, _stop)
    keep_large_blocks()
    try:
        app()
    except LetkdError as error:
        if _debug:
            raise
        print(f"letkd: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        print(f"letkd: {stop}", file=sys.stderr)
        sys.exit(RESUME_ME)
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of Ctrl-C
            print("letkd: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped("stopped; the same command goes on from the last checkpoint")
