"""A polite stop: SIGTERM and Ctrl-C let the step end and the checkpoint be written, and the exit code says "resume me"."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Wish:
    """Whether somebody asked for a stop."""

    asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C is meant
        self.asked = True


@contextmanager
def polite_stop() -> Iterator[Wish]:
    """While this lasts a signal is only noted. Elsewhere than in the main thread signals are not ours to handle."""
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish._ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
