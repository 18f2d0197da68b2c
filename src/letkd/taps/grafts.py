"""The modules of a network: find one, insert a layer after it (`graft`), or replace it (`replace_module`)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from letkd.errors import TapError, nearest
from letkd.taps.layouts import Layout, through


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`, or an error with the nearest names."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        hint = "; after a colon, write input, tokens, channels-last, prefix=N or grid=HxW" if ":" in path else ""
        raise TapError(f"{type(model).__name__} has no module {path!r}; nearest: {nearest(path, names)}{hint}") from None


def check_model(model: nn.Module, *, hooks: bool = True) -> None:
    """Raise an error if a model cannot be tapped or changed.

    Args:
        hooks: whether features inside the model are read or changed; a model that is only run may be wrapped.
    """
    name = type(model).__name__
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TapError(f"{name} has parameters without a shape ({lazy[0]}); run it once on an input first")
    if not hooks:
        return
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TapError(f"the model is wrapped in {name}; pass its `.module`, and wrap the Distiller instead")
    for path, module in model.named_modules():
        where = f"module {path!r} of {name}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            raise TapError(
                f"{where} is TorchScript, in which nothing can be read or added; pass the Python model that it was made from "
                "(a teacher of which only the logits are read may be TorchScript)"
            )
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise TapError(
                f"{where} is compiled, so taps would have no effect; pass the uncompiled model, and compile the Distiller or the exported "
                "student"
            )


@dataclass(frozen=True)
class Graft:
    """A layer that was inserted into a model; `remove` restores the model."""

    host: nn.Module
    name: str
    handle: Any = None
    path: str = ""

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        del self.host._modules[self.name]


class _Then:
    """Forward hook that passes a module's output to its grafted child, which it finds by name, so copies of the model work."""

    def __init__(self, name: str, layout: Layout | None = None):
        self.name, self.layout = name, layout

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        layer = module.get_submodule(self.name)
        return layer(output) if self.layout is None else through(layer, self.layout, output)


def layout_of_graft(host: nn.Module, name: str) -> Layout | None:
    """The layout that a layer was grafted with; None for a map."""
    hooks = (hook for hook in host._forward_hooks.values() if isinstance(hook, _Then) and hook.name == name)
    return next((hook.layout for hook in hooks), None)


def graft(model: nn.Module, layer: nn.Module, after: str, name: str = "kd_layer", *, layout: Layout | None = None) -> Graft:
    """Insert `layer` after the module at path `after`: the module's output becomes `layer(output)`.

    Args:
        layer: takes and returns maps [b d h w].
        layout: of the module's output, if it is not a map: it is converted to a map for the layer, and the layer's output is
            converted back; prefix tokens bypass the layer.

    The layer becomes the child `name` of that module, so the model's own state-dict keys do not change, checkpoints of the plain model
    load, and `deepcopy`, `pickle`, `torch.export` and `torch.compile` work. An `nn.Sequential` runs its children in turn, so there the
    child alone is enough; in other modules a hook calls it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
        >>> before = model(torch.ones(1, 2))
        >>> grafted = graft(model, nn.ReLU(), after="0")
        >>> bool((model(torch.ones(1, 2)) == before.relu()).all())
        True
        >>> grafted.remove()
        >>> bool((model(torch.ones(1, 2)) == before).all())
        True
    """
    check_model(model)
    host = find_module(model, after)
    while layout is not None and type(host).forward is nn.Sequential.forward and len(host._modules):
        child = list(host._modules)[-1]  # a Sequential would run the layer on features that are not a map
        after, host = f"{after}.{child}" if after else child, host.get_submodule(child)
    if hasattr(host, name):
        raise TapError(
            f"module {after!r} of {type(model).__name__} already has a child {name!r}, such as a layer that its weights contain; choose "
            "another name or another tap, or a method that inserts no layer (quest, ce)"
        )
    host.add_module(name, layer)
    path = f"{after}.{name}" if after else name
    if type(host).forward is nn.Sequential.forward:
        return Graft(host, name, path=path)
    return Graft(host, name, host.register_forward_hook(_Then(name, layout)), path)


@dataclass(frozen=True)
class Replacement:
    """A replaced module; `remove` restores the old one."""

    host: nn.Module
    name: str
    old: nn.Module

    def remove(self) -> None:
        self.host._modules[self.name] = self.old


def replace_module(model: nn.Module, path: str, module: nn.Module) -> Replacement:
    """Replace the module at `path`, under the same name, so that taps and state-dict keys do not change."""
    old = find_module(model, path)
    parent, _, name = path.rpartition(".")
    places = [other for other, found in model.named_modules(remove_duplicate=False) if found is old]
    # A parent with several names is one place: its child is replaced under all of them.
    hosts = {(id(model.get_submodule(at.rpartition(".")[0])), at.rpartition(".")[2]) for at in places}
    if not name or len(hosts) > 1:
        what = "is the model itself" if not name else f"has several names ({', '.join(places)})"
        raise TapError(f"module {path!r} of {type(model).__name__} {what}, so it cannot be replaced; name another module")
    host = find_module(model, parent)
    host._modules[name] = module
    return Replacement(host, name, old)
