"""What passes at each site of a distiller for some images: the student's x, the teacher's f_T, and what the KD layer makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import TapError
from letkd.functional import match_to
from letkd.layer import CosineConv1x1, KDLayer
from letkd.methods.per_pixel import PerPixelMethod
from letkd.methods.quest import QUEST
from letkd.methods.site import Site
from letkd.supervision.base import Supervision
from letkd.taps import Tap, Taps, run_once


@dataclass(frozen=True)
class Seen:
    """One site for one batch.

    Args:
        x: the student's map before the KD layer, `[b d h w]`.
        f_T: the teacher's map, pooled to the student's size, `[b d_T h w]`.
        y: the labels.
        omega: the templates: the KD layer's, or those of QUEST's predictor.
        layer: None where the templates stand outside the student.
    """

    role: str
    x: Tensor
    f_T: Tensor
    y: Tensor
    omega: CosineConv1x1
    layer: KDLayer | None
    supervision: Supervision

    @property
    def uses_knowledge(self) -> bool:
        """Whether what the templates match goes on into the student."""
        return self.layer is not None and self.layer.alpha != 0

    def part(self, images: slice) -> "Seen":
        """The same for some of the images."""
        return Seen(
            self.role,
            self.x[images],
            self.f_T[images],
            self.y[images],
            self.omega,
            self.layer,
            self.supervision,
        )

    def parts(self, largest: int = 2**22) -> Iterator["Seen"]:
        """The images in groups whose p_T has at most `largest` numbers (or one image each): K = 4096 is then no matter of memory."""
        K, (h, w) = self.omega.weight.shape[0], self.x.shape[-2:]
        step = max(1, largest // (K * h * w))
        for first in range(0, len(self.x), step):
            yield self.part(slice(first, first + step))

    def a(self) -> Tensor:
        """The matching scores a, `[b K h w]`; p_S is their soft-max."""
        return self.omega(self.x)

    def p(self, a: Tensor) -> Tensor:
        """What of the scores the student keeps, BN-ReLU(a), `[b K h w]`; all zero where it discards everything."""
        if self.layer is None:
            raise ValueError(f"there is no KD layer at {self.role!r}")
        return F.relu(self.layer.bn(a))

    def p_T(self) -> Tensor:
        return self.supervision.p_T(self.f_T, self.y)


@torch.no_grad()
def look(distiller: Distiller, batch: Batch) -> dict[str, Seen]:
    """Both networks' maps at every site of QUEST and letKD, in eval mode; leaves no trace in the distiller or the random stream.

    What it gives is to be used in eval mode too: see `at_rest`.
    """
    device, dtype = _kind(distiller.student)
    batch = _classified(distiller, batch).to(device)
    x = batch.x.to(dtype)
    found: dict[str, tuple[Any, Any, Site]] = {}
    here: dict[str, Tap] = {}
    there: dict[str, Tap] = {}
    for method in (method for method in distiller.methods if isinstance(method, PerPixelMethod)):
        for role, site in method.sites.items():
            if isinstance(method, QUEST):
                layer, omega, here[role] = None, method.templates(role), method.reads.student[role]
            else:
                grafted = method.reads.student[f"{role}.x"]
                layer = distiller.student.get_submodule(grafted.path)
                omega, here[role] = layer.get_submodule("omega"), grafted
            found[role] = omega, layer, site
            there[role] = method.reads.teacher[role + site.supervision.reads]
    if not found or distiller.teacher is None:
        return {}
    # A network may draw random numbers even in eval mode.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(device.type, enabled=False):
        _, ours = run_once(Taps(distiller.student, here), x)
        shown = x if distiller.teacher_input is None else distiller.teacher_input(x)
        _, theirs = run_once(Taps(distiller.teacher, there), shown)
    seen = {}
    for role, (omega, layer, site) in found.items():
        f_T = match_to(theirs[role], (ours[role].shape[-2], ours[role].shape[-1]), role, match=site.match)
        seen[role] = Seen(role, ours[role], f_T, batch.y, omega, layer, site.supervision)
    return seen


def _classified(distiller: Distiller, batch: Batch) -> Batch:
    """The images of a batch that have a label, if labels of some site depend on it; else all of them."""
    methods = [method for method in distiller.methods if isinstance(method, PerPixelMethod)]
    rows = batch.labelled()
    if rows is None or not any(site.supervision.reads_classes for method in methods for site in method.sites.values()):
        return batch
    return Batch(batch.x[rows], batch.y[rows])


def layer_path(distiller: Distiller, role: str) -> str:
    """Where in the student the KD layer of a site stands."""
    for method in (method for method in distiller.methods if isinstance(method, PerPixelMethod)):
        if grafted := method.reads.student.get(f"{role}.x"):
            return grafted.path
    raise TapError(f"the student has no KD layer at {role!r}")


class at_rest:
    """In its block a module is in eval mode, without gradients and in full precision; after it each part is as it was."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __enter__(self) -> None:
        self._modes = {module: module.training for module in self.module.modules()}
        device, _ = _kind(self.module)
        self._contexts = (torch.no_grad(), torch.autocast(device.type, enabled=False))
        for context in self._contexts:
            context.__enter__()
        self.module.eval()

    def __exit__(self, *error: object) -> None:
        for module, mode in self._modes.items():
            module.training = mode
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


def _kind(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(()))
    return first.device, first.dtype
