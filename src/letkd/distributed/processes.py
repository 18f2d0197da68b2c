"""Communication between the processes of a run. In a single process these functions return their input or do nothing."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks. Every process must have the same number of rows."""
    if not is_distributed():
        return rows
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def objects_of_all(value: Any) -> list[Any]:
    """The value of each process, in the order of their ranks; sizes may differ."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The value of the first process."""
    if not is_distributed():
        return value
    values = [value if rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def sum_of_all(values: Tensor) -> Tensor:
    """The sum over all processes, returned in each of them; without gradients."""
    if is_distributed():
        values = values.clone()
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    """Block until every process has called this."""
    if is_distributed():
        dist.barrier()
