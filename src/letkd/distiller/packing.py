"""Compact storage of labels in a cache."""

import torch
from jaxtyping import Int
from torch import Tensor

from letkd.supervision.base import Supervision
from letkd.supervision.labels import Entries, Labels, Table, largest_labels

KEPT = 1e-4  # labels below this share of their pixel's largest are left out


def pack(labels: Labels) -> dict[str, Tensor]:
    """The row number of each pixel, if labels are rows of a table; otherwise its largest labels in half precision."""
    if isinstance(labels, Table):
        return {"at": narrow(labels.at, len(labels.rows))}
    kept = largest_labels(labels, KEPT)
    return {"count": narrow(kept.count()), "index": narrow(kept.index, kept.K), "prob": kept.prob.to(torch.float16)}


def unpack(packed: dict[str, Tensor], supervision: Supervision) -> Labels:
    """The labels that `pack` stored, rescaled to sum to one."""
    table = supervision.label_table()
    if table is not None:
        return Table(table, widen(packed["at"]))
    count, prob = widen(packed["count"]), packed["prob"].float()
    pixel = torch.repeat_interleave(count)
    prob = prob / prob.new_zeros(len(count)).index_add_(0, pixel, prob)[pixel]
    return Entries(widen(packed["index"]), prob, count.cumsum(dim=0) - count, supervision.num_labels())


def narrow(numbers: Int[Tensor, "n"], below: int = 2**16) -> Int[Tensor, "n"]:
    """Non-negative numbers in 16 bits, with those from 2^15 on as negative numbers; in 32 bits if `below` is larger than 2^16."""
    return numbers.to(torch.int16 if below <= 2**16 else torch.int32)


def widen(numbers: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The inverse of `narrow`."""
    wide = numbers.to(torch.int64)
    return wide & 0xFFFF if numbers.dtype == torch.int16 else wide
