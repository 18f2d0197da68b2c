"""Optimisers of torch.optim and their learning rates, as the recipe has them."""

import inspect
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn, optim

from letkd.errors import RecipeError, nearest
from letkd.recipes.schema import Optim, Phase, Recipe

# What the recipe sets elsewhere, and switches that change how an optimiser runs, not what it does.
NOT_SETTINGS = {"params", "lr", "weight_decay", "momentum", "nesterov", "differentiable", "maximize", "capturable"}
NEED_MORE = {"LBFGS": "needs a closure that evaluates the loss again", "SparseAdam": "takes sparse gradients only"}
OPTIMISERS: dict[str, type[optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer and name not in NEED_MORE
}


def build_optimizer(module: nn.Module, recipe: Optim) -> optim.Optimizer:
    """The optimiser that `optim.name` names, over every trainable parameter: student, KD layers and adapters alike.

    Parameters fall into groups: by the first of `optim.groups` whose pattern matches their name in the student, and, with
    `optim.decay_norms = false`, by whether they decay: vectors and scalars (norms, biases, the KD layer's scales) then do not.
    """
    kind = OPTIMISERS.get(recipe.name.lower())
    if kind is None:
        why = next((f", which {text}" for name, text in NEED_MORE.items() if name.lower() == recipe.name.lower()), "")
        raise RecipeError(f"optim.name is {recipe.name!r:.60}{why}; nearest: {nearest(recipe.name.lower(), OPTIMISERS)}")
    settings = _settings(kind, recipe)
    try:
        return kind(_groups(module, recipe), lr=recipe.lr, **settings)  # pyright: ignore[reportCallIssue] - each kind takes lr
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{kind.__name__} does not take {settings}: {str(error).splitlines()[0]}") from None


def _settings(kind: type[optim.Optimizer], recipe: Optim) -> dict[str, Any]:
    takes = inspect.signature(kind).parameters
    allowed = [name for name in takes if name not in NOT_SETTINGS]
    if unknown := [name for name in recipe.settings if name not in allowed]:
        raise RecipeError(
            f"optim.settings has the key {unknown[0]!r:.60}, and {kind.__name__} takes {', '.join(allowed)} there "
            f"(nearest: {nearest(unknown[0], allowed)})"
        )
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in recipe.settings.items()}
    if "momentum" in takes:
        settings["momentum"] = recipe.momentum
    if "nesterov" in takes:
        settings["nesterov"] = recipe.nesterov and recipe.momentum > 0
    return settings


def _groups(module: nn.Module, recipe: Optim) -> list[dict[str, Any]]:
    """Parameters with the same rate and decay together, in the order of their names' first appearance."""
    groups: dict[tuple[int | None, bool], dict[str, Any]] = {}
    matched = set()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = name.removeprefix("student.")
        index = next((i for i, group in enumerate(recipe.groups) if fnmatchcase(plain, group.match)), None)
        matched.add(index)
        own = None if index is None else recipe.groups[index]
        decays = recipe.decay_norms or parameter.ndim > 1
        decay = recipe.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        lr = recipe.lr if own is None or own.lr is None else own.lr
        group = {"params": [], "lr": lr, "initial_lr": lr, "weight_decay": decay if decays else 0.0}
        groups.setdefault((index, decays), group)["params"].append(parameter)
    for i, group in enumerate(recipe.groups):
        if i not in matched:
            raise RecipeError(f"optim.groups: no trainable parameter of the student matches {group.match!r}; see `letkd taps`")
    return list(groups.values())


def freeze(student: nn.Module, patterns: list[str]) -> None:
    """Keep the parameters whose names match from training. A batch norm that is frozen whole keeps its statistics, too (`Distiller`)."""
    for pattern in patterns:
        found = [parameter for name, parameter in student.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            modules = [name for name, _ in student.named_children()]
            raise RecipeError(
                f"no parameter of the student matches the pattern {pattern!r} of student.freeze; write for example {modules[0]}.*"
            )
        for parameter in found:
            parameter.requires_grad_(False)


def phase_at(epoch: int, recipe: Recipe) -> tuple[int, Phase | None]:
    """Which phase an epoch of the whole run, counted from 1, belongs to, and its number in it; None for the main training."""
    for phase in recipe.phases:
        if epoch <= phase.epochs:
            return epoch, phase
        epoch -= phase.epochs
    return epoch, None


def set_lr(optimizer: optim.Optimizer, factor: float) -> None:
    """Give every group its own first rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


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


SCHEDULES: Mapping[str, Callable[[int, int, int, Optim], float]] = {
    "milestones": lambda t, T, epoch, table: table.gamma ** sum(epoch > m for m in table.milestones),  # supplement 2.2
    "linear": lambda t, T, epoch, table: 1 - t / T,
    "cosine": lambda t, T, epoch, table: (1 + math.cos(math.pi * t / T)) / 2,
    "constant": lambda t, T, epoch, table: 1.0,
}
