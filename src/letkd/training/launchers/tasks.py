"""Tasks that a launcher runs in other processes, and their outcomes."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from letkd.errors import LetkdError, Stopped, UnsupportedPair
from letkd.progress import say
from letkd.recipes.schema import Recipe

RETRIES = 2  # of a task whose process was killed or stopped


@dataclass(frozen=True)
class Outcome:
    """How a task ended. `sentence` says why it is not done.

    `stopped` and `killed` tasks can resume from their run folder.
    """

    state: Literal["done", "failed", "unsupported", "stopped", "killed"]
    sentence: str = ""


class Task(Protocol):
    """Work that can be pickled; called again after a stop or a kill, it resumes."""

    @property
    def label(self) -> str: ...

    def __call__(self) -> None: ...


class Launcher(Protocol):
    """Runs tasks in other processes."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        """Run all tasks; yield index and outcome of each as it ends."""
        ...


class Waiting:
    """The tasks that have not started, by index. A task that was stopped or killed waits again, up to RETRIES times."""

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = tasks
        self._indices = list(range(len(tasks)))
        self._retries = dict.fromkeys(self._indices, RETRIES)

    def __len__(self) -> int:
        return len(self._indices)

    def pop(self) -> int:
        """The next task."""
        return self._indices.pop(0)

    def retry(self, k: int, outcome: Outcome) -> bool:
        """Whether task k, which ended with this outcome, waits again; a message says so."""
        if outcome.state not in ("stopped", "killed") or not self._retries[k]:
            return False
        self._retries[k] -= 1
        self._indices.append(k)
        say(f"{self._tasks[k].label}: {outcome.sentence}; started again")
        return True


def log_outcome(task: Task, outcome: Outcome, to_go: int) -> None:
    """Log how a task ended, and how many are left."""
    state = "finished" if outcome.state == "done" else f"{outcome.state}: {outcome.sentence}"
    say(f"{task.label}: {state}; {to_go} to go")


def attempt(task: Task) -> Outcome:
    """Run a task in this process; an error becomes an `Outcome`."""
    try:
        task()
    except Stopped as stop:
        return Outcome("stopped", str(stop))
    except UnsupportedPair as error:
        return Outcome("unsupported", str(error))
    except LetkdError as error:
        return Outcome("failed", str(error))
    except Exception as error:  # a traceback in another process would be lost
        lines = str(error).splitlines() or [""]
        return Outcome("failed", f"{type(error).__name__}: {lines[0]}")
    return Outcome("done")


@dataclass(frozen=True)
class TrainTask:
    """One run, in its own folder.

    Args:
        supervision: folder of fitted supervisions and the teacher's cache, shared between runs.
        save_minutes, force, log: as for `train`.
    """

    recipe: Recipe
    folder: Path
    supervision: Path | None = None
    save_minutes: float = 15.0
    force: bool = False
    log: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return str(self.folder)

    def __call__(self) -> None:
        from letkd.training.loop import train

        options = {"save_minutes": self.save_minutes, "force": self.force, "log": self.log}
        train(self.recipe, self.folder, supervision=self.supervision, **options)


@dataclass(frozen=True)
class FitTask:
    """Fits the offline parts of several recipes, one after the other, so that recipes with equal parts share one fit.

    A recipe that cannot be fitted is skipped here; its runs raise the error.
    """

    recipes: tuple[Recipe, ...]
    supervision: Path

    @property
    def label(self) -> str:
        return f"fits in {self.supervision}"

    def __call__(self) -> None:
        from letkd.training.build import build_distiller, fit, read_data

        for recipe in self.recipes:
            with suppress(LetkdError):
                data = read_data(recipe)
                fit(build_distiller(recipe, data), recipe, data, self.supervision)
