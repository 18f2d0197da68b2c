"""One step's data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from letkd.errors import DataError


@dataclass
class Batch:
    """Images `x [b 3 H W]`, labels `y [b]`, dataset indices `index [b]` where they are known, `epoch` counted from 1.

    `view` says which of its fixed views a loader shows, where it shows such (see `letkd.cache`). If the images are mixed
    (`letkd.data.Mix`), `y2 [b]` are the labels of the other images and `lam` is the share of `y`, 1/2 or more.
    """

    x: Tensor
    y: Tensor
    index: Tensor | None = None
    epoch: int = 1
    view: int | None = None
    y2: Tensor | None = None
    lam: float = 1.0

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
        index = None if self.index is None else self.index.to(device)
        y2 = None if self.y2 is None else self.y2.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), index=index, y2=y2)

    def over_labels(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """A loss that reads the labels: `loss(y)`, and for mixed images λ · loss(y) + (1 − λ) · loss(y2)."""
        return loss(self.y) if self.y2 is None else self.lam * loss(self.y) + (1 - self.lam) * loss(self.y2)
