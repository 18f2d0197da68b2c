"""The state from which a run goes on: one safetensors file, written beside and renamed, so that it is whole or absent."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn, optim

from letkd.errors import CheckpointError, NonFiniteError
from letkd.files import write_whole

NAME = "checkpoint.safetensors"


def save_checkpoint(folder: Path, module: nn.Module, optimizer: optim.Optimizer, *, epoch: int, extra: dict[str, Any]) -> None:
    """Write weights, momentum, the random stream and `extra`; refuses weights that are not finite."""
    for name, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"the parameter {name!r} became NaN or infinite in epoch {epoch}; the checkpoint of the epoch before is kept in {folder}. "
                "Lower the learning rate"
            )
    tensors = {f"module.{name}": value for name, value in module.state_dict().items()}
    for name, state in _by_name(module, optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    tensors["random"] = torch.get_rng_state()
    content = save(
        {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()},
        metadata={"epoch": str(epoch), "extra": json.dumps(extra)},
    )
    write_whole(folder / NAME, content)


def load_checkpoint(folder: Path, module: nn.Module, optimizer: optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
    """Restore what `save_checkpoint` wrote and return the epoch it ended; None where there is no checkpoint."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        epoch, extra = int(metadata["epoch"]), json.loads(metadata["extra"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove it to start the run anew") from None
    state = {name.removeprefix("module."): value for name, value in tensors.items() if name.startswith("module.")}
    missing = set(module.state_dict()) ^ set(state)
    if missing:
        raise CheckpointError(
            f"{path} belongs to another model: {', '.join(sorted(missing)[:4])} differ; choose another folder"
        )
    module.load_state_dict(state)
    for name, parameter in module.named_parameters():
        momentum = tensors.get(f"optimizer.{name}.momentum_buffer")
        if momentum is not None:
            optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter.device)
    torch.set_rng_state(tensors["random"])
    return epoch, extra


def _by_name(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[parameter] for name, parameter in module.named_parameters() if parameter in optimizer.state}
