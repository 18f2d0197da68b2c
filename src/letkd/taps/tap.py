"""Taps: read features inside a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from letkd.errors import LetkdError, TapError
from letkd.modules import in_eval_mode, snapshot
from letkd.taps.grafts import check_model, find_module, layout_of_graft
from letkd.taps.layouts import ChannelsLast, Layout, TokenFacts, Tokens, first_tensor, no_grid
from letkd.taps.outputs import logits_of

OPTION = re.compile(r"(input|output)|(map|tokens|channels-last)|prefix=(\d{1,4})|grid=([1-9]\d{0,4})x([1-9]\d{0,4})")


@dataclass(frozen=True)
class Tap:
    """A place in a model: the output or the input of the module at `path`.

    Args:
        path: as in `model.get_submodule(path)`.
        channels: of the map, if the model's role table defines it.
        stride: height of the image divided by the height of the map, if the role table defines it.
        io: which side of the module is read.
        layout: a map [b d h w] (or a vector), patch tokens [b n d], or a channels-last map [b h w d]. `Taps` converts all three to
            maps [b d h w].
        prefix: number of tokens before the patches (class, distillation, register tokens). Default: as defined by the model, or
            the smallest number that leaves a grid.
        grid: height and width of the patches' grid. Default: inferred from the image size.

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
        if not isinstance(self.path, str):
            raise TapError(f"a tap has a {type(self.path).__name__} as its path; write the path of a module as text")
        if self.layout not in ("map", "tokens", "channels-last"):
            raise TapError(f"tap {self.path!r} has the layout {self.layout!r}; write map, tokens or channels-last")
        if self.layout != "tokens" and (self.prefix is not None or self.grid is not None):
            raise TapError(f"tap {self.path!r} has a prefix or a grid, which only tokens have; add layout='tokens', or :tokens")
        if self.prefix is not None and self.prefix < 0:
            raise TapError(f"tap {self.path!r} has prefix={self.prefix}; write a number of tokens, 0 or more")

    @classmethod
    def of(cls, text: str) -> "Tap":
        """A tap as written in options and recipes: `module.path`, followed by any of `:input`, `:tokens`, `:channels-last`, `:prefix=1` and
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


def as_taps(model: nn.Module, named: Mapping[str, Tap | str] | None = None) -> dict[str, Tap]:
    """The role table of a model: its own `taps` attribute (zoo models have one), updated with `named`.

    A `taps` attribute with another meaning, which does not map roles to taps, is ignored.
    """
    _check_named(model, named)
    own = getattr(model, "taps", None)
    both = {**(own if _is_table(own) else {}), **(named or {})}
    table = {role: Tap.of(tap) if isinstance(tap, str) else tap for role, tap in both.items()}
    check_model(model, hooks=bool(table))
    for tap in table.values():
        find_module(model, tap.path)
    return table


def _check_named(model: nn.Module, named: object) -> None:
    if named is not None and not isinstance(named, Mapping):
        raise TapError(
            f"the taps of {type(model).__name__} were given as a {type(named).__name__}; pass a dictionary, such as "
            '{"penultimate": "layer4"}'
        )
    for role, tap in (named or {}).items():
        if not isinstance(tap, Tap | str):
            raise TapError(
                f"the tap {role!r} of {type(model).__name__} is a {type(tap).__name__}, but must be the path of a module; write it as in "
                "`model.named_modules()`, or pass letkd.Tap(path)"
            )


def _is_table(value: object) -> TypeGuard[Mapping[str, Tap | str]]:
    return isinstance(value, Mapping) and all(
        isinstance(role, str) and isinstance(tap, Tap | str) for role, tap in value.items()
    )


class Features(dict[str, Tensor]):
    """Features by role, as maps or vectors.

    `read` has those that were converted: the tensors as the model computes them, with their layouts.
    """

    def __init__(self):
        super().__init__()
        self.read: dict[str, tuple[Tensor, Layout]] = {}


class Taps:
    """Runs a model and returns its output together with the features at its taps.

    Hooks exist only while the model runs, so between calls the model is unchanged and can be copied, pickled and exported.
    A module that runs twice in one forward pass, or not at all, is an error, because its output would be ambiguous. If a later module
    overwrites features in place (`ReLU(inplace=True)` after a BN), it gets a copy of them, and so does a model that overwrites its input
    (`x -= mean`). The first call in each mode finds out, and runs the model again if features were overwritten.

    Tokens and channels-last maps are converted to maps [b d h w]; `layouts` contains their layouts by role, as of the last call.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap]):
        check_model(model, hooks=bool(taps))
        self.model = model
        self.taps = dict(taps)
        self._modules = {role: find_module(model, tap.path) for role, tap in self.taps.items()}
        self._overwritten: set[str] = set()
        self._overwrites_input = False
        self._seen: set[bool] = set()  # the modes, `model.training`, in which it is known what is overwritten
        self.layouts: dict[str, Layout] = {}
        self._facts = TokenFacts.of(model) if any(tap.layout == "tokens" for tap in self.taps.values()) else TokenFacts()
        self._shapes: dict[tuple[str, torch.Size], torch.Size] = {}
        self._image: tuple[int, int] | None = None  # image size for which layers on tokens were built
        self._among_tokens = any(_is_among_tokens(model, tap.path) for tap in self.taps.values())

    def __call__(self, x: Tensor) -> tuple[Any, Features]:
        first = self.model.training not in self._seen and not (
            torch.is_inference_mode_enabled() or torch.compiler.is_compiling()
        )
        restore = snapshot(self.model) if first else None
        given = x.clone() if first or self._overwrites_input else x
        version = _version(given)
        output, features, overwritten = self._run(given)
        if first:
            self._seen.add(self.model.training)
            self._overwrites_input |= _version(given) != version
        elif given is x and _version(x) != version:
            raise TapError(
                f"{type(self.model).__name__} overwrites its input, but not in every pass; write x = x - mean, not x -= mean"
            )
        if new := overwritten - self._overwritten:
            self._overwritten |= new
            if restore is not None:
                restore()
            output, features, _ = self._run(x.clone() if self._overwrites_input else x)
        if not torch.compiler.is_compiling():
            self._check_shapes(x, features)
        for role, tap in self.taps.items():
            if tap.layout != "map":
                as_read = features[role]
                features[role] = self._as_map(role, tap, as_read, x)
                features.read[role] = as_read, self.layouts[role]
        return output, features

    def _check_shapes(self, x: Tensor, features: Mapping[str, Tensor]) -> None:
        """Images of one size must give features of one shape, because methods, fits and layers are built for it."""
        if self._among_tokens:
            H, W = self._image = self._image or (x.shape[-2], x.shape[-1])
            if x.shape[-2] * W != x.shape[-1] * H:
                raise TapError(
                    f"a layer on the tokens of {type(self.model).__name__} was built for images of {H}x{W}, but a batch has images "
                    f"of {x.shape[-2]}x{x.shape[-1]}, whose grid has other proportions; use images of one shape"
                )
        for role, f in features.items():
            shape = f.shape[1:]
            if (before := self._shapes.setdefault((role, x.shape[1:]), shape)) != shape:
                raise TapError(
                    f"{self._where(role)} changes its shape between batches: for images {list(x.shape[1:])} it was {list(before)}, then "
                    f"{list(shape)}; name a tap with a constant shape, and turn off whatever drops tokens or pixels"
                )

    def _as_map(self, role: str, tap: Tap, f: Tensor, x: Tensor) -> Tensor:
        if f.ndim != (3 if tap.layout == "tokens" else 4):
            has = "[b n d]" if tap.layout == "tokens" else "[b h w d]"
            raise TapError(
                f"{self._where(role)} is {list(f.shape)}, but {tap.layout} have the shape {has}; correct the layout of the tap"
            )
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

    def _run(self, x: Tensor) -> tuple[Any, Features, set[str]]:
        """Output, features, and the roles whose features the model overwrote."""
        features = Features()
        read: dict[str, tuple[Tensor, int]] = {}
        handles = []
        try:
            for role, tap in self.taps.items():
                hook = _Reader(features, read, role, tap, type(self.model).__name__, copy=role in self._overwritten)
                module = self._modules[role]
                # Inputs are read before the module runs, because it may overwrite them.
                handles.append(
                    module.register_forward_hook(hook) if tap.io == "output" else module.register_forward_pre_hook(hook)
                )
            output = self.model(x)
        finally:
            for handle in handles:
                handle.remove()
        for role, tap in self.taps.items():
            if role not in features:
                raise TapError(
                    f"tap {role!r}: module {tap.path!r} of {type(self.model).__name__} did not run in its forward pass; "
                    "name a module that does (a ModuleList, for example, never runs itself)"
                )
        return output, features, {role for role, (f, version) in read.items() if _version(f) != version}


class _Reader:
    def __init__(
        self, features: dict[str, Tensor], read: dict[str, tuple[Tensor, int]], role: str, tap: Tap, model: str, *, copy: bool
    ):
        self.features, self.read, self.role, self.tap, self.model, self.copy = features, read, role, tap, model, copy

    def __call__(self, module: nn.Module, args: tuple, output: Any = None) -> Any:
        passed: Any = output if self.tap.io == "output" else (args[0] if args else None)
        value = passed if self.tap.layout == "map" else first_tensor(passed)
        where = f"tap {self.role!r}: the {self.tap.io} of module {self.tap.path!r} of {self.model}"
        if not isinstance(value, Tensor):
            raise TapError(f"{where} is a {type(value).__name__}, not a tensor; name a module inside it that returns one")
        if self.role in self.features:
            raise TapError(
                f"{where} was computed twice in one forward pass; name a module that runs once (`letkd taps` marks these)"
            )
        self.read[self.role] = value, _version(value)
        self.features[self.role] = value
        if not self.copy:
            return None
        given = value.clone()  # the model overwrites it; what was read stays a part of the network, with its gradient
        if passed is not value:
            given = (given, *passed[1:])
        return given if self.tap.io == "output" else (given, *args[1:])


def _version(f: Tensor) -> int:
    """How often a tensor was written to; not counted by torch in inference mode."""
    return 0 if f.is_inference() else f._version


def _is_among_tokens(model: nn.Module, path: str) -> bool:
    """Whether a module is a layer that was grafted onto tokens."""
    host, _, name = path.rpartition(".")
    return isinstance(layout_of_graft(model.get_submodule(host), name), Tokens)


def as_logits(output: Any, model: nn.Module) -> Tensor:
    """The logits [b C] in a model's output: the tensor itself, or its `logits` attribute or entry."""
    logits = logits_of(output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            got += f" with the keys {', '.join(map(str, output))}" if not isinstance(logits, Tensor) else " under 'logits'"
        raise TapError(
            f"{type(model).__name__} must return logits [b C], but it returned {got}; wrap it so that it returns logits"
        )
    return logits


def probe(model: nn.Module, taps: Mapping[str, Tap], example: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The result of `run_once` for these taps."""
    return run_once(Taps(model, taps), example)


@torch.no_grad()
def run_once(taps: Taps, example: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """One forward pass in eval mode that does not change the model (no gradients, no BN update, the same train/eval flags).

    If the model fails on the example, the error says what a model must accept.
    """
    try:
        with in_eval_mode(taps.model):
            return taps(example)
    except LetkdError:
        raise
    except (Exception, SystemExit) as error:
        raise TapError(_failed(taps.model, example, error)) from error


def _failed(model: nn.Module, example: Tensor, error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    said = f"{type(model).__name__} failed on a tensor {list(example.shape)} with {type(error).__name__}: {lines[0]}"
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {example.dtype}
    if kinds:
        kind = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"{said}; its parameters are {kind} and the images are {str(example.dtype).removeprefix('torch.')}; call model.float()"
    return (
        f"{said}; a model must accept a batch of images [b 3 H W] as its only argument; check the image size, or wrap the model"
    )
