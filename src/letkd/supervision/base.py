"""A supervision: fitted to the teacher offline, it gives per-pixel labels p_T online."""

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from letkd.functional import pixels
from letkd.supervision.fitted import Fitted
from letkd.supervision.labels import Labels, Rows


class Supervision(Fitted):
    """Per-pixel labels from a teacher: `p_T(f_T, y)`, available once fitted."""

    reads: ClassVar[str] = ""  # what follows the site's role in the name of the teacher's role
    reads_classes: ClassVar[bool] = False  # whether p_T depends on the image's class
    unlabelled: str = "skip"  # "teacher": labels that depend on the class take the teacher's prediction if there is no other

    def num_labels(self) -> int:
        """How many labels p_T has: the number of templates the student needs."""
        raise NotImplementedError

    def label_settings(self) -> dict[str, object]:
        """What, besides the fitted buffers and the teacher's map, the labels depend on: part of a cache's fingerprint."""
        return {}

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        """The labels of every pixel: non-negative, one in sum over K."""
        raise NotImplementedError

    def labels(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Labels:
        """The same labels, pixels as rows, in the form that takes least: the fused loss reads them."""
        return Rows(pixels(self.p_T(f_T, y)))

    def label_table(self) -> Float[Tensor, "M K"] | None:
        """The rows that all labels are taken from, if there is such a table: a cache then keeps only their numbers."""
        return None
