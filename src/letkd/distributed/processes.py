"""Several processes that work on one thing; with one process alone each of these does nothing, or the obvious."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if several() else 0


def world() -> int:
    return dist.get_world_size() if several() else 1


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks; as many in each."""
    if not several():
        return rows
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def objects_of_all(value: Any) -> list[Any]:
    """What each process holds, in the order of their ranks; sizes may differ."""
    if not several():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """What the first process holds."""
    if not several():
        return value
    values = [value if rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def sum_of_all(values: Tensor) -> Tensor:
    """The sum over all processes, in each of them; without gradients."""
    if several():
        values = values.clone()
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    """Nobody goes on before everybody is here."""
    if several():
        dist.barrier()
