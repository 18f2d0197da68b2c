"""The result of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Step:
    """The result of one forward pass.

    Args:
        loss: weighted sum of the terms.
        terms: unweighted losses by name.
        logits: the student's logits; with a task, its output.
        finite: whether the loss and the teacher's features are finite.

    Examples:
        >>> import torch, letkd
        >>> distiller = letkd.Distiller(letkd.create_model("resnet8_tiny", num_classes=3))
        >>> step = distiller((torch.randn(2, 3, 32, 32), torch.tensor([0, 1])))
        >>> list(step.terms), step.logits.shape, bool(step.finite)
        (['ce'], torch.Size([2, 3]), True)
    """

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor
    finite: Tensor
