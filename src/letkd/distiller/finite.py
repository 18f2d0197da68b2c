"""Checks for NaN and infinity."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from letkd.methods.base import View

STATISTICS = ("running_mean", "running_var")


def first_non_finite(module: nn.Module) -> str | None:
    """The name of the first parameter or buffer that diverged, or None, with a single transfer from the device.

    Infinity is checked in parameters and BN statistics only. Other buffers may contain it by design, such as attention masks of −∞.
    """
    found = {name: ~torch.isfinite(value).all() for name, value in module.named_parameters()}
    for name, value in module.named_buffers():
        if value.is_floating_point():
            is_statistic = name.rpartition(".")[2] in STATISTICS
            found[name] = ~torch.isfinite(value).all() if is_statistic else torch.isnan(value).any()
    if not found:
        return None
    diverged = torch.stack(list(found.values())).tolist()
    return next((name for name, bad in zip(found, diverged, strict=True) if bad), None)


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Whether all values are finite, as a scalar on their device, without synchronisation."""
    return torch.stack([torch.isfinite(value).all() for value in values]).all()


def where_non_finite(view: "View", terms: Mapping[str, Tensor]) -> str:
    """A sentence on where NaN or infinity first occurs in a step."""
    when = "" if view.batch.epoch is None else f" of epoch {view.batch.epoch}"
    places = [(f"the input batch{when}", view.batch.x)]
    places += [(f"the teacher's tap {role!r}", f) for role, f in view.teacher.items()]
    places += [(f"the student's tap {role!r}", f) for role, f in view.student.items()]
    places += [(f"the loss term {name!r}", term) for name, term in terms.items()]
    where = next((name for name, value in places if not torch.isfinite(value).all()), "the weighted loss")
    bad = ", ".join(f"{name}={term.item():g}" for name, term in terms.items())
    return f"NaN or infinity in {where} (terms: {bad}); stopped before it reached the weights. Lower the learning rate or check the data"
