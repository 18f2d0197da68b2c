"""Labels without K-means: the teacher's own 3x3 kernels are the centres (section 4.2.1, "Without K-means")."""

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from letkd.errors import UnsupportedPair
from letkd.limits import Scale
from letkd.supervision.base import Supervision


class ConvSupervision(Supervision):
    """p_T is the soft-maxed output of the 3x3 convolution in the teacher's block at the site; nothing is fitted.

    Args:
        tau: multiplies the activations. The paper mentions none, so 1.

    It reads the role `<site>.conv3x3`: the raw output, before BN, of the block's 3x3 convolution. K is its channel count.
    """

    kind: ClassVar[str] = "conv3x3"
    reads: ClassVar[str] = ".conv3x3"

    def __init__(self, tau: Scale = 1.0):
        super().__init__()
        self.tau = float(tau)
        self.K: int | None = None

    def bind(self, where: str, *, d: int, C: int) -> None:
        super().bind(where, d=d, C=C)
        self.K = d

    def num_labels(self) -> int:
        if self.K is None:
            raise UnsupportedPair(f"{self} takes its K from the teacher's 3x3 convolution: give it to a Distiller first")
        return self.K

    def label_settings(self) -> dict[str, object]:
        return {"tau": self.tau}

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        return torch.softmax(self.tau * f_T.to(torch.promote_types(f_T.dtype, torch.float32)), dim=1)  # section 4.2.1

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}"
