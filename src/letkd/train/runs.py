"""A run folder is self-sufficient: recipe, environment, metrics, fitted supervision, checkpoint, student, result."""

import json
import os
import platform
import sys
import tomllib
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

from letkd.errors import RunError
from letkd.files import write_whole
from letkd.recipes.schema import Recipe, validate

LIBRARIES = ("letkd", "torch", "numpy", "faiss-cpu", "scikit-learn", "lightning-fabric", "safetensors")


@dataclass(frozen=True)
class Result:
    """What a finished run reports. Accuracies are top-1 in per cent; the last epoch's is the one that counts."""

    last_test: float
    last_test_top5: float
    last_val: float | None
    best_val: float | None
    best_val_epoch: int | None
    best_val_test: float | None
    parameters: int
    epochs: int
    seconds: float


class RunFolder:
    """One run on disk. Opening it with another recipe than it holds is an error, with the same one it goes on.

    Nothing is written before `begin`: a command that turns out wrong leaves nothing behind.
    """

    def __init__(self, path: str | Path, recipe: Recipe):
        self.path, self.recipe = Path(path), recipe
        held = self.path / "recipe.toml"
        if held.exists():
            changed = _differences(tomllib.loads(held.read_text()), json.loads(json.dumps(self._table())))
            if changed:
                raise RunError(
                    f"{self.path} holds another run (it differs in {', '.join(changed)}); choose another folder with --out, or remove it"
                )
            return
        if self.path.exists() and (not self.path.is_dir() or any(child.name != "supervision" for child in self.path.iterdir())):
            raise RunError(f"{self.path} exists and holds something that is no run; choose another folder with --out")

    def begin(self) -> None:
        """Write recipe and environment, unless an earlier start did."""
        held = self.path / "recipe.toml"
        if not held.exists():
            write_whole(self.path / "env.json", json.dumps(environment(), indent=1).encode())
            write_whole(held, tomli_w.dumps(self._table()).encode())

    def _table(self) -> dict[str, Any]:
        return self.recipe.model_dump(exclude_none=True)

    @property
    def last(self) -> Path:
        return self.path / "last"

    @property
    def student(self) -> Path:
        return self.path / "student.safetensors"

    @property
    def best_on_validation(self) -> Path:
        return self.path / "best_on_validation.safetensors"

    def log(self, row: dict[str, Any]) -> None:
        """Add one epoch's row to metrics.jsonl."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, epoch: int) -> None:
        """Drop the rows after `epoch`: they belong to work that a kill undid."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            rows = [line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["epoch"] <= epoch]
            write_whole(path, "".join(f"{line}\n" for line in rows).encode())

    def finish(self, result: Result) -> None:
        write_whole(self.path / "result.json", json.dumps(asdict(result), indent=1).encode())

    @property
    def result(self) -> Result | None:
        path = self.path / "result.json"
        return Result(**json.loads(path.read_text())) if path.exists() else None


def recipe_of(folder: str | Path) -> Recipe:
    """The resolved recipe of a run."""
    path = Path(folder) / "recipe.toml"
    if not path.exists():
        raise RunError(f"{folder} is no run folder: it has no recipe.toml")
    try:
        return validate(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def environment() -> dict[str, Any]:
    """What could change the numbers: versions, machine, threads."""
    import torch

    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "libraries": versions,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "command": sys.argv[1:],
    }


def _differences(held: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    changed = []
    for key in sorted(held.keys() | asked.keys()):
        a, b = held.get(key), asked.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.append(f"{prefix}{key}")
    return changed
