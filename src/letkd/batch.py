"""One step's data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from letkd.errors import DataError


@dataclass
class Batch:
    """Images `x [b 3 H W]`, labels `y [b]`, dataset indices `index [b]` where they are known, `epoch` counted from 1.

    `view` says which of its fixed views a loader shows, where it shows such (see `letkd.cache`). `second` holds the same images in a
    second view, shaped as `x`, for methods that compare two (MLKD).
    """

    x: Tensor
    y: Tensor
    index: Tensor | None = None
    epoch: int = 1
    view: int | None = None
    second: Tensor | None = None

    @classmethod
    def of(cls, item: Any) -> "Batch":
        """A batch from what loaders usually yield: a `Batch`, `(x, y)` or `(x, y, index)`.

        Examples:
            >>> Batch.of((torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))).epoch
            1
        """
        if isinstance(item, Batch):
            return item
        if isinstance(item, Sequence) and len(item) in (2, 3) and all(isinstance(part, Tensor) for part in item):
            return cls(*item)
        raise DataError(
            f"a loader must yield (x, y), (x, y, index) or letkd.Batch, with tensors inside; it gave a {type(item).__name__}"
        )

    def to(self, device: torch.device | str) -> "Batch":
        index, second = (None if part is None else part.to(device) for part in (self.index, self.second))
        return replace(self, x=self.x.to(device), y=self.y.to(device), index=index, second=second)
