"""Copies, modes and passing states of modules."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copied(model: Module) -> Module:
    """A deep copy, also of a model with tensors that a hook computes again in every pass, as `torch.nn.utils.weight_norm` does."""
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf  # which deepcopy refuses
    ]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})


def snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that undoes what forward passes from here on change: buffers and random streams."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return restore


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Within `with`, all modules are in eval mode; afterwards each has its previous mode.

    A module with a `train` method of its own is set by it, because it may do more: a LoRA layer splits the weights that `eval` merged.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # parents first: what their `train` did to their children is undone
            if module.training != mode and type(module).train is not nn.Module.train:
                module.train(mode)
            module.training = mode
