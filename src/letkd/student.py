"""A trained student as one file: the network's name, what methods changed in it and the weights; no teacher is needed to open it."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.deploy.fold import FoldedKDLayer
from letkd.errors import CheckpointError, TapError, UnsupportedPair
from letkd.layer import KDLayer
from letkd.methods.simkd import FrozenLinear, Projector
from letkd.models import create_model, list_models, load_weights, save_weights
from letkd.taps import find_module, graft, replace_module

FORMAT = "letkd-student-2"
HUB_WEIGHTS = "model.safetensors"  # in a folder in the layout of the Hugging Face Hub

# What a method may put into a student: behind a module (or folded there), or a FrozenLinear in the place of the classifier. A file
# names them by class, and nothing else is ever built because a file says so. Each tells its constructor's arguments by `settings()`.
LAYERS: dict[str, Callable[..., nn.Module]] = {cls.__name__: cls for cls in (KDLayer, FoldedKDLayer, Projector, FrozenLinear)}

LARGEST = 1_000_000

Shapes = dict[str, tuple[int, ...]]


def save_student(student: nn.Module, path: str | Path, *, model: str, num_classes: int, **facts: Any) -> None:
    """Write a student that `load_student` can open.

    Args:
        model: the name that `create_model` knows the bare network by.
        facts: whatever else should travel in the header: normalisation, class names.
    """
    header = {**facts, "format": FORMAT, "model": model, "num_classes": num_classes, "changes": _changes(student)}
    save_weights(student, path, {"letkd": json.dumps(header)})


def load_student(path: str | Path, *, model: str | None = None) -> nn.Module:
    """Open what `save_student` wrote: build the network, change it as the methods did, load the weights; in eval mode.

    Args:
        path: the file, or a folder with it: a finished run, or what `letkd export --to hub-folder` wrote.
        model: the network by the name that `create_model` knows it by, where it is none of the zoo: the file says its name, too,
            but code is not run because a file says so.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "student.safetensors"
        >>> save_student(create_model("resnet8_tiny", num_classes=3), path, model="resnet8_tiny", num_classes=3)
        >>> load_student(path)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 3])
    """
    path = _file_in(Path(path))
    header = read_header(path)
    name, num_classes = model or header["model"], header["num_classes"]
    if model is None and name not in list_models():
        raise CheckpointError(
            f"{path} holds the network {name!r}, which is none of the zoo, and code is not run because a file names it; where you "
            f"trust it, say so with load_student(path, model={name!r}) or --student {name!r}"
        )
    shapes = _shapes(path)
    if name in list_models():
        with torch.device("meta"):  # no memory is taken before the sizes in the header are known to be those of the tensors
            _must_fit(_change(create_model(name, num_classes=num_classes), header, shapes, path), shapes, path)
    student = _change(create_model(name, num_classes=num_classes), header, shapes, path)
    load_weights(student, path)
    return student.eval()


def _file_in(path: Path) -> Path:
    """The student file in a folder; a file as it is."""
    if not path.is_dir():
        return path
    names = ("student.safetensors", HUB_WEIGHTS)
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{path} holds no student: there is no {' and no '.join(names)} in it")
    return found


def read_header(path: str | Path) -> dict[str, Any]:
    """What a student file says of itself: `model`, `num_classes` and `changes` are as they should be, the rest as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("letkd", "null"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no student file: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is no student file of letkd; plain weights are evaluated by `letkd eval FILE --student MODEL`"
        )
    expected = {"model": str, "num_classes": int, "changes": list}
    wrong = [key for key, kind in expected.items() if not _is(header.get(key), kind)]
    wrong = wrong or [f"changes[{i}]{why}" for i, change in enumerate(header["changes"]) if (why := _wrong_in(change))]
    if wrong:
        raise CheckpointError(
            f"{path} is damaged, or of a newer letkd: its header is wrong at {', '.join(wrong[:4])}; get it again, or upgrade"
        )
    return header


def _changes(student: nn.Module) -> list[dict[str, Any]]:
    """What methods changed, hosts before what stands inside them, so that it can be done again in this order."""
    found = []
    for at, module in student.named_modules():
        if type(module) in LAYERS.values():
            layer: Any = module
            found.append({"layer": type(layer).__name__, "at": at, "settings": layer.settings()})
    return found


def _change(student: nn.Module, header: dict[str, Any], shapes: Shapes, path: str | Path) -> nn.Module:
    """Do to a bare network what the header says."""
    own = dict(student.named_modules())
    for change in header["changes"]:
        cls, at = LAYERS[change["layer"]], change["at"]
        if type(own.get(at)) is cls:  # the network came with it
            continue
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in change["settings"].items()}
        host, _, name = at.rpartition(".")
        try:
            with torch.device("meta"):
                _must_fit(cls(**settings), shapes, path, f"{at}.")
            if cls is not FrozenLinear:
                graft(student, cls(**settings), after=host, name=name)
            elif type(find_module(student, at)) is nn.Linear:
                replace_module(student, at, cls(**settings))
            else:
                raise TapError(f"{at!r} is no nn.Linear, and only that is replaced")
        except (TapError, UnsupportedPair) as error:
            raise CheckpointError(f"{path} does not fit its network and layers: {error}") from None
    return student


def _must_fit(module: nn.Module, shapes: Shapes, path: str | Path, prefix: str = "") -> None:
    for name, tensor in module.state_dict(prefix=prefix).items():
        if shapes.get(name) != tuple(tensor.shape):
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(
                f"{path} does not fit its network and layers: {name!r} {has} and should be {list(tensor.shape)}; get it again"
            )


def _shapes(path: str | Path) -> Shapes:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict


def _wrong_in(change: Any) -> str:
    """Where a change is not a known layer, with settings that its constructor takes, each of its type and in range; "" if it is."""
    if not isinstance(change, dict) or change.keys() != {"layer", "at", "settings"}:
        return " (its keys)"
    layer, at, settings = change["layer"], change["at"], change["settings"]
    if not _is(layer, str) or layer not in LAYERS:
        return f".layer (the layers are {', '.join(LAYERS)})"
    if not _is(at, str) or not all(at.split(".")):
        return ".at"
    takes = inspect.signature(LAYERS[layer]).parameters
    needs = {key for key, parameter in takes.items() if parameter.default is parameter.empty}
    if not isinstance(settings, dict) or not needs <= settings.keys() <= takes.keys():
        return ".settings (their names)"
    return "".join(f".settings.{key}" for key, value in settings.items() if not _is(value, takes[key].annotation))


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from a file is of a kind: whole numbers are from 1 to a million, no number is larger, no text is empty."""
    if kind is int:
        return type(value) is int and 1 <= value <= LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) <= LARGEST
    if kind is str:
        return type(value) is str and 0 < len(value) <= 1000
    if kind in (bool, list):
        return type(value) is kind
    if kind == tuple[int, int] | None:
        return value is None or (type(value) is list and len(value) == 2 and all(_is(part, int) for part in value))
    raise TypeError(f"a student file cannot hold a {kind}")
