"""K and τ of the K-means labels chosen from the data: `K = "auto"` and `tau = "auto"`."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from letkd.errors import FitError

PER_CLASS = 41  # the paper's 4096 centres for 100 classes
PIXELS_PER_CENTRE = 64  # with fewer, some centres have almost no pixels


def auto_K(pixels: int, C: int) -> tuple[int, str]:
    """K for these numbers of pixels and classes, and the reason as text.

    K = min(2^round(log2(41 C)), 2^floor(log2(pixels / 64))), at least 2: the paper's 4096 centres for 100 classes, scaled
    to the number of classes, and at least 64 pixels per centre.
    """
    by_pixels = 2 ** max(1, math.floor(math.log2(max(2, pixels / PIXELS_PER_CENTRE))))
    if C < 1:
        return by_pixels, f"{pixels:,} pixels, at least {PIXELS_PER_CENTRE} per centre"
    by_class = 2 ** round(math.log2(PER_CLASS * C))
    if by_class <= by_pixels:
        return by_class, f"{PER_CLASS} per class for {C} classes, as in the paper, rounded to a power of two"
    return by_pixels, (f"{pixels:,} pixels, at least {PIXELS_PER_CENTRE} per centre; {C} classes alone would give {by_class:,}")


def mean_perplexity(d: Float[Tensor, "n K"], tau: float) -> float:
    """Mean over pixels of exp(H(p_T)), p_T = softmax(−τ d): the effective number of labels per pixel, from 1 to K."""
    total = 0.0
    for rows in d.split(1024):
        shifted = tau * (rows - rows.amin(dim=1, keepdim=True)).double()
        Z = torch.exp(-shifted).sum(dim=1)
        entropy = Z.log() + (torch.exp(-shifted) * shifted).sum(dim=1) / Z  # H = log Z + τ Σ p d
        total += float(entropy.exp().sum())
    return total / len(d)


def tau_for(d: Float[Tensor, "n K"], target: float, where: str) -> float:
    """τ with `mean_perplexity(d, τ)` = target, by bisection on log τ, as in t-SNE; the perplexity decreases with τ.

    Args:
        d: squared distances from pixels to centres, up to a constant per pixel.
        where: the site, for error messages.
    """
    K = d.shape[1]
    if not 1 < target < K:
        raise FitError(
            f'tau = "auto" at {where!r} needs a mean perplexity of {target:g}, but with K={K} it must be above 1 and below {K}; '
            "choose another perplexity or K"
        )
    start = -math.log(max(float((d - d.amin(dim=1, keepdim=True)).double().mean()), 1e-30))
    low, high = start, start
    while mean_perplexity(d, math.exp(low)) < target and low > start - 60:
        low -= 2.0
    while mean_perplexity(d, math.exp(high)) > target and high < start + 60:
        high += 2.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if mean_perplexity(d, math.exp(middle)) > target else (low, middle)
    tau = math.exp((low + high) / 2)
    if abs(math.log(mean_perplexity(d, tau) / target)) > 0.05:
        raise FitError(
            f"no tau gives a mean perplexity of {target:g} at {where!r}: pixels lie on the centres, or at equal distances from them; "
            "set tau, or choose a larger K"
        )
    return tau
