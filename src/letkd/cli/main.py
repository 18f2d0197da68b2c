"""The `letkd` command."""

import atexit
import os
import signal
import sys
import traceback
from io import TextIOWrapper

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
    search,
    show,
    taps,
    train,
)
from letkd.cli.flags import in_flags, show_messages
from letkd.cli.memory import keep_large_blocks
from letkd.cli.threads import wait_passively
from letkd.errors import RESUME_ME, LetkdError, Stopped
from letkd.progress import plain
from letkd.training.stop import STOPPED, immediate_stop

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
app.command("search")(search.search)
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
    """Run the command line and exit.

    Exit codes: 0 done, 2 wrong input (one sentence), 75 stopped by SIGTERM or Ctrl-C and can be resumed, 130 stopped at once by
    Ctrl-C, 1 unexpected error (one sentence; among several processes the traceback, which says whose it is).
    """
    _open_streams()
    keep_large_blocks()
    wait_passively()
    show_messages()
    try:
        with immediate_stop() as wish:
            try:
                app()
            except BaseException as error:
                told = _stop_of(error, asked=wish.asked)
                if told is None:
                    raise
                _say(told[0])
                sys.exit(told[1])
    except Exception as error:
        sentence, code = _told(error)
        if _debug or (code == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            raise
        _say(sentence)
        sys.exit(code)
    finally:
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # from here on the exit code stands


def _stop_of(error: BaseException, *, asked: bool) -> tuple[str, int] | None:
    """The sentence and exit code where a command ended because it was stopped; None where it was not.

    Args:
        asked: SIGTERM came. Whatever the command ended with is then taken for its consequence, as other libraries may turn the
            exception into one of theirs or lose it.
    """
    if isinstance(error, Stopped):
        return str(error), RESUME_ME
    if asked:
        return STOPPED, RESUME_ME
    if isinstance(error, SystemExit) and error.code == 130:  # what typer makes of Ctrl-C
        return STOPPED, 130
    return None


def _told(error: Exception) -> tuple[str, int]:
    """What went wrong, in a sentence, and the exit code."""
    if isinstance(error, LetkdError):
        return str(error), 2
    if isinstance(error, RecursionError):
        return "an input is nested too deeply to be read; flatten it", 2
    if (library := _being_imported(error)) is not None:
        return (
            f"{library} could not be imported ({_root(error)}); check its installation, the memory that this process may use "
            "(`ulimit -v`) and environment variables that configure it (such as TORCH_LOGS)",
            2,
        )
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


def _being_imported(error: Exception) -> str | None:
    """The library in whose import an error arose, if it did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and library not in ("letkd", "__main__"):
            return library
    return None


def _root(error: BaseException) -> str:
    """The kind and the first line of the error that another one was raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _open_streams() -> None:
    """Open what the caller closed (`2>&-`): files opened later would take the places of standard output and error."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold anything


def _say(sentence: str) -> None:
    print(f"letkd: {plain(in_flags(' '.join(sentence.splitlines())))}", file=sys.stderr)
