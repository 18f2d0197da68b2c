"""A supervision is fitted to the teacher offline and computes per-pixel labels p_T online."""

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from letkd.functional import pixels
from letkd.supervision.fitted import Fitted
from letkd.supervision.labels import Labels, Rows


class Supervision(Fitted):
    """Per-pixel labels from a teacher: `p_T(f_T, y)`, available once fitted.

    Subclasses define `kind`, `num_labels` and `p_T`, and `partial_fit` and `finish` if they need a fit.

    Examples:
        >>> class Channels(Supervision):
        ...     kind = "channels"
        ...
        ...     def bind(self, where, *, d, C):
        ...         self.K = d
        ...
        ...     def num_labels(self):
        ...         return self.K
        ...
        ...     def p_T(self, f_T, y):
        ...         return f_T.softmax(dim=1)
    """

    reads: ClassVar[str] = ""  # suffix of the teacher's role, after the site's role
    reads_classes: ClassVar[bool] = False  # whether p_T depends on the image's class
    unlabelled: str = "skip"  # "teacher": images without a label use the class that the teacher predicts

    def num_labels(self) -> int:
        """Number of labels per pixel, which is the number of templates the student needs."""
        raise NotImplementedError

    def label_settings(self) -> dict[str, object]:
        """What the labels depend on in addition to the fitted buffers and the teacher's map: part of a cache's fingerprint."""
        return {}

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        """The labels of every pixel: non-negative, with sum 1 over K."""
        raise NotImplementedError

    def labels(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Labels:
        """The same labels with pixels as rows, in the most compact form, for the fused loss."""
        return Rows(pixels(self.p_T(f_T, y)))

    def label_table(self) -> Float[Tensor, "M K"] | None:
        """The table whose rows are the labels, if there is one: a cache then stores only row numbers."""
        return None
