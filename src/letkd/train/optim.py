"""SGD and its step schedule, as the recipe has them."""

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


def lr_at(epoch: int, recipe: Optim) -> float:
    """The learning rate of an epoch counted from 1: it falls by gamma after each milestone that has passed."""
    return recipe.lr * recipe.gamma ** sum(epoch > milestone for milestone in recipe.milestones)  # supplement 2.2
