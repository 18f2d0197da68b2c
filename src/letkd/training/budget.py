"""`letkd train --time`: as many epochs as fit into a given time, measured on the first steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from letkd.data import Loader
from letkd.distributed.processes import from_first
from letkd.errors import RecipeError
from letkd.progress import say
from letkd.recipes.schema import Recipe
from letkd.runs.folder import RunFolder
from letkd.taps import as_logits
from letkd.training.build import build_distiller, eval_loader, fit, read_data, train_loader
from letkd.training.fabric import launch
from letkd.training.steps import Steps

WARMUP_STEPS = 3  # steps before timing starts: the first ones allocate memory and choose algorithms
MIN_STEPS = 5  # timed steps, or as many as an epoch has
MEASURING_SHARE = 0.02  # of the time: what measuring may take if more than MIN_STEPS steps fit into it
MARGIN = 0.97  # of the time that is planned: step times vary


@dataclass(frozen=True)
class Cost:
    """What a run costs, in seconds.

    Args:
        before: time before training, including the offline parts.
        step: one step.
        epoch: per epoch in addition to its steps: evaluation on the validation split, averaged over `train.validate_every` epochs.
        after: evaluation on the test split.
        phases: one step of each phase.
    """

    before: float
    step: float
    epoch: float
    after: float
    phases: tuple[float, ...] = ()

    def times(self, factor: float) -> "Cost":
        """On a device that other runs use, too."""
        phases = tuple(factor * phase for phase in self.phases)
        return Cost(factor * self.before, factor * self.step, factor * self.epoch, factor * self.after, phases)


def plan(recipe: Recipe, folder: Path, *, supervision: Path | None = None, at_once: int = 1) -> dict[str, Any]:
    """The epochs that fit into `train.time`, as overrides of the recipe; if the run has already started, its epochs.

    If not even one epoch fits, `train.steps` shortens it.

    Args:
        at_once: number of runs that share the machine: each gets a part of the threads, or of the GPUs.
    """
    for path in (folder, *RunFolder.children(folder)):
        started = RunFolder(path).recipe.train if RunFolder(path).exists else None
        if started is not None and started.time == recipe.train.time:
            return {"train.epochs": started.epochs, "train.steps": started.steps}
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // at_once))
    try:
        cost, steps = from_first(measure(recipe, Path(supervision or RunFolder(folder).supervision)))
    finally:
        torch.set_num_threads(threads)
    if (gpus := torch.cuda.device_count()) and at_once > gpus:
        cost = cost.times(at_once / gpus)
    epochs, fewer = epochs_within(recipe, cost, steps)
    shown = f"{epochs} epoch{'s' if epochs > 1 else ''} of {fewer or steps} steps"
    say(f"--time: {1000 * cost.step:.0f} ms per step, so {shown} fit into {recipe.train.time:g} s")
    return {"train.epochs": epochs, "train.steps": fewer or recipe.train.steps}


def epochs_within(recipe: Recipe, cost: Cost, steps: int) -> tuple[int, int | None]:
    """How many epochs of `steps` steps fit after the phases; if none fits, one epoch and the number of steps that fit."""
    seconds = recipe.train.time or 0.0
    left = MARGIN * seconds - cost.before - cost.after
    phases = sum(phase.epochs * (steps * step + cost.epoch) for phase, step in zip(recipe.phases, cost.phases, strict=True))
    left -= phases
    epochs = int(left // (steps * cost.step + cost.epoch))
    if epochs >= 1:
        return epochs, None
    fitting = int((left - cost.epoch) // cost.step)
    if fitting < 1:
        raise RecipeError(
            f"--time {seconds:g}s is too short for one step: the work before and after training takes {cost.before + cost.after:.0f} s, "
            f"{f'the phases {phases:.0f} s, ' if phases else ''}the evaluation per epoch {cost.epoch:.1f} s and a step {cost.step:.2f} s; "
            "give more time"
        )
    return 1, fitting


def measure(recipe: Recipe, shared: Path) -> tuple[Cost, int]:
    """The cost of the recipe on this machine, and the steps per epoch. Trained weights are discarded; fitted parts are kept.

    The teacher's cache is not used here: with it, the run is faster than planned.
    """
    began = time.monotonic()
    fabric = launch(recipe)
    data = read_data(recipe)
    fabric.seed_everything(recipe.train.seed, verbose=False)
    distiller = build_distiller(recipe, data)
    distiller.set_weights(recipe.weights)
    batches = train_loader(recipe, data, rank=fabric.global_rank, world=fabric.world_size)
    ready = time.monotonic()
    fit(distiller, recipe, data, shared)
    learner = Steps(fabric, distiller, recipe)
    steps = min(len(batches), recipe.train.steps or len(batches))
    budget = MEASURING_SHARE * (recipe.train.time or 0.0)
    learner.model.train()
    stream, numbers = iter(_endless(batches)), cycle(range(steps))

    def step() -> None:
        batch = replace(next(stream).to(fabric.device), epoch=1)
        learner.take(batch, 0.0, done=next(numbers), of=steps)  # with a rate of zero no step diverges

    def evaluate(loader: Loader) -> float:
        """Seconds for a whole split, estimated from its first batches."""
        sample = [batch.to(fabric.device) for batch in islice(loader, 3)]
        if not sample:
            return 0.0
        per = _seconds(
            lambda: as_logits(distiller.student(sample[-1].x), distiller.student), budget, fabric.device, max_calls=3
        )
        return per * len(loader)

    per_step = []
    for weights in (*(phase.weights for phase in recipe.phases), recipe.weights):  # with other weights, other parts run
        distiller.set_weights(weights)
        per_step.append(_seconds(step, budget, fabric.device, max_calls=max(steps, MIN_STEPS), warmup=WARMUP_STEPS))
    distiller.eval()
    with torch.no_grad():
        splits = [
            eval_loader(recipe, data, part, rank=fabric.global_rank, world=fabric.world_size) for part in (data.val, data.test)
        ]
        val, test = map(evaluate, splits)
    before = time.monotonic() - began + (ready - began)  # the run reads data and networks again
    *phases, main = per_step
    return Cost(before, main, val / recipe.train.validate_every, val + test, tuple(phases)), steps


def _endless(batches: Loader):
    while True:
        yield from batches


def _seconds(run: Callable[[], object], budget: float, device: torch.device, *, max_calls: int, warmup: int = 1) -> float:
    """Mean time per call. All processes make the same number of calls, which the first process decides."""
    for _ in range(warmup):
        run()
    _wait(device)
    began, count = time.monotonic(), 0
    while count < max_calls:
        run()
        count += 1
        if count % MIN_STEPS == 0:
            _wait(device)
            if from_first(time.monotonic() - began >= budget):
                break
    _wait(device)
    return (time.monotonic() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
