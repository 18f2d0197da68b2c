"""Batches with a fixed share of unlabelled images."""

from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor

from letkd.errors import DataError


class Shares:
    """Composes the batches of an epoch from labelled and unlabelled images in a fixed ratio.

    Args:
        labels: labels of all images, −1 for those without.
        batch_size: images per batch, of both kinds.
        share: share of unlabelled images.
    """

    def __init__(self, labels: Int64[Tensor, " n"], batch_size: int, share: float):
        if not 0 <= share <= 1:
            raise DataError(f"unlabelled_share is {share:g}: the share of each batch must be from 0 to 1")
        self.has_label = labels >= 0
        self.unlabelled = (~self.has_label).nonzero().squeeze(1)
        self.others = round(share * batch_size)
        if 0 < share < 1:
            self.others = min(max(self.others, 1), batch_size - 1)
        self.labelled = batch_size - self.others
        if self.others and not len(self.unlabelled):
            raise DataError(
                f"unlabelled_share is {share:g}, and every image has a label; name images without labels with data.unlabelled=FOLDER"
            )
        if self.labelled and not self.has_label.any():
            raise DataError(f"unlabelled_share is {share:g}, and no image has a label; leave it out")

    def batches(self, *, drop_last: bool) -> int:
        """Batches per epoch: one pass over the labelled images, or over the unlabelled ones if batches have no labelled images."""
        n, of_each = (int(self.has_label.sum()), self.labelled) if self.labelled else (len(self.unlabelled), self.others)
        if drop_last and n < of_each:
            kind = "labelled" if self.labelled else "unlabelled"
            raise DataError(f"every batch needs {of_each} {kind} images, and there are {n}; choose a smaller batch_size")
        return n // of_each + (not drop_last and n % of_each > 0)

    def order(
        self, order: Int64[Tensor, " n"], first: int, batches: int, permuted: Callable[[int, int], Tensor]
    ) -> Int64[Tensor, " m"]:
        """Images of an epoch, batch after batch; both kinds are spread evenly over a batch, and therefore over processes.

        Args:
            order: all images in the order of the epoch; only the order of the labelled ones is used.
            first: number of batches before this epoch.
            permuted: `permuted(n, p)` is the order of the p-th pass over n unlabelled images.
        """
        labelled, unlabelled, parts = order[self.has_label[order]], self._drawn(first, batches, permuted), []
        for k in range(batches):
            own = labelled[k * self.labelled : (k + 1) * self.labelled]
            others = unlabelled[k * self.others : (k + 1) * self.others]
            both = torch.cat([own, others])
            position = torch.cat([(torch.arange(m) + 0.5) / max(m, 1) for m in (len(own), len(others))])
            parts.append(both[position.argsort(stable=True)])
        return torch.cat(parts) if parts else order[:0]

    def _drawn(self, first: int, batches: int, permuted: Callable[[int, int], Tensor]) -> Int64[Tensor, " m"]:
        """The unlabelled images of these batches, drawn in passes over all of them."""
        n, start, stop = len(self.unlabelled), first * self.others, (first + batches) * self.others
        if start == stop:
            return self.unlabelled[:0]
        passes = range(start // n, (stop - 1) // n + 1)
        order = torch.cat([permuted(n, p) for p in passes])
        return self.unlabelled[order[start - passes[0] * n : stop - passes[0] * n]]
