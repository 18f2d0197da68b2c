"""What a step gives."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Step:
    """What one forward gives: the weighted loss, the unweighted terms by name, the student's logits (with a task, its output), and
    whether the loss and the teacher's features are finite.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor
    finite: Tensor
