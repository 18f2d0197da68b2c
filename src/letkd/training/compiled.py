"""torch.compile for a student that is read from: the parts inside of which nobody reads, and only while a step runs."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from letkd.errors import RecipeError


class CompiledParts:
    """Within `with`, those parts of a model run compiled that can be without being noticed; outside it is the plain model.

        with CompiledParts(student, read=paths):
            step = distiller(batch)

    Hooks inside of a compiled module may be passed over, so a part that holds a module that is read from, or one with hooks of its
    own (a grafted layer), is left as it is and its children are looked at instead. Copies, checkpoints, exports and evaluations are
    made outside of `with` and know nothing of it.

    Args:
        model: as it is trained, with everything grafted.
        read: paths of the modules that are read from.
        backend: of torch.compile.
    """

    def __init__(self, model: nn.Module, *, read: Collection[str] = (), backend: str = "inductor"):
        seen = {model.get_submodule(path) for path in read}
        self.parts = list(dict.fromkeys(_unread(model, seen)))
        self._calls = [torch.compile(part._call_impl, backend=backend) for part in self.parts]

    def __enter__(self) -> None:
        for part, call in zip(self.parts, self._calls, strict=True):
            part._compiled_call_impl = call

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part._compiled_call_impl = None


def check_device(device: torch.device) -> None:
    """Raises for a CPU. What inductor (torch 2.13) makes for one can write past its memory: small blocks end with a corrupted heap."""
    if device.type == "cpu":
        raise RecipeError(
            "train.compile is for GPUs and this run is on a CPU, where compiled steps are slower and may corrupt memory; leave it off"
        )


def _unread(module: nn.Module, read: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules that hold several others and nothing that is read from or has hooks."""
    held = list(module.modules())
    runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if len(held) == 1:
        return
    if runs and not any(part in read or part._forward_hooks or part._forward_pre_hooks for part in held):
        yield module
        return
    for child in module.children():
        yield from _unread(child, read)
