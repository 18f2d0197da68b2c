"""What a model returns: logits, or the features of a backbone without a classifier."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def logits_in(output: Any) -> Tensor | None:
    """As `as_logits`; None for a model that returns something else, as a backbone without a classifier does."""
    logits = logits_of(output)
    return logits if isinstance(logits, Tensor) and logits.ndim == 2 else None


def is_backbone(model: nn.Module) -> bool:
    """Whether a model says that it has no classifier, as those of timm do; what it returns are features then, not logits."""
    return getattr(model, "num_classes", None) == 0


def logits_of(output: Any) -> Any:
    """What stands in the place of logits: the output itself, or the `logits` of an answer object or a dictionary."""
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
