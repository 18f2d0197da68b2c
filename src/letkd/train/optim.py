"""SGD and its learning rate, as the recipe has them."""

import math
from collections.abc import Callable

from torch import nn, optim

from letkd.recipes.schema import Optim, Phase, Recipe


def sgd(module: nn.Module, recipe: Optim) -> optim.SGD:
    """SGD over every trainable parameter: student, KD layers and adapters alike, weight decay on all of them."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return optim.SGD(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov and recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
    )


def phase_at(epoch: int, recipe: Recipe) -> tuple[int, Phase | None]:
    """Which phase an epoch of the whole run, counted from 1, belongs to, and its number in it; None for the main training."""
    for phase in recipe.phases:
        if epoch <= phase.epochs:
            return epoch, phase
        epoch -= phase.epochs
    return epoch, None


def lr_at(done: int, recipe: Recipe, steps: int) -> float:
    """The learning rate of the next step of the main training, after `done` steps of it, with `steps` steps per epoch.

    A pure function of the step, so that a resumed run has the same rates and nothing needs to be saved. The warm-up ends with the
    full rate; what follows it, of length T, is at t with

        milestones   γ^(number of milestones passed)      linear   1 − t/T      cosine   (1 + cos(π t/T)) / 2
    """
    table, epochs = recipe.optim, recipe.train.epochs
    warmup = round(steps * (table.warmup if table.warmup >= 1 else table.warmup * epochs))
    if done < warmup:
        return table.lr * (done + 1) / (warmup + 1)
    return table.lr * SCHEDULES[table.schedule](done - warmup, max(epochs * steps - warmup, 1), done // steps + 1, table)


SCHEDULES: dict[str, Callable[[int, int, int, Optim], float]] = {
    "milestones": lambda t, T, epoch, table: table.gamma ** sum(epoch > m for m in table.milestones),  # supplement 2.2
    "linear": lambda t, T, epoch, table: 1 - t / T,
    "cosine": lambda t, T, epoch, table: (1 + math.cos(math.pi * t / T)) / 2,
    "constant": lambda t, T, epoch, table: 1.0,
}
