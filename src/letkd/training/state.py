"""The state of a run, and its checkpoints."""

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from letkd.distributed.processes import objects_of_all
from letkd.errors import CheckpointError
from letkd.runs.checkpoint import load_checkpoint, save_checkpoint
from letkd.training.steps import Steps


@dataclass
class State:
    """Progress of a run: `step` steps of `epoch` are done, with `sums` over them; the rest of the state is in tensors."""

    epoch: int = 1
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    best_val: float | None = None
    best_val_epoch: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    teacher_top1: float | None = None
    precision: dict[str, Any] = field(default_factory=dict)
    updates: int = 0
    weights_told: bool = False


class Clock:
    """Time that a run has taken, including that before it was interrupted: on the clock, and on the processors of this process."""

    def __init__(self, state: State):
        self._began = time.monotonic() - state.seconds
        self._cpu_began = time.process_time() - state.cpu_seconds

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def cpu_seconds(self) -> float:
        return time.process_time() - self._cpu_began


def save_state(folder: Path, state: State, steps: Steps) -> None:
    """Write a checkpoint; all processes must call it."""
    state.updates, state.precision = steps.updates, steps.fabric.strategy.precision.state_dict()
    values = {**asdict(state), "sums": objects_of_all(state.sums)}
    with nullcontext() if steps.average is None else steps.average.in_place(False):
        average = None if steps.average is None else steps.average.values
        save_checkpoint(folder, steps.distiller, steps.optimizer, values, average)


def restore_state(folder: Path, steps: Steps) -> State:
    """Restore the last checkpoint and return its state; a new state if there is no checkpoint."""
    fabric = steps.fabric
    average = None if steps.average is None else steps.average.values
    values = load_checkpoint(folder, steps.distiller, steps.optimizer, average)
    if values is None:
        if fabric.global_rank:  # the networks are the same in all processes; what methods draw from here on is not
            torch.manual_seed(steps.recipe.train.seed + (fabric.global_rank << 32))
        return State()
    sums = values.pop("sums")
    if len(sums) != fabric.world_size:  # the number of processes has changed: the first takes the sums of all
        sums = [sum_tables(sums)] + [{}] * fabric.world_size
    try:
        state = State(**values, sums=sums[fabric.global_rank])
        fabric.strategy.precision.load_state_dict(state.precision)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise CheckpointError(f"{folder} was written by another version of letkd ({error}); choose another folder") from None
    steps.updates = state.updates
    return state


def sum_tables(tables: list[dict[str, float]]) -> dict[str, float]:
    """Sum of tables, name by name."""
    sums: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
