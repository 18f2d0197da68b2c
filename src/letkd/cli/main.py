"""The `letkd` command."""

import os
import signal
import sys
from io import TextIOWrapper
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
from letkd.progress import plain

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
    """Run the command line: a wrong input is one sentence and exit code 2, a stop that can go on is 75, a hard one by Ctrl-C 130.

    What nobody foresaw is one sentence, too, and exit code 1; among several processes it keeps its traceback, which says whose it is.
    """
    signal.signal(signal.SIGTERM, _stop)
    keep_large_blocks()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold anything
    try:
        app()
    except Stopped as stop:
        _say(str(stop))
        sys.exit(RESUME_ME)
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of Ctrl-C
            _say("stopped; the same command goes on from the last checkpoint")
        raise
    except Exception as error:
        sentence, code = _told(error)
        if _debug or (code == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            raise
        _say(sentence)
        sys.exit(code)


def _told(error: Exception) -> tuple[str, int]:
    """What went wrong, in a sentence, and the exit code."""
    if isinstance(error, LetkdError):
        return str(error), 2
    if isinstance(error, RecursionError):
        return "an input is nested too deeply to be read; flatten it", 2
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return f"there is not enough memory ({lines[0]}); choose smaller sizes: data.batch_size, data.size, K", 2
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{str(error.filename)!r:.300}: "
        return f"{where}{error.strerror or lines[0]}; check the path and its rights", 2
    return (
        f"an error that nobody foresaw, {type(error).__name__}: {lines[0]}; the same command after `letkd --debug` shows where",
        1,
    )


def _say(sentence: str) -> None:
    print(f"letkd: {plain(' '.join(sentence.splitlines()))}", file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped("stopped; the same command goes on from the last checkpoint")
