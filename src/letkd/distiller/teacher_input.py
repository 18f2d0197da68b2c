"""The teacher's input, computed from the student's images, and the order of its classes."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.errors import LetkdError
from letkd.taps import Tap, as_logits, as_taps

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class TeacherInput:
    """Converts the student's images to the teacher's normalisation and size, and its logits to the student's order of classes.

        x_T = resize((x · from_std + from_mean − mean) / std)        logits_T[:, order]

    Args:
        mean, std: per channel, as in the teacher's training, with 0 for black and 1 for white.
        from_mean, from_std: the normalisation of the student's batches.
        size: height and width of the teacher's input (bilinear, antialiased); None: the student's.
        order: the teacher's index of each of the student's classes; None: the same order.
        foreign: why the teacher's classes differ from the student's, in which case methods that read logits raise an error; "" if they
            do not.

    What is equal on both sides is not changed, bit for bit.

    Examples:
        >>> halves, x = (0.5, 0.5, 0.5), torch.rand(2, 3, 8, 8)
        >>> TeacherInput(halves, halves, halves, halves)(x) is x
        True
        >>> TeacherInput(halves, halves, halves, halves, size=(16, 16))(x).shape
        torch.Size([2, 3, 16, 16])
    """

    mean: Channels
    std: Channels
    from_mean: Channels
    from_std: Channels
    size: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None
    foreign: str = ""

    def __post_init__(self):
        for name in ("mean", "std", "from_mean", "from_std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or (name.endswith("std") and min(values) <= 0):
                above = ", above 0" if name.endswith("std") else ""
                raise LetkdError(f"{name} of the teacher's input is {values}, but must be 3 numbers, one per channel{above}")
            object.__setattr__(self, name, values)

    def __call__(self, x: Tensor) -> Tensor:
        """Convert the student's images `[b 3 H W]` to the teacher's `[b 3 H' W']`."""
        if (self.mean, self.std) != (self.from_mean, self.from_std):
            channels = zip(self.mean, self.std, self.from_mean, self.from_std, strict=True)
            scale, shift = zip(*((fs / s, (fm - m) / s) for m, s, fm, fs in channels), strict=True)
            x = x * _column(scale, x.device, x.dtype) + _column(shift, x.device, x.dtype)
        if self.size is not None and tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        return x

    def reorder(self, logits: Tensor) -> Tensor:
        """The teacher's logits, in the order of the student's classes."""
        return logits if self.order is None else logits.index_select(1, _index(self.order, logits.device))

    def differences(self) -> dict[str, Any]:
        """How the teacher's input differs from the student's, by name; for fingerprints and messages."""
        found: dict[str, Any] = {}
        if (self.mean, self.std) != (self.from_mean, self.from_std):
            found |= {"mean": self.mean, "std": self.std, "from mean": self.from_mean, "from std": self.from_std}
        if self.size is not None:
            found["size"] = self.size
        if self.order is not None:
            found["order"] = self.order
        return found


class AdaptedTeacher(nn.Module):
    """A teacher that takes the student's images and returns logits in the student's order, as in training."""

    def __init__(self, teacher: nn.Module, teacher_input: TeacherInput):
        super().__init__()
        self.teacher, self.teacher_input = teacher, teacher_input

    @property
    def taps(self) -> dict[str, Tap]:
        return {role: replace(tap, path=f"teacher.{tap.path}") for role, tap in as_taps(self.teacher).items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.teacher_input.reorder(as_logits(self.teacher(self.teacher_input(x)), self.teacher))


# Created once per device: copying to the device in every step would synchronise.
@lru_cache(maxsize=8)
def _column(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None].to(device, dtype)


@lru_cache(maxsize=8)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
