"""Checkpoints, from which a run resumes: one safetensors file with a checksum, and the previous one."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn, optim

from letkd.distiller.finite import first_non_finite
from letkd.distributed.processes import objects_of_all, rank, world
from letkd.errors import CheckpointError, NonFiniteError
from letkd.files import write_whole
from letkd.progress import say
from letkd.runs.records import Position, reason
from letkd.tensors import as_safetensors, checksum

NAME, PREVIOUS = "checkpoint.safetensors", "previous.safetensors"


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: optim.Optimizer,
    state: dict[str, Any],
    average: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, optimiser state, the random streams of every process and `state` (JSON); refuses values that are not finite.

    All processes must call it; the first writes.

    Args:
        average: averaged weights by name, if the run has them.
    """
    streams = objects_of_all(random_streams())
    if rank() > 0:
        return
    check_finite(folder, module, state.get("epoch"))
    tensors = {f"module.{name}": value for name, value in module.state_dict().items()}
    for name, entries in _by_name(module, optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in entries.items() if isinstance(value, Tensor)}
    tensors |= {f"average.{name}": value for name, value in (average or {}).items()}
    tensors |= {f"random.{name}": torch.stack([stream[name] for stream in streams]) for name in streams[0]}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(state)
    content = as_safetensors(tensors, {"state": text, "sha256": checksum(tensors, text)})
    write_whole(folder / NAME, content, previous=folder / PREVIOUS)


def check_finite(folder: Path, module: nn.Module, epoch: int | None) -> None:
    """Raise an error if weights or statistics are not finite."""
    if (name := first_non_finite(module)) is not None:
        raise NonFiniteError(
            f"{name!r} became NaN or infinite in epoch {epoch}{kept(folder)}. Lower the learning rate, or clip with `optim.clip=5`"
        )


def kept(folder: Path) -> str:
    """Where the last checkpoint is, for an error message; empty if there is none."""
    return f"; the last good checkpoint is kept in {folder}" if (folder / NAME).exists() else ""


def load_checkpoint(
    folder: Path, module: nn.Module, optimizer: optim.Optimizer, average: Mapping[str, Tensor] | None = None
) -> dict[str, Any] | None:
    """Restore the last checkpoint, or the previous one if it is damaged, and return its state; None without a checkpoint.

    Args:
        average: tensors to restore the averaged weights into, by name.
    """
    found = read_checkpoint(folder)
    if found is None:
        return None
    path, tensors, state = found
    try:
        _restore(path, tensors, module, optimizer)
        for name, value in (average or {}).items():
            value.copy_(tensors[f"average.{name}"])
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{path} does not fit the run: {reason(error)}; choose another folder") from None
    return state


def read_checkpoint(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The last checkpoint with a correct checksum: its file, tensors and state; None without a checkpoint."""
    found = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    for path in found:
        try:
            return (path, *_read(path))
        except CheckpointError as error:
            say(f"{error}; the previous checkpoint is used" if path != found[-1] else str(error))
    if found:
        raise CheckpointError(f"{folder} holds no intact checkpoint; remove it to restart the run")
    return None


def load_trained(module: nn.Module, folder: Path) -> None:
    """Load only the weights of the last intact checkpoint; refuses NaN, and parameters that are not finite."""
    found = read_checkpoint(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint")
    path, tensors, _ = found
    weights = _of_module(tensors)
    parameters = {name for name, _ in module.named_parameters()}
    bad = [name for name, value in weights.items() if _is_bad(value, infinite=name in parameters)]
    if bad:
        raise CheckpointError(f"{path} holds NaN or infinity in {bad[0]!r}; lower the learning rate and train again")
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its recipe: {reason(error)}") from None


def _is_bad(value: Tensor, *, infinite: bool) -> bool:
    if not value.is_floating_point():
        return False
    return not bool(torch.isfinite(value).all()) if infinite else bool(torch.isnan(value).any())


def _of_module(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in tensors.items() if name.startswith("module.")}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"{path} is damaged (it is not a plain file)")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict
        if checksum(tensors, metadata["state"]) != metadata["sha256"]:
            raise CheckpointError(f"{path} is damaged (its checksum differs)")
        return tensors, Position.model_validate_json(metadata["state"]).model_dump()
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged ({reason(error)})") from None


def _restore(path: Path, tensors: dict[str, Tensor], module: nn.Module, optimizer: optim.Optimizer) -> None:
    weights = _of_module(tensors)
    if other := set(module.state_dict()) ^ set(weights):
        raise CheckpointError(f"{path} belongs to another model: {', '.join(sorted(other)[:4])} differ; choose another folder")
    module.load_state_dict(weights)
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (key for key in tensors if key.startswith(prefix) and "." not in key[len(prefix) :]):
            entry = key[len(prefix) :]  # Adam and its variants count their steps on the CPU
            optimizer.state[parameter][entry] = tensors[key] if entry == "step" else tensors[key].to(parameter.device)
    streams = {name.removeprefix("random."): value for name, value in tensors.items() if name.startswith("random.")}
    processes = len(next(iter(streams.values())))
    if processes != world():
        say(f"{path} was written by {processes} processes and resumes with {world()}: the last digits will differ")
    set_random_streams({name: value[rank() % processes].clone() for name, value in streams.items()})


def random_streams() -> dict[str, Tensor]:
    """The states of the random generators of Python, numpy, torch and, if present, the GPU, each as a tensor of fixed size."""
    version, words, gauss = random.getstate()
    python = [version, *words, gauss is not None, gauss or 0.0]
    numpy_state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = numpy_state
    streams = {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def set_random_streams(streams: dict[str, Tensor]) -> None:
    """Restore the states that `random_streams` returned. The tensors must not be views: torch reads beyond a view of a larger tensor."""
    version, *words, has_gauss, gauss = streams["python"].tolist()
    random.setstate((int(version), tuple(int(word) for word in words), gauss if has_gauss else None))
    *keys, position, has_gauss, cached = streams["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])


def _by_name(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[parameter] for name, parameter in module.named_parameters() if parameter in optimizer.state}
