"""Places in a model: reading features there (`Taps`), putting a layer there (`graft`) or another in its place (`replace_module`)."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from letkd.errors import LetkdError, TapError, nearest
from letkd.taps.layouts import ChannelsLast, Layout, TokenFacts, Tokens, first_tensor, no_grid, through
from letkd.taps.outputs import logits_of

OPTION = re.compile(r"(input|output)|(map|tokens|channels-last)|prefix=(\d{1,4})|grid=([1-9]\d{0,4})x([1-9]\d{0,4})")


@dataclass(frozen=True)
class Tap:
    """A place in a model: the output (or the input) of the module at `path`.

    Args:
        path: as in `model.get_submodule(path)`.
        channels: d of the map there, where the model's own table knows it.
        stride: input height over map height, where the table knows it.
        io: which side of the module is read.
        layout: what is there: a map [b d h w] (or a vector), patch tokens [b n d], or a map with channels last [b h w d]. `Taps` hands
            out maps [b d h w] of all three.
        prefix: tokens before those of the patches (class, distillation, register tokens). Default: as the model says, or the fewest
            that leave a grid.
        grid: height and width of the patches' grid. Default: found from the size of the image.

    Examples:
        >>> Tap.of("blocks.10:tokens:prefix=2") == Tap("blocks.10", layout="tokens", prefix=2)
        True
    """

    path: str
    channels: int | None = None
    stride: int | None = None
    io: Literal["output", "input"] = "output"
    layout: Literal["map", "tokens", "channels-last"] = "map"
    prefix: int | None = None
    grid: tuple[int, int] | None = None

    def __post_init__(self):
        if self.layout not in ("map", "tokens", "channels-last"):
            raise TapError(f"tap {self.path!r} has the layout {self.layout!r}; there are map, tokens and channels-last")
        if self.layout != "tokens" and (self.prefix is not None or self.grid is not None):
            raise TapError(
                f"tap {self.path!r} has a prefix or a grid, and these belong to tokens: add layout='tokens', or :tokens"
            )
        if self.prefix is not None and self.prefix < 0:
            raise TapError(f"tap {self.path!r} has prefix={self.prefix}; it is a number of tokens, 0 or more")

    @classmethod
    def of(cls, text: str) -> "Tap":
        """A place as options and recipes write it: `module.path`, then any of `:input`, `:tokens`, `:channels-last`, `:prefix=1` and
        `:grid=14x14`.
        """
        given: dict[str, Any] = {}
        while (option := OPTION.fullmatch(text.rpartition(":")[2])) and ":" in text:
            io, layout, prefix, h, w = option.groups()
            values = {"io": io, "layout": layout, "prefix": prefix and int(prefix), "grid": h and (int(h), int(w))}
            given = {name: value for name, value in values.items() if value is not None} | given
            text = text.rpartition(":")[0]
        return cls(text, **given)

    def __str__(self) -> str:
        options = [self.io] * (self.io != "output") + [self.layout] * (self.layout != "map")
        options += [] if self.prefix is None else [f"prefix={self.prefix}"]
        options += [] if self.grid is None else [f"grid={self.grid[0]}x{self.grid[1]}"]
        return ":".join([self.path, *options])


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`, or a sentence with the nearest names there are."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        hint = "; after a colon stand input, tokens, channels-last, prefix=N or grid=HxW" if ":" in path else ""
        raise TapError(f"{type(model).__name__} has no module {path!r}; nearest: {nearest(path, names)}{hint}") from None


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

    Tokens and maps with channels last come out as maps [b d h w]; `layouts` has how, by role, from the last call on.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap]):
        check_model(model, hooks=bool(taps))
        self.model = model
        self.taps = dict(taps)
        self._modules = {role: find_module(model, tap.path) for role, tap in self.taps.items()}
        self._overwritten: set[str] = set()
        self.layouts: dict[str, Layout] = {}
        self._facts = TokenFacts.of(model) if any(tap.layout == "tokens" for tap in self.taps.values()) else TokenFacts()
        self._shapes: dict[tuple[str, torch.Size], torch.Size] = {}
        self._image: tuple[int, int] | None = None  # that the grids of layers among tokens belong to
        self._among_tokens = any(_is_among_tokens(model, tap.path) for tap in self.taps.values())

    def __call__(self, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        output, seen, versions = self._run(x)
        overwritten = {role for role, f in seen.items() if _version(f) != versions[role]}
        if overwritten:
            self._overwritten |= overwritten
            output, seen, _ = self._run(x)
        if not torch.compiler.is_compiling():
            self._check_shapes(x, seen)
        for role, tap in self.taps.items():
            if tap.layout != "map":
                seen[role] = self._as_map(role, tap, seen[role], x)
        return output, seen

    def _check_shapes(self, x: Tensor, seen: Mapping[str, Tensor]) -> None:
        """Images of one size must give features of one shape; methods, fits and layers are built for it."""
        if self._among_tokens:
            H, W = self._image = self._image or (x.shape[-2], x.shape[-1])
            if x.shape[-2] * W != x.shape[-1] * H:
                raise TapError(
                    f"a layer among the tokens of {type(self.model).__name__} was put there for images of {H}x{W}, and a batch has images "
                    f"of {x.shape[-2]}x{x.shape[-1]}, whose grid has other proportions; use images of one shape"
                )
        for role, f in seen.items():
            shape = f.shape[1:]
            if (before := self._shapes.setdefault((role, x.shape[1:]), shape)) != shape:
                raise TapError(
                    f"{self._where(role)} changes its shape between batches: for images {list(x.shape[1:])} it gave {list(before)} and now "
                    f"gives {list(shape)}; name a place whose shape stays, and switch off what drops tokens or pixels"
                )

    def _as_map(self, role: str, tap: Tap, f: Tensor, x: Tensor) -> Tensor:
        if f.ndim != (3 if tap.layout == "tokens" else 4):
            has = "[b n d]" if tap.layout == "tokens" else "[b h w d]"
            raise TapError(f"{self._where(role)} is {list(f.shape)}, and {tap.layout} are {has}; name its layout as it is")
        if tap.layout == "channels-last":
            self.layouts[role] = ChannelsLast()
        elif (found := self._facts.place(f.shape[1], (x.shape[-2], x.shape[-1]), tap.prefix, tap.grid)) is not None:
            self.layouts[role] = found
        else:
            raise TapError(f"{self._where(role)} {no_grid(tap.path, f.shape[1], x, tap.prefix, tap.grid)}")
        return self.layouts[role].to_map(f)

    def _where(self, role: str) -> str:
        tap = self.taps[role]
        return f"tap {role!r}: the {tap.io} of module {tap.path!r} of {type(self.model).__name__}"

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
        value = value if self.tap.layout == "map" else first_tensor(value)
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
    path: str = ""

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        del self.host._modules[self.name]


class _Then:
    """Forward hook that feeds a module's output to its grafted child: finds the child by name, so copies find their own."""

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
    """Put `layer` behind the module at path `after`: from then on the module's output is `layer(output)`.

    Args:
        layer: takes and gives maps [b d h w].
        layout: of the module's output, if that is no map: the layer gets it as one, and what it gives is put back in its place; prefix
            tokens pass by.

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
    while layout is not None and type(host).forward is nn.Sequential.forward and len(host._modules):
        child = list(host._modules)[-1]  # a Sequential would run the layer on what is no map
        after, host = f"{after}.{child}" if after else child, host.get_submodule(child)
    if hasattr(host, name):
        raise TapError(f"module {after!r} of {type(model).__name__} has a child {name!r} already; graft under another name")
    host.add_module(name, layer)
    path = f"{after}.{name}" if after else name
    if type(host).forward is nn.Sequential.forward:
        return Graft(host, name, path=path)
    return Graft(host, name, host.register_forward_hook(_Then(name, layout)), path)


def _is_among_tokens(model: nn.Module, path: str) -> bool:
    """Whether a module is a layer that was grafted among tokens."""
    host, _, name = path.rpartition(".")
    return isinstance(layout_of_graft(model.get_submodule(host), name), Tokens)


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
    logits = logits_of(output)
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
        with in_eval_mode(taps.model):
            return taps(example)
    except LetkdError:
        raise
    except (Exception, SystemExit) as error:
        raise TapError(_failed(taps.model, example, error)) from error


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """In its block all modules are in eval mode; after it each is in the mode that it was in."""
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
