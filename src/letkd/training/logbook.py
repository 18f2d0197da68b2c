"""Progress of a run in training: a bar or lines, the rows of the log, trackers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from letkd.progress import bar, on_terminal, say
from letkd.runs.folder import RunFolder
from letkd.training.trackers import tracked

Row = dict[str, Any]


class Logbook:
    """Receives every step and the row of every epoch; `logbook` opens one."""

    def __init__(self, tick: Callable[..., None], write: Callable[[Row], None], epochs: int, every: float):
        self._tick, self._write, self._epochs = tick, write, epochs
        self._every, self._said = every, time.monotonic()
        self._note = ""

    def note(self, epoch: int, sums: Mapping[str, float]) -> None:
        """Show the mean loss of the epoch so far next to the bar."""
        if sums.get("#steps"):
            self._note = f"epoch {epoch}  loss {sums['loss'] / sums['#steps']:.3f}"

    def step(self) -> None:
        self._tick(self._note)

    def epoch(self, row: Row) -> None:
        """Write the row; if there is no terminal for a bar, print a line, at most one per `every` seconds."""
        self._write(row)
        if not on_terminal() and time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            known = {name: row[f"{name}_top1"] for name in ("train", "val")}
            accuracy = "".join(f"  {name} {top1:.2f} %" for name, top1 in known.items() if top1 is not None)
            say(f"epoch {row['epoch']}/{self._epochs}  loss {row['loss']:.3f}{accuracy}")


@contextmanager
def logbook(
    title: str,
    run: RunFolder,
    log: Sequence[str] | None,
    *,
    first: int,
    steps: int,
    epochs: int,
    writes: bool,
    every: float = 10.0,
) -> Iterator[Logbook]:
    """The logbook of a run from epoch `first` on, with `steps` steps to do.

    Args:
        log: names of trackers; see `letkd.training.trackers`.
        writes: whether this process writes the rows.
    """
    with bar(title, steps) as tick, tracked(run, log, first) if writes else nullcontext() as show:

        def write(row: Row) -> None:
            if show is not None:
                # Write the row first: an extra row is dropped when the run resumes, but a missing one could not be restored.
                run.log(row)
                show(row)

        yield Logbook(tick, write, epochs, every)
