"""When to save and when to stop: at the same step in all processes."""

import time

import torch

from letkd.distributed.processes import is_distributed, sum_of_all
from letkd.training.stop import StopRequest

ASK_SECONDS = 1.0  # between two exchanges of the processes
MAX_STEPS = 100  # between two exchanges


class Agreement:
    """Whether it is time to stop or to save.

    Several processes must agree, and each exchange costs a transfer. So they exchange about once per second; the clock of the first
    process determines after how many steps.
    """

    def __init__(self, request: StopRequest, device: torch.device, save_seconds: float):
        self._request, self._device, self._save_seconds = request, device, save_seconds
        self._asked = self._saved = time.monotonic()
        self._steps, self._every = 0, 1

    def saved(self) -> None:
        """Note that the state has just been saved."""
        self._saved = time.monotonic()

    def after_step(self) -> tuple[bool, bool]:
        """After a step: whether to stop, whether to save."""
        due = time.monotonic() - self._saved >= self._save_seconds
        if not is_distributed():
            return self._request.asked, due
        self._steps += 1
        if self._steps < self._every:
            return False, False
        now = time.monotonic()
        steps = min(ASK_SECONDS, self._save_seconds) * self._steps / max(now - self._asked, 1e-9)
        stop, save, every = self._ask(due, min(max(int(steps), 1), MAX_STEPS))
        self._asked, self._steps, self._every = now, 0, every
        return stop, save

    def should_stop(self) -> bool:
        """Between the batches of an evaluation: whether to stop."""
        return self._ask(False, 1)[0]

    def _ask(self, due: bool, every: int) -> tuple[bool, bool, int]:
        if not is_distributed():
            return self._request.asked, due, every
        first = torch.distributed.get_rank() == 0
        values = [float(self._request.asked), float(due and first), float(every) if first else 0.0]
        stop, save, steps = sum_of_all(torch.tensor(values, device=self._device)).tolist()
        return bool(stop), bool(save), int(steps)
