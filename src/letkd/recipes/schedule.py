"""The learning rate of every step, as a recipe has it."""

import math
from collections.abc import Callable, Mapping

from letkd.recipes.schema import Optim, Phase, Recipe

MOST_STEPS = 200_000  # looked at: what is compared are rates per step, as schedules give them for so many steps in all


def phase_at(epoch: int, recipe: Recipe) -> tuple[int, Phase | None]:
    """Which phase an epoch of the whole run, counted from 1, belongs to, and its number in it; None for the main training."""
    for phase in recipe.phases:
        if epoch <= phase.epochs:
            return epoch, phase
        epoch -= phase.epochs
    return epoch, None


def lr_factor(done: int, recipe: Recipe, steps: int) -> float:
    """The learning rate of the next step of the main training over the first rate, after `done` steps, `steps` per epoch.

    A pure function of the step, so that a resumed run has the same rates and nothing needs to be saved. The warm-up ends with the
    full rate; what follows it, of length T, is at t with

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


def why_not_extended(held: Recipe, asked: Recipe) -> str | None:
    """Why a run of `held` is not the beginning of one of `asked`; None where it is: the same rates at every step that `held` has."""
    epochs = held.train.epochs
    if asked.train.epochs <= epochs:
        return f"it has {epochs} epochs, and {asked.train.epochs} are not more"
    steps = max(1, MOST_STEPS // epochs)
    for done in range(epochs * steps):
        before, after = lr_factor(done, held, steps), lr_factor(done, asked, steps)
        if before != after:
            keep = f"; keep them with `optim.milestones={held.optim.milestones}`" if held.optim.milestones else ""
            return (
                f"with {asked.train.epochs} epochs its rates would have been others: {before * held.optim.lr:g} became "
                f"{after * held.optim.lr:g} in epoch {done // steps + 1}"
                f"{keep if held.optim.schedule == 'milestones' else ''}"
            )
    return None
