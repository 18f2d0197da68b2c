"""The maps at each site of a distiller for a batch: the student's x, the teacher's f_T, and the quantities of the KD layer."""

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
from letkd.methods.quest_kd import QUEST
from letkd.methods.site import Site
from letkd.modules import in_eval_mode
from letkd.supervision.base import Supervision
from letkd.taps import Tap, Taps, run_once


@dataclass(frozen=True)
class SiteView:
    """One site for one batch.

    Args:
        x: the student's map before the KD layer, `[b d h w]`.
        f_T: the teacher's map, pooled to the student's size, `[b d_T h w]`.
        y: the labels.
        omega: the templates: the KD layer's, or those of QUEST's predictor.
        layer: None if the templates are outside the student.
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
        """Whether the output of the templates enters the student."""
        return self.layer is not None and self.layer.alpha != 0

    def part(self, images: slice) -> "SiteView":
        """The same for a subset of the images."""
        return SiteView(
            self.role,
            self.x[images],
            self.f_T[images],
            self.y[images],
            self.omega,
            self.layer,
            self.supervision,
        )

    def parts(self, largest: int = 2**22) -> Iterator["SiteView"]:
        """The images in groups whose p_T has at most `largest` numbers (or one image each), which limits memory for K = 4096."""
        K, (h, w) = self.omega.weight.shape[0], self.x.shape[-2:]
        step = max(1, largest // (K * h * w))
        for first in range(0, len(self.x), step):
            yield self.part(slice(first, first + step))

    def a(self) -> Tensor:
        """The matching scores a, `[b K h w]`; p_S is their soft-max."""
        return self.omega(self.x)

    def p(self, a: Tensor) -> Tensor:
        """The scores that the student keeps, BN-ReLU(a), `[b K h w]`; all zero at pixels where it discards everything."""
        if self.layer is None:
            raise ValueError(f"there is no KD layer at {self.role!r}")
        return F.relu(self.layer.bn(a))

    def p_T(self) -> Tensor:
        return self.supervision.p_T(self.f_T, self.y)


@torch.no_grad()
def inspect_sites(distiller: Distiller, batch: Batch) -> dict[str, SiteView]:
    """The maps of both networks at every site of QUEST and letKD, in eval mode; changes neither the distiller nor the random stream.

    Use the result in eval mode too: see `at_rest`.
    """
    device, dtype = _device_and_dtype(distiller.student)
    batch = _labelled_if_needed(distiller, batch).to(device)
    if not len(batch.x):
        return {}
    x = batch.x.to(dtype)
    found: dict[str, tuple[Any, Any, Site]] = {}
    student_taps: dict[str, Tap] = {}
    teacher_taps: dict[str, Tap] = {}
    for method in (method for method in distiller.methods if isinstance(method, PerPixelMethod)):
        for role, site in method.sites.items():
            if isinstance(method, QUEST):
                layer, omega, student_taps[role] = None, method.templates(role), method.reads.student[role]
            else:
                grafted = method.reads.student[f"{role}.x"]
                layer = distiller.student.get_submodule(grafted.path)
                omega, student_taps[role] = layer.get_submodule("omega"), grafted
            found[role] = omega, layer, site
            teacher_taps[role] = method.reads.teacher[role + site.supervision.reads]
    if not found or distiller.teacher is None:
        return {}
    # A network may draw random numbers even in eval mode.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(device.type, enabled=False):
        _, student_maps = run_once(Taps(distiller.student, student_taps), x)
        x_T = x if distiller.teacher_input is None else distiller.teacher_input(x)
        _, teacher_maps = run_once(Taps(distiller.teacher, teacher_taps), x_T)
    views = {}
    for role, (omega, layer, site) in found.items():
        x_role = student_maps[role]
        f_T = match_to(teacher_maps[role], (x_role.shape[-2], x_role.shape[-1]), role, match=site.match)
        views[role] = SiteView(role, x_role, f_T, batch.y, omega, layer, site.supervision)
    return views


def _labelled_if_needed(distiller: Distiller, batch: Batch) -> Batch:
    """Only the images with a label, if the supervision of a site depends on classes; else all images."""
    methods = [method for method in distiller.methods if isinstance(method, PerPixelMethod)]
    rows = batch.labelled()
    if rows is None or not any(site.supervision.reads_classes for method in methods for site in method.sites.values()):
        return batch
    return Batch(batch.x[rows], batch.y[rows])


def layer_path(distiller: Distiller, role: str) -> str:
    """Module path of a site's KD layer in the student."""
    for method in (method for method in distiller.methods if isinstance(method, PerPixelMethod)):
        if grafted := method.reads.student.get(f"{role}.x"):
            return grafted.path
    raise TapError(f"the student has no KD layer at {role!r}")


class at_rest:
    """Inside `with`, a module is in eval mode, without gradients and in full precision; afterwards all modes are restored."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __enter__(self) -> None:
        device, _ = _device_and_dtype(self.module)
        self._contexts = (torch.no_grad(), torch.autocast(device.type, enabled=False), in_eval_mode(self.module))
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.zeros(()))
    return first.device, first.dtype
