"""Stops by signal. The exit code then means "run again to resume".

In a training loop SIGTERM and Ctrl-C set a flag: the step ends and the checkpoint is written (`polite_stop`). Elsewhere SIGTERM raises
`Stopped` at once (`immediate_stop`).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from letkd.errors import Stopped

STOPPED = "stopped; run the same command again to resume"


class StopRequest:
    """Whether a stop was requested, and whether a training loop was asked to stop and may have ended otherwise."""

    asked = False
    asked_in_loop = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C ends at once
        self.asked = True

    def _ask_and_raise(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise Stopped(STOPPED)


_command: StopRequest | None = None  # of the current command, if any


@contextmanager
def immediate_stop() -> Iterator[StopRequest]:
    """Inside `with`, SIGTERM raises `Stopped`.

    The request stores the signal, because an exception raised in a finaliser or under a bare `except:` of another library is lost.
    The next training loop then stops after one step, and the caller can check the request.
    """
    global _command
    request = _command = StopRequest()
    before = signal.signal(signal.SIGTERM, request._ask_and_raise)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
        _command = None


@contextmanager
def polite_stop() -> Iterator[StopRequest]:
    """Inside `with`, a signal only sets the request. Outside the main thread no handler is installed.

    If a run fails or ends after the signal, the next training loop of the command stops after one step.
    """
    request = StopRequest()
    request.asked = _command is not None and (_command.asked or _command.asked_in_loop)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request._ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _command is not None:
            _command.asked_in_loop |= request.asked
