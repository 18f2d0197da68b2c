"""What runs where in a model: what every module gives in one forward, and whether it matters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from letkd.taps.layouts import Layout, first_tensor, through
from letkd.taps.outputs import logits_in
from letkd.taps.tap import Taps, check_model, find_module, in_eval_mode, run_once


@dataclass(frozen=True)
class ModuleRun:
    """What one module did in a forward.

    Args:
        path: of the module, `""` for the model itself.
        module: the module.
        shapes: of what each of its calls gave, in turn; the name of a type where that was no tensor. Empty where it did not run.
            Of the model itself its logits, if it returns any.
        first: shape of the first tensor, if it ran once and gave a tuple.
        names: other paths that lead to the same module.
        order: place in the order in which modules were done for the first time; -1 where it did not run.
        live: whether what it gives depends on the image and reaches the model's output; True if that cannot be found out.
    """

    path: str
    module: nn.Module
    shapes: tuple[tuple[int, ...] | str, ...]
    names: tuple[str, ...]
    order: int
    live: bool = True
    first: tuple[int, ...] | None = None


def trace(model: nn.Module, example: Tensor) -> list[ModuleRun]:
    """What every module gives in one forward (see `run_once`), in the order of `named_modules`."""
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
    """Modules that give a tensor for each image which depends on the image and reaches the model's output; none if unknown.

    Two images go forward and one gradient goes back. Only the images carry gradients, so that what comes from parameters alone
    (a table of relative positions) has none, and a weight that starts at zero hides nothing.
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
    except Exception:  # a network that takes one image at a time, that returns no tensors, that has no gradient
        return set()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return {module for module, gradient in zip(seen, gradients, strict=True) if gradient is not None}


def tensors_in(output: Any) -> list[Tensor]:
    """What a model answers: its logits, or if it has none every tensor that it returns."""
    if (logits := logits_in(output)) is not None:
        return [logits]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


@torch.no_grad()
def pixels_reach(model: nn.Module, path: str, layout: Layout, example: Tensor) -> bool:
    """Whether the pixels in the output of a module reach the model's output: NaN in their place would.

    Tokens of patches need not: behind its last attention a network may read the class token alone.
    """

    def spoil(module: nn.Module, args: tuple, output: Any) -> Any:
        return through(lambda x: torch.full_like(x, torch.nan), layout, output)

    handle = find_module(model, path).register_forward_hook(spoil)
    try:
        with in_eval_mode(model):
            return any(bool(output.isnan().any()) for output in tensors_in(model(example)))
    except Exception:  # a network that refuses NaN read it
        return True
    finally:
        handle.remove()
