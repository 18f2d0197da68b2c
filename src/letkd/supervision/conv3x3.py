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
        tau: multiplies the activations. Default: 1, because the paper mentions no temperature.

    It reads the role `<site>.conv3x3`: the raw output, before BN, of the block's 3x3 convolution. K is its number of channels.

    Examples:
        >>> f_T, y = torch.randn(4, 8, 6, 6), torch.zeros(4, dtype=torch.int64)
        >>> ConvSupervision(tau=0.5).p_T(f_T, y).shape
        torch.Size([4, 8, 6, 6])
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
            raise UnsupportedPair(f"{self} takes K from the teacher's 3x3 convolution; pass it to a Distiller first")
        return self.K

    def label_settings(self) -> dict[str, object]:
        return {"tau": self.tau}

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        return torch.softmax(self.tau * f_T.to(torch.promote_types(f_T.dtype, torch.float32)), dim=1)  # section 4.2.1

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}"
