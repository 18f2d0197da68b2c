"""Launchers: run tasks in other processes, on one machine or on many."""

import inspect
from pathlib import Path
from typing import Any

from letkd.errors import RecipeError, nearest
from letkd.training.launchers.local import Local
from letkd.training.launchers.on_ray import Ray
from letkd.training.launchers.slurm import Slurm
from letkd.training.launchers.tasks import FitTask, Launcher, Outcome, Task, TrainTask, attempt

__all__ = [
    "FitTask",
    "Launcher",
    "Local",
    "Outcome",
    "Ray",
    "Slurm",
    "Task",
    "TrainTask",
    "attempt",
    "launcher_from",
]

FORMS = "local:2, slurm or ray, with settings as in slurm:partition=gpu,minutes=240,gpus=1"


def launcher_from(text: str, folder: Path) -> Launcher:
    """The launcher that `--launcher` names.

    Args:
        folder: of the runs; submitit stores its files there.
    """
    name, _, rest = text.partition(":")
    if name == "local":
        if not rest.isdecimal() or not 1 <= int(rest) <= 256:
            raise RecipeError(f"--launcher {text!r}: write the number of parallel runs, 1 to 256, as in local:2")
        return Local(int(rest))
    if name not in ("slurm", "ray"):
        raise RecipeError(f"--launcher {text!r}: unknown launcher; write {FORMS}")
    settings = _settings(text, rest, Slurm if name == "slurm" else Ray)
    return Slurm(folder / "slurm", **settings) if name == "slurm" else Ray(**settings)


def _settings(text: str, rest: str, launcher: Any) -> dict[str, Any]:
    """`key=value,key=value` as arguments of a launcher."""
    takes = {key: value for key, value in inspect.signature(launcher).parameters.items() if value.kind is value.KEYWORD_ONLY}
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (one.strip() for one in part.partition("="))
        if key not in takes or not equals:
            raise RecipeError(f"--launcher {text!r}: unknown setting {key!r}; nearest: {nearest(key, takes)}")
        whole = "int" in str(takes[key].annotation)
        if (whole and not value.isdecimal()) or (key == "cluster" and value not in ("slurm", "local")):
            raise RecipeError(f"--launcher {text!r}: {key} cannot be {value!r}; write {FORMS}")
        found[key] = int(value) if whole else value
    return found
