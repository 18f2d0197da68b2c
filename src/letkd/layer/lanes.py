"""Products of many rows, each thread with rows of its own from end to end.

On a CPU the threads of one matrix product share its blocks, and what one has written the next operation may let another read. On the
machine that this was measured on, two threads were then in many runs no faster than one (benchmarks/README.md). Here the rows of a
chunk are cut into as many lanes as there are threads, for a batched product to share out and for element-wise operations, which cut a
contiguous tensor into equal parts, to cut at the same places. On other devices, and where rows do not divide, there is one lane.
"""

import torch
from torch import Tensor

MOST = 8  # with more threads than this a lane would be thin, and the sums of all lanes large: there the product shares them out


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
    """Σ over chunks of pᵀ q, or of the rows of q: one sum for each lane, added up at the end."""

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
