"""Places in a model: reading features there (`Taps`), putting a layer there (`graft`) or another in its place (`replace_module`),
and what runs where (`trace`).

The only file that registers hooks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from letkd.errors import LetkdError, TapError, nearest


@dataclass(frozen=True)
class Tap:
    """A place in a model: the output (or the input) of the module at `path`.

    Args:
        path: as in `model.get_submodule(path)`.
        channels: d of the map there, where the model's own table knows it.
        stride: input height over map height, where the table knows it.
        io: which side of the module is read.
    """

    path: str
    channels: int | None = None
    stride: int | None = None
    io: Literal["output", "input"] = "output"

    @classmethod
    def of(cls, text: str) -> "Tap":
        """A place as options and recipes write it: `module.path`, or `module.path:input`."""
        path, colon, side = text.rpartition(":")
        return cls(path, io="input") if colon and side == "input" else cls(text)

    def __str__(self) -> str:
        return self.path if self.io == "output" else f"{self.path}:{self.io}"


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`, or a sentence with the nearest names there are."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise TapError(f"{type(model).__name__} has no module {path!r}; nearest: {nearest(path, names)}") from None


def as_taps(model: nn.Module, named: Mapping[str, Tap | str] | None = None) -> dict[str, Tap]:
    """The role table of a model: its own `taps` attribute (zoo models carry one), then what the caller names."""
    own = getattr(model, "taps", None)
    table: dict[str, Tap] = dict(own) if isinstance(own, Mapping) else {}
    for role, tap in (named or {}).items():
        table[role] = Tap.of(tap) if isinstance(tap, str) else tap
    check_model(model, hooks=bool(table))
    for tap in table.values():
        find_module(model, tap.path)
    return table


def check_model(model: nn.Module, *, hooks: bool = True) -> None:
    """Refuse what cannot be read or changed inside, with a word on what can.

    Args:
        hooks: whether something inside of the model is to be read or changed; a model that is only run may be wrapped.
    """
    name = type(model).__name__
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TapError(
            f"{name} has parameters without a shape as yet ({lazy[0]}); run it once on an input before it is used here"
        )
    if not hooks:
        return
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TapError(f"the model is wrapped in {name}; give its `.module`, and wrap the Distiller instead")
    for path, module in model.named_modules():
        where = f"module {path!r} of {name}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            raise TapError(
                f"{where} is TorchScript, inside of which nothing can be read or added; give the Python model that it was made of "
                "(a teacher that is asked for its logits alone may be TorchScript)"
            )
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise TapError(
                f"{where} is compiled, and taps set later would not be seen; give the model as it was before torch.compile, and "
                "compile the Distiller or the exported student"
            )


class Taps:
    """Runs a model and returns its output together with the features at named places.

    Hooks live only while the model runs, so between calls the model is as it was: it can be copied, pickled and exported.
    A module that runs twice in one forward, or not at all, is an error: which of its outputs would be meant? Where a later
    module overwrites what was read (`ReLU(inplace=True)` behind a BN), the tap keeps a copy of it from then on.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap]):
        check_model(model, hooks=bool(taps))
        self.model = model
        self.taps = dict(taps)
        self._modules = {role: find_module(model, tap.path) for role, tap in self.taps.items()}
        self._overwritten: set[str] = set()

    def __call__(self, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        output, seen, versions = self._run(x)
        overwritten = {role for role, f in seen.items() if _version(f) != versions[role]}
        if overwritten:
            self._overwritten |= overwritten
            output, seen, _ = self._run(x)
        return output, seen

    def _run(self, x: Tensor) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
        seen: dict[str, Tensor] = {}
        versions: dict[str, int] = {}
        handles = []
        try:
            for role, tap in self.taps.items():
                hook = _Reader(seen, versions, role, tap, type(self.model).__name__, copy=role in self._overwritten)
                module = self._modules[role]
                # An input is read before the module runs: it may overwrite it.
                handles.append(
                    module.register_forward_hook(hook) if tap.io == "output" else module.register_forward_pre_hook(hook)
                )
            output = self.model(x)
        finally:
            for handle in handles:
                handle.remove()
        for role, tap in self.taps.items():
            if role not in seen:
                raise TapError(
                    f"tap {role!r}: module {tap.path!r} of {type(self.model).__name__} did not run in its forward; "
                    "name a module that does (a ModuleList, for one, never runs itself)"
                )
        return output, seen, versions


class _Reader:
    def __init__(self, seen: dict[str, Tensor], versions: dict[str, int], role: str, tap: Tap, model: str, *, copy: bool):
        self.seen, self.versions, self.role, self.tap, self.model, self.copy = seen, versions, role, tap, model, copy

    def __call__(self, module: nn.Module, args: tuple, output: Any = None) -> None:
        value = output if self.tap.io == "output" else (args[0] if args else None)
        where = f"tap {self.role!r}: the {self.tap.io} of module {self.tap.path!r} of {self.model}"
        if not isinstance(value, Tensor):
            raise TapError(f"{where} is a {type(value).__name__}, not a tensor; name a module inside it that gives one")
        if self.role in self.seen:
            raise TapError(
                f"{where} was computed twice in one forward; name a module that runs once (`letkd taps` marks those)"
            )
        self.seen[self.role] = value = value.clone() if self.copy else value
        self.versions[self.role] = _version(value)


def _version(f: Tensor) -> int:
    """How often a tensor was written to; torch does not count it in inference mode."""
    return 0 if f.is_inference() else f._version


@dataclass(frozen=True)
class Graft:
    """A layer that was put into a model; `remove` takes it out again and leaves the model as it was."""

    host: nn.Module
    name: str
    handle: Any = None

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        del self.host._modules[self.name]


class _Then:
    """Forward hook that feeds a module's output to its grafted child: finds the child by name, so copies find their own."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return module.get_submodule(self.name)(output)


def graft(model: nn.Module, layer: nn.Module, after: str, name: str = "kd_layer") -> Graft:
    """Put `layer` behind the module at path `after`: from then on the module's output is `layer(output)`.

    The layer becomes the child `name` of that module, so the model's own state-dict keys stay as they are, plain
    checkpoints load, and `deepcopy`, `pickle`, `torch.export` and `torch.compile` work. A plain `nn.Sequential` runs
    its children in turn, so there the child alone is enough; elsewhere a hook calls it.

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
    if hasattr(host, name):
        raise TapError(f"module {after!r} of {type(model).__name__} has a child {name!r} already; graft under another name")
    host.add_module(name, layer)
    if type(host).forward is nn.Sequential.forward:
        return Graft(host, name)
    return Graft(host, name, host.register_forward_hook(_Then(name)))


@dataclass(frozen=True)
class Replacement:
    """A module that took another's place; `remove` puts the old one back."""

    host: nn.Module
    name: str
    old: nn.Module

    def remove(self) -> None:
        self.host._modules[self.name] = self.old


def replace_module(model: nn.Module, path: str, module: nn.Module) -> Replacement:
    """Put `module` in the place of the one at `path`, under the same name, so that taps and state-dict keys stay where they were."""
    old = find_module(model, path)
    parent, _, name = path.rpartition(".")
    places = [other for other, found in model.named_modules(remove_duplicate=False) if found is old]
    if not name or len(places) > 1:
        what = "is the model itself" if not name else f"goes by the names {', '.join(places)}"
        raise TapError(f"module {path!r} of {type(model).__name__} {what}, so it cannot be replaced; name a module of its own")
    host = find_module(model, parent)
    host._modules[name] = module
    return Replacement(host, name, old)


def as_logits(output: Any, model: nn.Module) -> Tensor:
    """The logits [b C] in what a model returns: the tensor itself, or the `logits` of an answer object or a dictionary."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            got += f" with the keys {', '.join(map(str, output))}" if not isinstance(logits, Tensor) else " under 'logits'"
        raise TapError(f"{type(model).__name__} must return logits [b C]; it returned {got}; wrap it so that it does")
    return logits


def probe(model: nn.Module, taps: Mapping[str, Tap], example: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """What `run_once` gives for these taps."""
    return run_once(Taps(model, taps), example)


@torch.no_grad()
def run_once(taps: Taps, example: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """One forward in eval mode that leaves no trace in the model (no gradient, no BN update, the same train/eval flags).

    A model that fails on the example gets a sentence, too: this is where a model that takes something else is met first.
    """
    try:
        with _in_eval_mode(taps.model):
            return taps(example)
    except LetkdError:
        raise
    except (Exception, SystemExit) as error:
        raise TapError(_failed(taps.model, example, error)) from error


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _failed(model: nn.Module, example: Tensor, error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    said = (
        f"{type(model).__name__} was given one tensor {list(example.shape)} and failed with {type(error).__name__}: {lines[0]}"
    )
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {example.dtype}
    if kinds:
        kind = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return (
            f"{said}; its parameters are {kind} and the images {str(example.dtype).removeprefix('torch.')}: call model.float()"
        )
    return f"{said}; a model must take a batch of images [b 3 H W] and nothing else: wrap one that takes more, check the size"


@dataclass(frozen=True)
class Ran:
    """What one module did in a forward.

    Args:
        path: of the module, `""` for the model itself.
        module: the module.
        shapes: of what each of its calls gave, in turn; the name of a type where that was no tensor. Empty where it did not run.
        names: other paths that lead to the same module.
        order: place in the order in which modules were done for the first time; -1 where it did not run.
        live: whether what it gives depends on the image and reaches the logits; True if that cannot be found out.
    """

    path: str
    module: nn.Module
    shapes: tuple[tuple[int, ...] | str, ...]
    names: tuple[str, ...]
    order: int
    live: bool = True


def trace(model: nn.Module, example: Tensor) -> list[Ran]:
    """What every module gives in one forward (see `run_once`), in the order of `named_modules`."""
    check_model(model)
    shapes: dict[nn.Module, list[tuple[int, ...] | str]] = {}
    handles = []

    def note(module: nn.Module, args: tuple, output: Any) -> None:
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
        Ran(first, module, tuple(shapes.get(module, ())), tuple(others), order.get(module, -1), not live or module in live)
        for module, (first, *others) in names.items()
    ]


def _live(model: nn.Module, example: Tensor) -> set[nn.Module]:
    """Modules that give a tensor for each image which depends on the image and reaches the logits; none if it cannot be found out.

    Two images go forward and one gradient goes back. Only the images carry gradients, so that what comes from parameters alone
    (a table of relative positions) has none, and a weight that starts at zero hides nothing.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, *example.shape[1:], generator=generator).to(example).requires_grad_()
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.shape[:1] == (2,):
            seen[module] = output

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.enable_grad(), _in_eval_mode(model):
            for parameter in trained:
                parameter.requires_grad_(False)
            logits = as_logits(model(x), model)
            gradients = torch.autograd.grad(logits.sum(), list(seen.values()), allow_unused=True)
    except Exception:  # a network that takes one image at a time, that returns no logits, that has no gradient
        return set()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return {module for module, gradient in zip(seen, gradients, strict=True) if gradient is not None}
