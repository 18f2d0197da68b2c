"""What a teacher sees of the student's images, and which of its logits belongs to which class."""

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
    """Images as the teacher was trained on them: another normalisation, another size, another order of classes.

        x_T = resize((x · from_std + from_mean − mean) / std)        logits_T[:, order]

    Args:
        mean, std: of each channel, as the teacher was trained with, where 0 is black and 1 is white.
        from_mean, from_std: those that the student's batches are normalised with.
        size: height and width that the teacher takes; None: as they come. Bilinear, antialiased.
        order: the teacher's index of each of the student's classes; None: the same order.
        foreign: why the teacher's classes are not the student's; "" if they are. Methods that read its logits are then refused.

    What is the same on both sides is left alone, bit for bit.

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
                raise LetkdError(f"{name} of the teacher's input is {values}, and it must be 3 numbers, one per channel{above}")
            object.__setattr__(self, name, values)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b 3 H W]` as the student gets it, to `[b 3 H' W']` as the teacher does."""
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
        """What the teacher gets other than the student, by name; for fingerprints and messages."""
        found: dict[str, Any] = {}
        if (self.mean, self.std) != (self.from_mean, self.from_std):
            found |= {"mean": self.mean, "std": self.std, "from mean": self.from_mean, "from std": self.from_std}
        if self.size is not None:
            found["size"] = self.size
        if self.order is not None:
            found["order"] = self.order
        return found


class SeenTeacher(nn.Module):
    """A teacher as it answers in training: on its own input, its classes in the student's order."""

    def __init__(self, teacher: nn.Module, seen: TeacherInput):
        super().__init__()
        self.teacher, self.seen = teacher, seen

    @property
    def taps(self) -> dict[str, Tap]:
        return {role: replace(tap, path=f"teacher.{tap.path}") for role, tap in as_taps(self.teacher).items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.seen.reorder(as_logits(self.teacher(self.seen(x)), self.teacher))


# Made once per device: a copy to the device in every step would wait for it.
@lru_cache(maxsize=8)
def _column(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None].to(device, dtype)


@lru_cache(maxsize=8)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
