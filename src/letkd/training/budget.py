"""`letkd train --time`: as many epochs as fit into a time, from the first steps' speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
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

WARM = 3  # steps before the clock starts: the first ones allocate memory and choose algorithms
LEAST = 5  # steps on the clock, or as many as an epoch has
SHARE = 0.02  # of the time that measuring may take if more steps than LEAST fit into it
MARGIN = 0.97  # of the time that is planned with: the clock varies


@dataclass(frozen=True)
class Cost:
    """What a run costs, in seconds.

    Args:
        before: what passed before training could begin, the offline parts included.
        step: a step.
        epoch: what an epoch takes besides its steps: evaluation on the validation split.
        after: evaluation on the test split.
    """

    before: float
    step: float
    epoch: float
    after: float


def plan(recipe: Recipe, folder: Path, *, supervision: Path | None = None) -> dict[str, Any]:
    """The epochs that fit into `train.time`, as overrides of the recipe; those of the run in the folder if it has begun.

    If not even one epoch fits, `train.steps` cuts it.
    """
    for path in (folder, *RunFolder.children(folder)):
        held = RunFolder(path).recipe.train if RunFolder(path).exists else None
        if held is not None and held.time == recipe.train.time:
            return {"train.epochs": held.epochs, "train.steps": held.steps}
    cost, steps = from_first(measure(recipe, Path(supervision or RunFolder(folder).supervision)))
    epochs, cut = epochs_within(recipe, cost, steps)
    shown = f"{epochs} epoch{'s' if epochs > 1 else ''} of {cut or steps} steps"
    say(f"--time: {1000 * cost.step:.0f} ms per step, so {shown} fit into {recipe.train.time:g} s")
    return {"train.epochs": epochs, "train.steps": cut or recipe.train.steps}


def epochs_within(recipe: Recipe, cost: Cost, steps: int) -> tuple[int, int | None]:
    """How many epochs of so many steps fit after the phases; if none does, one, and the steps that do."""
    seconds = recipe.train.time or 0.0
    left = MARGIN * seconds - cost.before - cost.after
    left -= sum(phase.epochs for phase in recipe.phases) * (steps * cost.step + cost.epoch)
    epochs = int(left // (steps * cost.step + cost.epoch))
    if epochs >= 1:
        return epochs, None
    fitting = int((left - cost.epoch) // cost.step)
    if fitting < 1:
        raise RecipeError(
            f"--time {seconds:g}s does not suffice for one step: before and after training {cost.before + cost.after:.0f} s pass, an "
            f"epoch's evaluation takes {cost.epoch:.1f} s and a step {cost.step:.2f} s; give more time"
        )
    return 1, fitting


def measure(recipe: Recipe, shared: Path) -> tuple[Cost, int]:
    """What the recipe costs on this machine, and the steps of an epoch. What is trained here is thrown away; what is fitted is kept.

    The teacher's cache is left out: with it, the run is faster than planned.
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
    budget = SHARE * (recipe.train.time or 0.0)
    learner.model.train()
    stream = iter(_endless(batches))

    def step() -> None:
        batch = replace(next(stream).to(fabric.device), epoch=1)
        learner.take(batch, 0.0, done=0, of=steps)  # a rate of zero: no step diverges

    def evaluate(loader: Loader) -> float:
        """Seconds for all of a split, from its first batches."""
        some = [batch.to(fabric.device) for batch in islice(loader, 3)]
        if not some:
            return 0.0
        per = _seconds(lambda: as_logits(distiller.student(some[-1].x), distiller.student), budget, fabric.device, most=3)
        return per * len(loader)

    per_step = _seconds(step, budget, fabric.device, most=max(steps, LEAST), warm=WARM)
    distiller.eval()
    with torch.no_grad():
        splits = [
            eval_loader(recipe, data, part, rank=fabric.global_rank, world=fabric.world_size) for part in (data.val, data.test)
        ]
        val, test = map(evaluate, splits)
    passed = time.monotonic() - began + (ready - began)  # data and networks are read once more
    return Cost(passed, per_step, val, val + test), steps


def _endless(batches: Loader):
    while True:
        yield from batches


def _seconds(run: Callable[[], object], budget: float, device: torch.device, *, most: int, warm: int = 1) -> float:
    """Mean time of a call."""
    for _ in range(warm):
        run()
    _wait(device)
    began, count = time.monotonic(), 0
    while count < min(LEAST, most) or (count < most and time.monotonic() - began < budget):
        run()
        count += 1
        if count % LEAST == 0:
            _wait(device)
    _wait(device)
    return (time.monotonic() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
