"""Whether a model's numbers are numbers."""

import torch
from torch import nn

STATISTICS = ("running_mean", "running_var")


def first_non_finite(module: nn.Module) -> str | None:
    """The name of a parameter or buffer that diverged, None where there is none: one transfer from the device for all of them.

    Infinity counts in parameters and in the statistics of BN. Other buffers may hold it by design, such as masks of −∞ for attention.
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
