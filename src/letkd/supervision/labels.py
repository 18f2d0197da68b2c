"""p_T of all pixels without its zeros: what the loss needs of it is a mixture of templates and an entropy."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """p_T as it is, a row for every pixel: where K is small or the labels are broad."""

    p: Float[Tensor, "n K"]

    def mix(self, W: Float[Tensor, "K d"]) -> Float[Tensor, "n d"]:
        """Σ_k p_T(i)_k w_k for every pixel i."""
        return self.p.to(W.dtype) @ W

    def negative_entropy(self) -> Float[Tensor, "n"]:
        """Σ_k p_T(i)_k log p_T(i)_k."""
        return torch.xlogy(self.p, self.p).sum(dim=1)

    def dense(self) -> Float[Tensor, "n K"]:
        return self.p


@dataclass(frozen=True)
class Entries:
    """p_T by its largest entries, pixel after pixel: those of pixel i begin at `start[i]`; they sum to one."""

    index: Int[Tensor, "e"]
    prob: Float[Tensor, "e"]
    start: Int[Tensor, "n"]
    K: int

    def mix(self, W: Float[Tensor, "K d"]) -> Float[Tensor, "n d"]:
        """Σ_k p_T(i)_k w_k for every pixel i, over its entries."""
        return F.embedding_bag(self.index, W, self.start, mode="sum", per_sample_weights=self.prob.to(W.dtype))

    def negative_entropy(self) -> Float[Tensor, "n"]:
        """Σ_k p_T(i)_k log p_T(i)_k."""
        return self.prob.new_zeros(len(self.start)).index_add_(0, self._pixel(), torch.xlogy(self.prob, self.prob))

    def dense(self) -> Float[Tensor, "n K"]:
        p = self.prob.new_zeros(len(self.start), self.K)
        p[self._pixel(), self.index] = self.prob
        return p

    def _pixel(self) -> Int[Tensor, "e"]:
        end = torch.cat([self.start[1:], self.start.new_tensor([len(self.index)])])
        return torch.repeat_interleave(end - self.start)


@dataclass(frozen=True)
class Table:
    """p_T by a table of rows that many pixels share: pixel i has row `at[i]`."""

    rows: Float[Tensor, "M K"]
    at: Int[Tensor, "n"]

    def mix(self, W: Float[Tensor, "K d"]) -> Float[Tensor, "n d"]:
        """Σ_k p_T(i)_k w_k for every pixel i: one product with the table, whatever the number of pixels."""
        return F.embedding(self.at, self.rows.to(W.dtype) @ W)

    def negative_entropy(self) -> Float[Tensor, "n"]:
        """Σ_k p_T(i)_k log p_T(i)_k."""
        return torch.xlogy(self.rows, self.rows).sum(dim=1)[self.at]

    def dense(self) -> Float[Tensor, "n K"]:
        return self.rows[self.at]


Labels = Rows | Entries | Table
