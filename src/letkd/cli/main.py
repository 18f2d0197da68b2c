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
for command, name, summary in (
    (demo.demo, "demo", "Train on digits in minutes, and print a table."),
    (train.train, "train", "Train a student, with or without a teacher."),
    (fit.fit, "fit", "Fit the teacher's supervision, without training."),
    (evaluate.evaluate, "eval", "Evaluate a student or any network."),
    (export.export, "export", "Export a trained student."),
    (predict.predict, "predict", "Classify images."),
    (compare.compare, "compare", "Train a student with several methods: one table."),
    (search.search, "search", "Search for a recipe's best values."),
    (report.report, "report", "Write an HTML report of runs."),
    (analyse.analyse, "analyse", "Run an analysis of the paper."),
    (methods.methods, "methods", "List the methods."),
    (models.models, "models", "List the networks of the zoo."),
    (taps.taps, "taps", "Show a network's modules, and propose taps."),
    (cells.cells, "list", "List the cells, with the paper's accuracy."),
    (show.show, "show", "Show a resolved recipe."),
):
    app.command(name, short_help=summary)(command)
app.add_typer(data.app, name="data")


def _show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
) -> None:
    global _debug
    _debug = debug


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0 done, 2 wrong input (one sentence), 75 stopped by SIGTERM or Ctrl-C and can be resumed, 130 stopped at once by
    Ctrl-C, 1 unexpected error (one sentence; a traceback if several processes run, because it names the process).
    """
    _open_streams()
    keep_large_blocks()
    show_messages()
    try:
        with immediate_stop() as request:
            try:
                app()
            except BaseException as error:
                ending = _stop_of(error, asked=request.asked)
                if ending is None:
                    raise
                _say(ending[0])
                sys.exit(ending[1])
    except Exception as error:
        sentence, code = _explain(error)
        if _debug or (code == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            raise
        _say(sentence)
        sys.exit(code)
    finally:
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # a signal no longer changes the exit code


def _stop_of(error: BaseException, *, asked: bool) -> tuple[str, int] | None:
    """The sentence and exit code if a command ended because it was stopped; None if it was not.

    Args:
        asked: whether SIGTERM was received. Any error is then attributed to it, because other libraries may replace or swallow
            the exception.
    """
    if isinstance(error, Stopped):
        return str(error), RESUME_ME
    if asked:
        return STOPPED, RESUME_ME
    if isinstance(error, SystemExit) and error.code == 130:  # typer's exit code for Ctrl-C
        return STOPPED, 130
    return None


def _explain(error: Exception) -> tuple[str, int]:
    """One sentence on what went wrong, and the exit code."""
    if isinstance(error, LetkdError):
        return str(error), 2
    if isinstance(error, RecursionError):
        return "an input is too deeply nested to be read; flatten it", 2
    if (library := _being_imported(error)) is not None:
        return (
            f"{library} could not be imported ({_root(error)}); check its installation, the memory limit of this process "
            "(`ulimit -v`) and environment variables that configure the library (such as TORCH_LOGS)",
            2,
        )
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return f"not enough memory ({lines[0]}); reduce data.batch_size, data.size or K", 2
    if isinstance(error, OSError):
        path = "" if error.filename is None else f"{str(error.filename)!r:.300}: "
        return f"{path}{error.strerror or lines[0]}; check the path and its permissions", 2
    return (
        f"unexpected error, {type(error).__name__}: {lines[0]}; this is a bug: please report it with the "
        "traceback that `letkd --debug …` shows",
        1,
    )


def _being_imported(error: Exception) -> str | None:
    """The library whose import raised the error; None if no import did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and library not in ("letkd", "__main__"):
            return library
    return None


def _root(error: BaseException) -> str:
    """Type and first line of the original cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _open_streams() -> None:
    """Open the standard streams that the caller closed (`2>&-`); otherwise files opened later would take their descriptors."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may contain any bytes


def _say(sentence: str) -> None:
    print(f"letkd: {plain(in_flags(' '.join(sentence.splitlines())))}", file=sys.stderr)
