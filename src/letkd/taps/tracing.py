"""A trace of a model: the output shapes of every module in one forward pass, and whether they affect the model's output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from letkd.modules import in_eval_mode
from letkd.taps.grafts import check_model, find_module
from letkd.taps.layouts import Layout, first_tensor, through
from letkd.taps.outputs import logits_in
from letkd.taps.tap import Taps, run_once


@dataclass(frozen=True)
class ModuleRun:
    """One module in a forward pass.

    Args:
        path: of the module; `""` for the model itself.
        module: the module.
        shapes: output shape of each of its calls, or the name of its type if it is not a tensor; empty if the module did not run.
            For the model itself, the shape of its logits, if it returns any.
        names: other paths of the same module.
        order: position in the order in which modules first finished; -1 if the module did not run.
        live: whether the output depends on the image and reaches the model's output; True if this is unknown.
        first: shape of the first tensor, if the module returned a tuple.
    """

    path: str
    module: nn.Module
    shapes: tuple[tuple[int, ...] | str, ...]
    names: tuple[str, ...]
    order: int
    live: bool = True
    first: tuple[int, ...] | None = None


def trace(model: nn.Module, example: Tensor) -> list[ModuleRun]:
    """Every module in one forward pass (see `run_once`), in the order of `named_modules`."""
    check_model(model)
    shapes: dict[nn.Module, list[tuple[int, ...] | str]] = {}
    firsts: dict[nn.Module, tuple[int, ...]] = {}
    handles = []

    def note(module: nn.Module, args: tuple, output: Any) -> None:
        if module is model and (logits := logits_in(output)) is not None:
            output = logits
        if (first := first_tensor(output)) is not output:
            firsts[module] = tuple(first.shape)
        shapes.setdefault(module, []).append(tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__)

    try:
        handles = [module.register_forward_hook(note) for module in model.modules()]
        run_once(Taps(model, {}), example)
    finally:
        for handle in handles:
            handle.remove()
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)
    order = {module: i for i, module in enumerate(shapes)}
    live = _live(model, example)
    return [
        ModuleRun(
            first,
            module,
            tuple(shapes.get(module, ())),
            tuple(others),
            order.get(module, -1),
            live=not live or module in live,
            first=firsts.get(module),
        )
        for module, (first, *others) in names.items()
    ]


def _live(model: nn.Module, example: Tensor) -> set[nn.Module]:
    """Modules whose output, one tensor per image, depends on the image and reaches the model's output; empty if unknown.

    One forward and one backward pass with two images. Only the images require gradients, so an output that depends only on parameters
    (such as a table of relative positions) has no gradient, and a dependence is found even if weights are zero.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, *example.shape[1:], generator=generator).to(example).requires_grad_()
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple, output: Any) -> None:
        output = first_tensor(output)
        if isinstance(output, Tensor) and output.requires_grad and output.shape[:1] == (2,):
            seen[module] = output

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.enable_grad(), in_eval_mode(model):
            for parameter in trained:
                parameter.requires_grad_(False)
            outputs = [output for output in tensors_in(model(x)) if output.requires_grad]
            gradients = torch.autograd.grad([output.sum() for output in outputs], list(seen.values()), allow_unused=True)
    except Exception:  # the network takes single images only, returns no tensors, or has no gradients
        return set()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return {module for module, gradient in zip(seen, gradients, strict=True) if gradient is not None}


def tensors_in(output: Any) -> list[Tensor]:
    """A model's logits or, if it has none, every tensor that it returns."""
    if (logits := logits_in(output)) is not None:
        return [logits]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


@torch.no_grad()
def pixels_reach(model: nn.Module, path: str, layout: Layout, example: Tensor) -> bool:
    """Whether the pixels in a module's output reach the model's output; tested by replacing them with NaN.

    Patch tokens may not: after its last attention, a network may read only the class token.
    """

    def spoil(module: nn.Module, args: tuple, output: Any) -> Any:
        return through(lambda x: torch.full_like(x, torch.nan), layout, output)

    handle = find_module(model, path).register_forward_hook(spoil)
    try:
        with in_eval_mode(model):
            return any(bool(output.isnan().any()) for output in tensors_in(model(example)))
    except Exception:  # a network that raises an error on NaN has read it
        return True
    finally:
        handle.remove()
