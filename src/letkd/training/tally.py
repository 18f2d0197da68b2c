"""Sums over the steps of an epoch, kept on the device."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from letkd.distiller import Step

COUNTS = ("#steps", "#images", "#correct")


class Tally:
    """Sums of loss, terms and correct predictions over steps, and the first step with NaN or infinity.

    `add` starts a few small operations and does not wait. `read` waits for the device once.

    Args:
        sums: sums over earlier steps of the epoch.
    """

    def __init__(self, sums: Mapping[str, float] | None = None):
        self._before = dict(sums or {})
        self._steps = int(self._before.get(COUNTS[0], 0))
        self._names: list[str] = []
        self._gradients: Sequence[str] = ()
        self._sums = self._fault = torch.zeros(0)

    @torch.no_grad()
    def add(self, step: Step, y: Tensor, norms: Tensor | None = None, gradients: Sequence[str] = ()) -> None:
        """Add a step.

        Args:
            y: its labels; images without a label are not counted.
            norms: of the gradients, per parameter; `gradients` has the names of the parameters.
        """
        correct, images = (step.logits.argmax(dim=1) == y).sum(), (y >= 0).sum()
        values = torch.stack([images, correct, step.loss, *step.terms.values()]).to(_widest(step.loss.device))
        if not self._names:
            self._names = [*COUNTS[1:], "loss", *step.terms]
            self._sums = values.new_tensor([self._before.get(name, 0.0) for name in self._names])
            self._fault = values.new_zeros(2 + len(values))
        self._steps, self._gradients = self._steps + 1, gradients or self._gradients
        self._sums += values
        finite = step.finite[None] if norms is None else torch.cat([step.finite[None], torch.isfinite(norms)])
        now = torch.cat([values.new_full((1,), self._steps), finite.int().argmin(dim=0, keepdim=True), values])
        self._fault = torch.where(finite.all() | (self._fault[0] > 0), self._fault, now)

    def read(self) -> tuple[dict[str, float], str]:
        """The sums by name, and a message on the first step with NaN or infinity, or an empty string."""
        if not self._names:
            return dict(self._before), ""
        read = torch.cat([self._sums, self._fault]).tolist()
        sums, fault = read[: len(self._names)], read[len(self._names) :]
        by_name = {COUNTS[0]: float(self._steps)} | dict(zip(self._names, sums, strict=True))
        return by_name, self._sentence(fault) if fault[0] else ""

    def _sentence(self, fault: Sequence[float]) -> str:
        step, at, _, _, loss, *terms = fault
        by_name = dict(zip(self._names[3:], terms, strict=True))
        bad = next((name for name, value in by_name.items() if not abs(value) < float("inf")), None)
        if at:
            what = f"the gradient of {self._gradients[int(at) - 1]!r}"
        elif bad is not None:
            what = f"the loss term {bad!r}"
        else:
            what = "the teacher's features" if abs(loss) < float("inf") else "the weighted loss"
        values = ", ".join(f"{name}={value:g}" for name, value in by_name.items())
        return f"{what} became NaN or infinite in step {int(step)} (terms: {values})"


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # as exact as Python's floats
