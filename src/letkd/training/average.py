"""Average of the weights over training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from letkd.distiller import Distiller
from letkd.distiller.finite import STATISTICS


class Average:
    """Exponential moving average of all trained parameters and of the statistics of the student's batch norms.

        a ← a + (1 − d) (θ − a),    d = min(decay, (1 + t) / (10 + t)) after t updates

    d rises from 0.1 to `decay`, so that short runs forget the initial weights, too. Unlike
    `torch.optim.swa_utils.AveragedModel`, it needs no second module, and an update does not wait for the device.

    Args:
        decay: d in the long run.
    """

    def __init__(self, distiller: Distiller, decay: float):
        self.decay = decay
        self._live: dict[str, Tensor] = {name: p for name, p in distiller.named_parameters() if p.requires_grad}
        for name, buffer in distiller.student.named_buffers(prefix="student"):
            if name.rpartition(".")[2] in STATISTICS:
                self._live[name] = buffer
        self.values = {name: value.detach().clone() for name, value in self._live.items()}
        self._swapped = False

    @torch.no_grad()
    def update(self, t: int) -> None:
        """Move towards the current weights, after `t` earlier updates."""
        d = min(self.decay, (1 + t) / (10 + t))
        torch._foreach_lerp_(list(self.values.values()), list(self._live.values()), 1 - d)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def in_place(self, averaged: bool = True) -> Iterator[None]:
        """Inside `with`, the distiller has the averages in place of its weights; with False, its own weights, even if nested."""
        swap = averaged != self._swapped
        self._swap(swap)
        try:
            yield
        finally:
            self._swap(swap)

    @torch.no_grad()
    def _swap(self, swap: bool) -> None:
        if not swap:
            return
        self._swapped = not self._swapped
        for name, live in self._live.items():
            current = live.clone()
            live.copy_(self.values[name])
            self.values[name].copy_(current)
