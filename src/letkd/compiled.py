"""torch.compile for a student that is read from: the parts inside of which nobody reads, and only while a step runs."""

import os
import shutil
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
        compiler = os.environ.get("CXX", "g++")
        if backend == "inductor" and shutil.which(compiler) is None:
            raise RecipeError(
                f"compiling needs a C++ compiler and {compiler!r} is not there; install one (Debian: apt-get install g++), name it in "
                "CXX, or leave train.compile off"
            )
        seen = {model.get_submodule(path) for path in read}
        self.parts = list(dict.fromkeys(_unread(model, seen)))
        self._calls = [torch.compile(part._call_impl, backend=backend) for part in self.parts]

    def __enter__(self) -> None:
        for part, call in zip(self.parts, self._calls, strict=True):
            part._compiled_call_impl = call

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part._compiled_call_impl = None


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
