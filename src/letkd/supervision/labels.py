"""Compact forms of p_T. The loss needs only two things from it: a mixture of templates and an entropy."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from letkd.layer.fused import full_precision, unit_rows


@dataclass(frozen=True)
class Rows:
    """p_T itself, a row per pixel; used if K is small or the labels are broad."""

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
    """The largest entries of p_T, pixel after pixel: those of pixel i begin at `start[i]` and sum to one."""

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

    def count(self) -> Int[Tensor, "n"]:
        """Number of entries per pixel."""
        return torch.cat([self.start[1:], self.start.new_tensor([len(self.index)])]) - self.start

    def _pixel(self) -> Int[Tensor, "e"]:
        return torch.repeat_interleave(self.count())


@dataclass(frozen=True)
class Table:
    """p_T as rows of a table that pixels share: pixel i has row `at[i]`."""

    rows: Float[Tensor, "M K"]
    at: Int[Tensor, "n"]

    def mix(self, W: Float[Tensor, "K d"]) -> Float[Tensor, "n d"]:
        """Σ_k p_T(i)_k w_k for every pixel i: one product with the table, for any number of pixels."""
        return F.embedding(self.at, self.rows.to(W.dtype) @ W)

    def negative_entropy(self) -> Float[Tensor, "n"]:
        """Σ_k p_T(i)_k log p_T(i)_k."""
        return torch.xlogy(self.rows, self.rows).sum(dim=1)[self.at]

    def dense(self) -> Float[Tensor, "n K"]:
        return self.rows[self.at]


Labels = Rows | Entries | Table


def as_maps(labels: Labels, size: tuple[int, int]) -> Float[Tensor, "b K h w"]:
    """All of p_T as maps of height and width `size`."""
    return labels.dense().unflatten(0, (-1, *size)).permute(0, 3, 1, 2)


def largest_labels(labels: Labels, least: float) -> Entries:
    """The labels above `least` times their pixel's largest, scaled to sum to one again."""
    if isinstance(labels, Entries):
        n, K, pixel, index, prob = len(labels.start), labels.K, labels._pixel(), labels.index, labels.prob
        peak = prob.new_zeros(n).scatter_reduce_(0, pixel, prob, "amax")
        kept = prob > least * peak[pixel]
        pixel, index, prob = pixel[kept], index[kept], prob[kept]
    else:
        p = labels.dense()
        n, K = p.shape
        pixel, index = (p > least * p.amax(dim=1, keepdim=True)).nonzero(as_tuple=True)
        prob = p[pixel, index]
    count = torch.bincount(pixel, minlength=n)
    prob = prob / prob.new_zeros(n).index_add_(0, pixel, prob)[pixel]
    return Entries(index, prob, count.cumsum(dim=0) - count, K)


def label_kl(
    labels: Labels,
    x: Float[Tensor, "b d h w"],
    omega: Float[Tensor, "K d 1 1"],
    log_Z: Float[Tensor, "n"],
    images: Int[Tensor, "m"] | None = None,
) -> Float[Tensor, ""]:
    """KL(p_T ‖ softmax(a)), averaged over all pixels of the batch; the same value as `functional.pixel_kl`.

        1/n Σ_i (Σ_k p_T(i)_k log p_T(i)_k − x_iᵀ Σ_k p_T(i)_k w_k + log Z_i)

    Args:
        x: the student's map, as the templates see it.
        omega: kernels of unit length times their scale.
        log_Z: log Σ_k exp a_{k|i} of every pixel, from `letkd.layer.fused`.
        images: positions of the images to average over; default: all.
    """
    with torch.autocast(x.device.type, enabled=False):
        matched = (unit_rows(x) * labels.mix(full_precision(omega).flatten(1))).sum(dim=1)
        kl = labels.negative_entropy().to(matched.dtype) - matched + log_Z
        return (kl if images is None or len(images) == len(x) else kl.unflatten(0, (len(x), -1))[images]).mean()
