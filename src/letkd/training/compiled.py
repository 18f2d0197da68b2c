"""torch.compile for a student with taps: compiles the modules that contain no tap, and only during a step."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from letkd.errors import RecipeError


class CompiledParts:
    """Inside `with`, the modules of a model that contain no tap and no hook run compiled; outside, the model is unchanged.

        with CompiledParts(student, read=paths):
            step = distiller(batch)

    Hooks inside a compiled module may be skipped. So a module that contains a tap or a hook (a grafted layer) is not compiled, and
    its children are checked instead. Copies, checkpoints, exports and evaluations happen outside `with` and are not affected.

    Args:
        model: the model in training, including grafted layers.
        read: paths of the tapped modules.
        backend: of torch.compile.
    """

    def __init__(self, model: nn.Module, *, read: Collection[str] = (), backend: str = "inductor"):
        tapped = {model.get_submodule(path) for path in read}
        self.parts = list(dict.fromkeys(_without_taps(model, tapped)))
        self._calls = [torch.compile(part._call_impl, backend=backend) for part in self.parts]

    def __enter__(self) -> None:
        for part, call in zip(self.parts, self._calls, strict=True):
            part._compiled_call_impl = call

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part._compiled_call_impl = None


def check_device(device: torch.device) -> None:
    """Raise an error for a CPU: code that inductor (torch 2.13) generates for CPUs can write out of bounds and corrupt the heap."""
    if device.type == "cpu":
        raise RecipeError(
            "train.compile is for GPUs and this run is on a CPU, where compiled steps are slower and may corrupt memory; turn it off"
        )


def _without_taps(module: nn.Module, tapped: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules with submodules that contain no tapped module and no hooks."""
    parts = list(module.modules())
    is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if len(parts) == 1:
        return
    if is_called and not any(part in tapped or part._forward_hooks or part._forward_pre_hooks for part in parts):
        yield module
        return
    for child in module.children():
        yield from _without_taps(child, tapped)
