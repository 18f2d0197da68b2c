"""Matrix products of many rows in which each thread works on the same rows in every operation.

On a CPU the threads of one matrix product share its blocks, so the next operation may read on one thread what another thread has
written. In measurements, two threads were then often no faster than one (benchmarks/README.md). This module splits the rows of a chunk
into as many lanes as there are threads: a batched product gives each thread one lane, and element-wise operations, which split a
contiguous tensor into equal parts, split it at the same rows. On other devices, and if rows do not divide evenly, there is one lane.
"""

import torch
from torch import Tensor

MOST = 8  # with more threads, lanes would be short and the sums of all lanes large, so one product is used


def mm(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """out = p q, lane by lane."""
    if p.dtype != out.dtype:
        return out.copy_(p @ q)
    count = _count(p)
    if count == 1:
        return torch.mm(p, q, out=out)
    torch.bmm(_cut(p, count), q.expand(count, *q.shape), out=_cut(out, count))
    return out


class Sum:
    """Σ over chunks of pᵀ q, or of the rows of q: one sum per lane, added at the end."""

    def __init__(self, like: Tensor):
        self._parts = like.new_zeros(_most(like), *like.shape)

    def add_product(self, p: Tensor, q: Tensor) -> None:
        if p.dtype == self._parts.dtype:
            count = _count(p)
            self._parts[:count].baddbmm_(_cut(p, count).mT, _cut(q, count))
        else:
            self._parts[0] += p.T @ q

    def add_rows(self, q: Tensor) -> None:
        count = _count(q)
        self._parts[:count] += _cut(q, count).sum(dim=1)

    def total(self) -> Tensor:
        return self._parts.sum(dim=0)


def _most(t: Tensor) -> int:
    threads = torch.get_num_threads() if t.device.type == "cpu" else 1
    return threads if threads <= MOST else 1


def _count(rows: Tensor) -> int:
    most = _most(rows)
    return most if len(rows) % most == 0 else 1


def _cut(rows: Tensor, count: int) -> Tensor:
    return rows.unflatten(0, (count, len(rows) // count))
