"""The offline parts of methods, fitted in one pass of the teacher."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from letkd.batch import Batch
from letkd.methods.base import Fitting
from letkd.progress import bar, say
from letkd.supervision.shared import finish_of_all


def fit_parts(parts: Mapping[str, Fitting], seen: Iterable[tuple[Batch, dict[str, Tensor]]], device: torch.device) -> None:
    """Fit every part, by site, to batches and what the teacher gives for them; what needs labels sees the images that have one.

    Args:
        device: where the fitted buffers belong.
    """
    for part in parts.values():
        part.supervision.reset()
    for batch, features in seen:
        labelled = batch.labelled()
        for part in parts.values():
            shown = part.f_T(features), batch.y, batch.index
            if part.supervision.needs_labels and labelled is not None:
                shown = shown[0][labelled], shown[1][labelled], None if shown[2] is None else shown[2][labelled]
            if len(shown[1]):
                part.supervision.partial_fit(*shown)
    for site, part in parts.items():
        with bar(f"{part.supervision} at {site}: from pixels to labels", None):
            finish_of_all(part.supervision)
        part.supervision.to(device)
        facts = (
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
            for name, value in part.supervision.report_.items()
        )
        say(f"fitted {part.supervision} at {site} ({', '.join(facts)})")
