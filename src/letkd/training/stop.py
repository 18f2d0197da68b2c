"""Stops by signal. The exit code then says "resume me".

In a training loop SIGTERM and Ctrl-C are noted, the step ends and the checkpoint is written (`polite_stop`). Elsewhere SIGTERM raises
`Stopped` wherever the program is (`immediate_stop`).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from letkd.errors import Stopped

STOPPED = "stopped; run the same command again to continue"


class Wish:
    """Whether somebody asked for a stop."""

    asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C is meant
        self.asked = True

    def _ask_and_raise(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise Stopped(STOPPED)


_command: Wish | None = None  # that of the command under way, if any


@contextmanager
def immediate_stop() -> Iterator[Wish]:
    """While this lasts SIGTERM raises `Stopped`.

    The wish remembers the signal: an exception raised within a finaliser or under a bare `except:` of another library is lost. The
    next training loop then stops after one step, and the caller can tell from the wish.
    """
    global _command
    wish = _command = Wish()
    before = signal.signal(signal.SIGTERM, wish._ask_and_raise)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGTERM, before)
        _command = None


@contextmanager
def polite_stop() -> Iterator[Wish]:
    """While this lasts a signal is only noted. Elsewhere than in the main thread signals are not ours to handle."""
    wish = Wish()
    wish.asked = _command is not None and _command.asked
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish._ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
