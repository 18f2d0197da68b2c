"""Optimisers of torch.optim, set up from the recipe."""

import inspect
from fnmatch import fnmatchcase
from typing import Any

from torch import nn, optim

from letkd.errors import RecipeError, nearest
from letkd.recipes.schema import Optim

# Arguments that the recipe sets elsewhere, and switches that change how an optimiser runs, not its result.
NOT_SETTINGS = {"params", "lr", "weight_decay", "momentum", "nesterov", "differentiable", "maximize", "capturable"}
NEED_MORE = {"LBFGS": "needs a closure that evaluates the loss again", "SparseAdam": "takes sparse gradients only"}
OPTIMISERS: dict[str, type[optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer and name not in NEED_MORE
}


def build_optimizer(module: nn.Module, recipe: Optim) -> optim.Optimizer:
    """The optimiser that `optim.name` names, over every trainable parameter: student, KD layers and adapters alike.

    Parameters are grouped by the first of `optim.groups` whose pattern matches their name in the student. With
    `optim.decay_norms = false`, vectors and scalars (norms, biases, the KD layer's scales) form groups without weight decay.
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
            f"optim.settings has the key {unknown[0]!r:.60}, but {kind.__name__} takes {', '.join(allowed)} "
            f"(nearest: {nearest(unknown[0], allowed)})"
        )
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in recipe.settings.items()}
    if "momentum" in takes:
        settings["momentum"] = recipe.momentum
    if "nesterov" in takes:
        settings["nesterov"] = recipe.nesterov and recipe.momentum > 0
    return settings


def _groups(module: nn.Module, recipe: Optim) -> list[dict[str, Any]]:
    """Groups of parameters with the same rate and decay, in the order of first appearance."""
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
    """Do not train the parameters whose names match. A batch norm with all parameters frozen keeps its statistics, too (`Distiller`)."""
    for pattern in patterns:
        found = [parameter for name, parameter in student.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            modules = [name for name, _ in student.named_children()]
            raise RecipeError(
                f"no parameter of the student matches the pattern {pattern!r} of student.freeze; write for example {modules[0]}.*"
            )
        for parameter in found:
            parameter.requires_grad_(False)


def set_lr(optimizer: optim.Optimizer, factor: float) -> None:
    """Set the rate of every group to its first rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
