"""Messages and progress bars.

The library logs its messages to `logging.getLogger("letkd")` and is otherwise silent. The command line calls `set_quiet(False)`:
messages and, on a terminal, bars then go to standard error.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
LINE_SECONDS = 60.0  # between the lines that replace a bar if there is no terminal
# C0 and C1 controls, line separators, text direction marks, bytes that are not UTF-8.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
logger = logging.getLogger("letkd")
_quiet = True
_active: Any = None  # the one rich Progress on screen; nested bars are rows of it


class _ToScreen(logging.Handler):
    """Prints messages to standard error, above any bars."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _active is not None:
            _active.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


to_screen = _ToScreen()


def set_quiet(quiet: bool) -> None:
    """Turn messages and bars off (the default in Python) or on (the command line). Your own log handlers get every message."""
    global _quiet
    _quiet = quiet
    logger.removeHandler(to_screen)
    logger.propagate = quiet  # print each message only once
    if not quiet:
        logger.addHandler(to_screen)
        logger.setLevel(logging.INFO)


def is_quiet() -> bool:
    return _quiet


def on_terminal() -> bool:
    return not _quiet and sys.stderr.isatty()


def plain(text: str) -> str:
    r"""Text from a file, made safe for a terminal: control characters and text direction marks are escaped.

    Examples:
        >>> plain("cat\x1b[2J")
        'cat\\x1b[2J'
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(table: Any) -> None:
    """Print a table to standard output. Its cells are plain text: no markup, no control characters."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(plain(text), **{**options, "markup": False, "emoji": False, "highlight": False})

    Plain().print(table)


def say(text: str) -> None:
    """Log a message for the user at level INFO."""
    logger.info("%s", plain(text))


@contextmanager
def bar(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar, removed when its block ends; one line per minute if there is no terminal.

    Call the function that it yields once per step: `tick()` or `tick(note)`.
    """
    global _active
    if not on_terminal():
        yield _lines(description, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    opened = _active is None
    if opened:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        _active = Progress(
            TextColumn("{task.description}", markup=False),
            *columns,
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        _active.start()
    progress = _active
    task = progress.add_task(description, total=total, note="")

    def tick(note: str = "", advance: int = 1) -> None:
        progress.update(task, advance=advance, note=note)

    try:
        yield tick
    finally:
        progress.remove_task(task)
        if opened:
            progress.stop()
            _active = None


def _lines(description: str, total: int | None) -> Callable[..., None]:
    done, last = 0, time.monotonic()

    def tick(note: str = "", advance: int = 1) -> None:
        nonlocal done, last
        done += advance
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(f"{description}: {done:,}{'' if total is None else f' of {total:,}'}  {note}".rstrip())

    return tick


def track(items: Iterable[Item], description: str) -> Iterator[Item]:
    """Iterate over items with a progress bar."""
    total = len(items) if hasattr(items, "__len__") else None  # pyright: ignore[reportArgumentType]
    with bar(description, total) as tick:
        for item in items:
            yield item
            tick()
