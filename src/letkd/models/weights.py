"""Weights on disk: writes safetensors; reads safetensors and, without running code, `.pth` files; loads all tensors or none."""

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from letkd.errors import CheckpointError
from letkd.files import write_whole
from letkd.models.pickled import check_pickle
from letkd.progress import say
from letkd.taps import check_model, replace_module
from letkd.tensors import as_safetensors, checksum, is_counter

SUM = "letkd_sha256"  # header key of files written by letkd: checksum of the tensors and the rest of the header
WRAPPERS = ("model", "state_dict", "net")


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file, on the CPU, by name.

    Args:
        path: a `.safetensors` file; any other file is read with `torch.load(weights_only=True)`, so that no code in it
            runs. The file holds the state dict itself, or has it under `model`, `state_dict` or `net`. The prefix `module.` of
            (Distributed)DataParallel is removed from names.
    """
    return _without_prefix(_read(Path(path)))


def load_weights(model: nn.Module, path: str | Path, *, num_classes: int | None = None) -> None:
    """Copy a weights file into a model: every tensor, or none if a tensor is missing, unexpected or of another shape.

    Files of old PyTorch versions have no `num_batches_tracked`; the model then keeps its own.

    Args:
        model: receives the values; its dtypes and devices stay.
        path: as for `read_state_dict`.
        num_classes: the model's number of classes, if the file may have another: the model then keeps its own classifier, and a
            message names it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
        >>> one, two = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> save_weights(one, path)
        >>> load_weights(two, path)
        >>> torch.equal(one.weight, two.weight)
        True
    """
    check_model(model, hooks=False)
    own = _tensors(model)
    state = _read(Path(path))
    if not own.keys() & state.keys():  # a user's model may have a child named `module`
        state = _without_prefix(state)
    counters = {name for name in own.keys() ^ state.keys() if is_counter(name)}
    missing = [name for name in own if name not in state and name not in counters]
    unexpected = [name for name in state if name not in own and name not in counters]
    shared = [name for name in own if name in state]
    if num_classes is not None and (heads := _other_heads(own, state, num_classes)):
        say(f"{path}: {', '.join(sorted(heads))} has other classes and is trained from scratch")
        shared = [name for name in shared if name.rpartition(".")[0] not in heads]
    shapes = [
        f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
        for name in shared
        if state[name].shape != own[name].shape
    ]
    kinds = [
        f"{name} is {state[name].dtype} in the file and {own[name].dtype} in the model"
        for name in shared
        if _kind(state[name]) != _kind(own[name]) and not is_counter(name)
    ]
    found = [
        _count_and_names(missing, "missing key"),
        _count_and_names(unexpected, "unexpected key"),
        _count_and_names(shapes, "wrong shape"),
        _count_and_names(kinds, "wrong type"),
    ]
    if any(found):
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: {', '.join(part for part in found if part)}; "
            "use weights of the same architecture and number of classes"
        )
    if broken := [name for name in shared if state[name].is_floating_point() and bool(state[name].float().isnan().any())]:
        raise CheckpointError(
            f"{path} holds NaN in {_count_and_names(broken, 'tensor')}: the run that wrote it diverged, or the file is damaged; "
            "use other weights"
        )
    # Into the model's own dict, which has the version numbers of its layers: without them BN treats it as an old one.
    own.update((name, state[name]) for name in shared)
    model.load_state_dict(own)


def leave_out_head(model: nn.Module, path: str | Path, num_classes: int) -> list[str]:
    """If a weights file lacks only the model's classifier, replace the classifier by an Identity; returns the replaced modules' paths.

    The model then returns the classifier's input, and its `num_classes` is 0.
    """
    state = _read(Path(path))
    own = _tensors(model)
    if not own.keys() & state.keys():
        state = _without_prefix(state)
    missing = {name.rpartition(".")[0] for name in own if name not in state and not is_counter(name)}
    heads = {
        path
        for path in missing
        if isinstance(layer := model.get_submodule(path), nn.Linear) and layer.out_features == num_classes
    }
    if not missing or missing != heads or any(name.rpartition(".")[0] in heads for name in state):
        return []
    for head in sorted(heads):
        replace_module(model, head, nn.Identity())
    model.num_classes = 0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue] - as timm marks a backbone
    return sorted(heads)


def _other_heads(own: Mapping[str, Tensor], state: Mapping[str, Tensor], num_classes: int) -> set[str]:
    """Modules whose weights differ from the file's only in the number of classes."""
    return {
        name.rpartition(".")[0]
        for name, tensor in own.items()
        if name in state
        and state[name].ndim > 0
        and tensor.shape[:1] == (num_classes,)
        and state[name].shape != tensor.shape
        and state[name].shape[1:] == tensor.shape[1:]
    }


def save_weights(model: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model's state dict as safetensors, atomically: at any time `path` is either the old file or the new one.

    Args:
        model: its parameters and buffers; tensors that share memory are written once per name.
        path: ends in `.safetensors`; missing folders are created.
        metadata: text to store in the file's header.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
        >>> save_weights(nn.Linear(4, 2), path)
        >>> {name: list(tensor.shape) for name, tensor in read_state_dict(path).items()}
        {'bias': [2], 'weight': [2, 4]}
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"weights are written as safetensors, and {path} does not end in .safetensors; rename it")
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in _tensors(model).items()
    }
    # Other libraries refuse files whose header does not name torch as their format.
    header = {"format": "pt", **(metadata or {})}
    write_whole(path, as_safetensors(tensors, {**header, SUM: _sum(tensors, header)}))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}; check the path")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        check_pickle(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on odd files torch warns, and then fails
            content = torch.load(path, weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is None:
            raise CheckpointError(
                f"{path} is damaged or not a weights file; get it again, or save a plain state dict"
            ) from error
        raise CheckpointError(
            f"{path} asks to load the Python object {asked[1]}, which could run code, so it was not read; "
            "if you trust it, load it yourself and save its plain state dict"
        ) from error
    except Exception as error:  # damaged files raise many types of error: EOFError, KeyError, RuntimeError, ...
        raise CheckpointError(
            f"{path} is damaged or not a weights file ({type(error).__name__}); get it again, or save a plain state dict"
        ) from error
    return _unwrapped(content, path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
    written = header.pop(SUM, None)  # files of other programs have none
    if written is not None and written != _sum(tensors, header):
        raise CheckpointError(f"{path} is damaged (its checksum differs); get it again, or write it again")
    return tensors


def _sum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    return checksum(tensors, json.dumps(header, sort_keys=True))


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
        if inner and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in inner.items()):
            if odd := [name for name, value in inner.items() if not _is_plain(value)]:
                raise CheckpointError(
                    f"{path} holds {_count_and_names(odd, 'tensor')} without plain values (meta, sparse or quantised); "
                    "save dense CPU tensors"
                )
            return dict(inner)
        holds = f"a dict with {_count_and_names([str(key) for key in content], 'key') or 'no keys'}"
    else:
        holds = f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} holds {holds}, not a state dict; save a state dict itself or under one of the keys {', '.join(WRAPPERS)}"
    )


def _without_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if all(name.startswith("module.") for name in state):
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{type(model).__name__} keeps a {type(value).__name__} under {name!r} in its state dict, "
                "where only tensors can be stored; move it out of the state dict"
            )
    return state


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _count_and_names(items: list[str], what: str, n: int = 4) -> str:
    if not items:
        return ""
    rest = ", ..." if len(items) > n else ""
    return f"{len(items)} {what}{'s' if len(items) > 1 else ''} ({', '.join(items[:n])}{rest})"
