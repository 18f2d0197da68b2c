"""What a model returns: logits, or the features of a backbone without a classifier."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def logits_in(output: Any) -> Tensor | None:
    """Like `as_logits`, but None if the model returns something else, as a backbone without a classifier does."""
    logits = logits_of(output)
    return logits if isinstance(logits, Tensor) and logits.ndim == 2 else None


def is_backbone(model: nn.Module) -> bool:
    """Whether a model declares that it has no classifier, as in timm; its output are then features, not logits."""
    return getattr(model, "num_classes", None) == 0


def logits_of(output: Any) -> Any:
    """The output itself, or its `logits` attribute or entry."""
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
