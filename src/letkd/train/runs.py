"""A run folder is self-sufficient: recipe, environment, metrics, fitted supervision, checkpoint, student, result."""

import json
import math
import os
import platform
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter

from letkd.errors import RunError
from letkd.files import sweep, write_whole
from letkd.processes import world
from letkd.progress import say
from letkd.recipes.schema import Recipe, validate

# What a run folder may hold before it has a recipe: fitted supervision, and what a start that failed left.
OURS = ("supervision", ".lock", "env.json")
LIBRARIES = ("letkd", "torch", "numpy", "faiss-cpu", "scikit-learn", "lightning-fabric", "safetensors")


@dataclass(frozen=True)
class Result:
    """What a finished run reports. Accuracies are top-1 in per cent; the last epoch's is the one that counts.

    `teacher_top1` was measured before training, on validation images (training images without a validation split); None if the run
    had no teacher, or one of other classes.
    """

    last_test: float
    last_test_top5: float
    last_val: float | None
    best_val: float | None
    best_val_epoch: int | None
    best_val_test: float | None
    parameters: int
    epochs: int
    seconds: float
    teacher_top1: float | None = None


class RunFolder:
    """One run on disk. Opening it with another recipe than it holds is an error, with the same one it goes on.

    Nothing is written before `begin`: a command that turns out wrong leaves nothing behind.
    """

    def __init__(self, path: str | Path, recipe: Recipe):
        self.path, self.recipe = Path(path), recipe
        held = self.path / "recipe.toml"
        if held.exists():
            changed = _differences(_read_toml(held), json.loads(json.dumps(self._table(), default=str)))
            if changed:
                raise RunError(
                    f"{self.path} holds another run (it differs in {', '.join(changed)}); choose another folder with --out, or remove it"
                )
            return
        if self.path.exists() and (not self.path.is_dir() or any(_foreign(child) for child in self.path.iterdir())):
            raise RunError(f"{self.path} exists and holds something that is no run; choose another folder with --out")

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Hold the folder against other processes, and write recipe and environment, unless an earlier start did."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"the run folder {self.path} could not be made: {error.strerror}; choose another with --out"
            ) from None
        with _held(self.path):
            for folder in (self.path, self.last):
                sweep(folder)
            held, now = self.path / "recipe.toml", environment()
            if held.exists():
                self._tell_changes(now)
            else:
                write_whole(self.path / "env.json", json.dumps(now, indent=1).encode())
                write_whole(held, tomli_w.dumps(self._table()).encode())
            yield

    def _tell_changes(self, now: dict[str, Any]) -> None:
        try:
            before = json.loads((self.path / "env.json").read_text(encoding="utf-8"))
            before = TypeAdapter(dict[str, Any]).validate_python(before)
        except (OSError, ValueError, RecursionError):
            say(f"{self.path / 'env.json'} is damaged: under which conditions the run began is not known any more")
            return
        changed = [key for key in _differences(before, json.loads(json.dumps(now))) if key != "command"]
        if changed and self.result is None:
            say(f"{self.path}: began under other conditions ({', '.join(changed)} differ); the last digits may differ, too")

    def _table(self) -> dict[str, Any]:
        return self.recipe.model_dump(exclude_none=True)

    @property
    def last(self) -> Path:
        return self.path / "last"

    @property
    def student(self) -> Path:
        return self.path / "student.safetensors"

    @property
    def predictions(self) -> Path:
        """What the student takes each test image for."""
        return self.path / "predictions.safetensors"

    @property
    def best_on_validation(self) -> Path:
        return self.path / "best_on_validation.safetensors"

    def log(self, row: dict[str, Any]) -> None:
        """Add one epoch's row to metrics.jsonl: all of it or nothing."""
        rows = [*self.rows(before=row["epoch"]), row]
        write_whole(self.path / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())

    def rows(self, *, before: float = math.inf) -> list[dict[str, Any]]:
        """The rows of the epochs before one; those after it belong to work that a kill undid."""
        path = self.path / "metrics.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            return [row for row in rows if row["epoch"] < before]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise RunError(f"{path} is damaged ({error}); remove the run folder to start anew") from None

    def finish(self, result: Result) -> None:
        write_whole(self.path / "result.json", json.dumps(asdict(result), indent=1).encode())

    @property
    def result(self) -> Result | None:
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            return TypeAdapter(Result).validate_json(path.read_bytes(), strict=True)
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} is damaged ({str(error).splitlines()[0]}); remove this file, and the same command works the result out anew"
            ) from None


def recipe_of(folder: str | Path) -> Recipe:
    """The resolved recipe of a run."""
    path = Path(folder) / "recipe.toml"
    if not path.exists():
        raise RunError(f"{folder} is no run folder: it has no recipe.toml")
    return validate(_read_toml(path), str(path))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def _foreign(path: Path) -> bool:
    return path.name not in OURS and not (path.name.startswith(".") and path.name.endswith(".tmp"))


def environment() -> dict[str, Any]:
    """What could change the numbers: versions, machine, threads, processes."""
    import torch

    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "libraries": versions,
        "threads": torch.get_num_threads(),
        "processes": world(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": sys.argv[1:],
    }


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A folder that one process holds: the system lets go of it when that process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise RunError(
                f"{folder} is in use by another process ({file.read().strip() or 'unknown'}); wait for it, stop it, or choose another "
                "folder with --out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _differences(held: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    changed = []
    for key in sorted(held.keys() | asked.keys()):
        a, b = held.get(key), asked.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.append(f"{prefix}{key}")
    return changed
