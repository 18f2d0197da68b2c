"""The learning rate of every step of a recipe."""

import math
from collections.abc import Callable, Mapping

from letkd.recipes.schema import Optim, Phase, Recipe

MAX_STEPS = 200_000  # compared when a run is extended


def phase_at(epoch: int, recipe: Recipe) -> tuple[int, Phase | None]:
    """The number of an epoch within its phase, and the phase (None: the main training). `epoch` counts from 1 over the whole run."""
    for phase in recipe.phases:
        if epoch <= phase.epochs:
            return epoch, phase
        epoch -= phase.epochs
    return epoch, None


def lr_factor(done: int, recipe: Recipe, steps: int) -> float:
    """Learning rate of the next step of the main training, as a multiple of the first rate, after `done` steps, `steps` per epoch.

    A pure function of the step, so that a resumed run has the same rates and nothing needs to be saved. The warm-up ends with the
    full rate. After it, for step t of T, the factor is

        milestones   γ^(number of milestones passed)      linear   1 − t/T      cosine   (1 + cos(π t/T)) / 2
    """
    table, epochs = recipe.optim, recipe.train.epochs
    warmup = round(steps * (table.warmup if table.warmup >= 1 else table.warmup * epochs))
    if done < warmup:
        return (done + 1) / (warmup + 1)
    return SCHEDULES[table.schedule](done - warmup, max(epochs * steps - warmup, 1), done // steps + 1, table)


def _milestones(t: int, T: int, epoch: int, table: Optim) -> float:
    return table.gamma ** sum(epoch > milestone for milestone in table.milestones)  # supplement 2.2


SCHEDULES: Mapping[str, Callable[[int, int, int, Optim], float]] = {
    "milestones": _milestones,
    "linear": lambda t, T, epoch, table: 1 - t / T,
    "cosine": lambda t, T, epoch, table: (1 + math.cos(math.pi * t / T)) / 2,
    "constant": lambda t, T, epoch, table: 1.0,
}


def why_not_extended(old: Recipe, new: Recipe) -> str | None:
    """Why a run of `old` cannot be extended to `new`; None if it can: both have the same rates at every step of `old`."""
    epochs = old.train.epochs
    if new.train.epochs <= epochs:
        return f"it has {epochs} epochs, and {new.train.epochs} are not more"
    if auto := [name for name, weight in old.weights.items() if isinstance(weight, str)]:
        return (
            f"the automatic weight of {auto[0]!r} is measured in the first tenth of {epochs} epochs, not of {new.train.epochs}"
        )
    steps = max(1, MAX_STEPS // epochs)
    for done in range(epochs * steps):
        before, after = lr_factor(done, old, steps), lr_factor(done, new, steps)
        if before != after:
            keep = f"; keep them with `optim.milestones={old.optim.milestones}`" if old.optim.milestones else ""
            return (
                f"with {new.train.epochs} epochs its rates would have differed: {before * old.optim.lr:g} became "
                f"{after * old.optim.lr:g} in epoch {done // steps + 1}"
                f"{keep if old.optim.schedule == 'milestones' else ''}"
            )
    return None
