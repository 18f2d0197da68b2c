"""K-means labels: soft assignments of every pixel to the centres of the teacher's features (section 4.2.1, Alg. 1)."""

import math
from contextlib import suppress
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from letkd.distributed.processes import is_distributed
from letkd.errors import FitError
from letkd.functional import pixels
from letkd.layer.lanes import mm
from letkd.limits import LARGEST, Count, Samples, Scale, Seed
from letkd.progress import say
from letkd.supervision.auto import auto_K, mean_perplexity, tau_for
from letkd.supervision.base import Supervision
from letkd.supervision.labels import Entries, Labels
from letkd.supervision.stats import MiniBatches, Reservoir, kmeans

PERPLEXITY = 5.0  # D55
SAMPLE_BYTES = 2**32  # of the pixels that are clustered
LEAST_PER_CENTRE = 39  # pixels; with fewer, Faiss warns
ONE_HOT, UNIFORM = (
    1.1,
    0.75,
)  # limits of the perplexity, the second as a share of K, beyond which labels carry little information


def soft_assign(f: Float[Tensor, "b d h w"], rho: Float[Tensor, "K d"], tau: float) -> Float[Tensor, "b K h w"]:
    """p_T(i) = softmax_k(−τ ‖f_i − ρ_k‖²).

    ‖f_i‖² is the same for every k and cancels in the soft-max, so one product and a shift are enough.
    """
    logits = torch.einsum("bdhw,kd->bkhw", f, (2 * tau) * rho) - tau * (rho * rho).sum(dim=1)[:, None, None]
    return torch.softmax(logits, dim=1)  # section 4.2.1; Alg. 1, online: p_T = softmax(−τ d)


def largest_entries(
    f: Float[Tensor, "n d"], rho: Float[Tensor, "K d"], tau: float, *, least: float, chunk: int | None = None
) -> Entries | None:
    """p_T of `soft_assign` without its tail: the labels above `least` times the pixel's largest, scaled to sum to one.

    Rows are processed in chunks, so there is never an [n K] tensor, and labels in blocks: a block whose largest is too small is skipped.
    None if more than one label in eight would be kept, or if a pixel has none because of a NaN.
    """
    K, width = len(rho), math.isqrt(len(rho)) // 2 or 1
    chunk = chunk or (256 if f.device.type == "cpu" else max(256, 2**25 // K))  # each chunk waits for the device
    blocks = -(-K // width)
    # −τ‖f_i − ρ_k‖², up to what cancels, is one product: (f_i, 1) with (2τρ_k, −τ‖ρ_k‖²). The last block is padded with −∞.
    f, scaled = F.pad(f, (0, 1), value=1.0), torch.cat([(2 * tau) * rho, -tau * (rho * rho).sum(dim=1, keepdim=True)], dim=1)
    logits = f.new_full((min(chunk, len(f)), blocks * width), -torch.inf)
    index, weight, count = [], [], []
    for rows in f.split(chunk):
        logit = logits[: len(rows)]
        mm(rows, scaled.T, logit[:, :K])
        block = logit.view(len(rows), blocks, width)
        best = block.amax(dim=2)
        top = best.amax(dim=1, keepdim=True)
        pixel, at = (best > top + math.log(least)).nonzero(as_tuple=True)
        over = block[pixel, at] - top[pixel]  # [some width]
        which, k = (over > math.log(least)).nonzero(as_tuple=True)
        e, pixel = over[which, k].exp_(), pixel[which]
        weight.append(e / e.new_zeros(len(rows)).index_add_(0, pixel, e)[pixel])
        index.append(at[which] * width + k)
        count.append(torch.bincount(pixel, minlength=len(rows)))
        if 8 * len(k) > len(rows) * K:
            return None
    counts = torch.cat(count)
    if not bool(counts.all()):
        return None
    return Entries(torch.cat(index), torch.cat(weight), counts.cumsum(dim=0) - counts, K)


def nearest_gaps(rho: Float[Tensor, "K d"], *, chunk: int = 512) -> Float[Tensor, "K"]:
    """The squared distance from each centre to its nearest neighbour, in chunks of rows: there is never a [K K] tensor."""
    rho = rho.double()
    gaps = []
    for start in range(0, len(rho), chunk):
        gap = torch.cdist(rho[start : start + chunk], rho).square()
        gap[torch.arange(len(gap)), torch.arange(start, start + len(gap))] = torch.inf  # a centre and itself
        gaps.append(gap.min(dim=1).values)
    return torch.cat(gaps)


def _fewer(seen: int) -> int | None:
    """The largest power of two with enough pixels per centre; None if there is none."""
    return 2 ** int(math.log2(seen / LEAST_PER_CENTRE)) if seen >= 2 * LEAST_PER_CENTRE else None


class KMeansSupervision(Supervision):
    """K-means over the pixels of the teacher's maps; p_T is the soft-max of the negative squared distances (Alg. 1).

    Args:
        K: number of centres. Paper: 4096. "auto": computed from the numbers of pixels and classes by `auto_K`.
        tau: τ, multiplies the squared distances. Paper: 1 (QUEST: 5). A good value depends on the scale of the features. "auto":
            chosen by the fit, so that the mean perplexity of p_T on the fitted pixels is `perplexity`.
        perplexity: effective number of labels per pixel; for tau = "auto".
        least: labels below this share of a pixel's largest are left out of `labels`, which the fused loss reads; `p_T` contains all
            labels. The fit reports the dropped mass.
        scale_free: divide τ by the mean squared distance between nearest centres, so that it does not depend on the scale.
        pixels_per_centre: size of the random sample that is clustered, per centre, up to 4 GiB in total (then fewer, but at least 39);
            "all": all pixels, as in the authors' code.
        engine: "faiss" clusters the sample by Lloyd's algorithm; with "minibatch" every pixel of the stream updates the centres once
            (scikit-learn), in the memory of one mini-batch. The result then depends on the order of the images, and one process
            must see all of them.
        iterations: of Lloyd's algorithm. The authors use 20.
        seed: of the sample and of the initial centres.

    The centres are `rho_ [K d]`; `nearest_` is the mean squared distance from a centre to its nearest neighbour; `tau_` is
    τ, if tau = "auto".

    Examples:
        >>> f_T, y = torch.randn(4, 8, 6, 6), torch.tensor([0, 1, 0, 1])  # the teacher's maps, and labels, which K-means ignores
        >>> supervision = KMeansSupervision(K=5).fit([(f_T, y)])
        >>> supervision.rho_.shape
        torch.Size([5, 8])
        >>> p_T = supervision.p_T(f_T, y)  # [b K h w]
        >>> bool(torch.allclose(p_T.sum(dim=1), torch.ones(4, 6, 6)))
        True
    """

    kind: ClassVar[str] = "kmeans"
    fitted_buffers: ClassVar[tuple[str, ...]] = ("rho_", "nearest_")
    rho_: Tensor
    nearest_: Tensor
    tau_: Tensor

    def __init__(
        self,
        K: Count | Literal["auto"] = 4096,
        tau: Scale | Literal["auto"] = 1.0,
        *,
        perplexity: Annotated[float, Field(strict=True, ge=1.01, le=LARGEST)] = PERPLEXITY,
        least: Annotated[float, Field(strict=True, ge=1e-30, le=0.5)] = 1e-7,
        scale_free: bool = False,
        pixels_per_centre: Samples | Literal["all"] = 256,
        engine: str = "faiss",
        iterations: Count = 20,
        seed: Seed = 0,
    ):
        if tau == "auto":
            self.fitted_buffers = ("rho_", "nearest_", "tau_")  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__()
        if tau == "auto" and scale_free:
            raise FitError(
                'K-means with tau="auto" and scale_free=True: the fit already sets τ from the distances; omit scale_free'
            )
        if K != "auto" and not (isinstance(K, int) and K > 0):
            raise FitError(f'K-means with K={K!r}: K must be 1 or more, or "auto"')
        self.K = 0 if K == "auto" else K  # 0: chosen by `bind`
        self.tau = math.nan if tau == "auto" else float(tau)
        self.perplexity, self.least, self.scale_free = float(perplexity), float(least), scale_free
        self.pixels_per_centre, self.iterations, self.seed = pixels_per_centre, iterations, seed
        if engine not in ("faiss", "minibatch"):
            raise FitError(f"K-means with engine={engine!r}: choose 'faiss' or 'minibatch'")
        self.engine = engine
        self._reservoir: Reservoir | None = None
        self._minibatches: MiniBatches | None = None
        self._read: tuple[Tensor, float] | None = None  # a buffer and its value

    def bind(self, where: str, *, d: int, C: int) -> None:
        super().bind(where, d=d, C=C)
        if not self.K:
            if self.pixels is None:
                raise FitError(
                    f'K = "auto" at {where!r} needs the number of training images; pass Distiller(…, images=len(dataset)), or set K'
                )
            self.K, reason = auto_K(self.pixels, C)
            say(f"K = {self.K} at {where}: {reason}")

    def num_labels(self) -> int:
        return self.K

    def settings(self) -> dict[str, object]:
        tau: dict[str, object] = {"perplexity": self.perplexity} if math.isnan(self.tau) else {}
        if self.engine == "minibatch":
            return {"K": self.K, "engine": self.engine, "seed": self.seed, **tau}
        return {
            "K": self.K,
            "pixels_per_centre": self.pixels_per_centre,
            "iterations": self.iterations,
            "seed": self.seed,
            **tau,
        }

    def label_settings(self) -> dict[str, object]:
        tau = "auto" if math.isnan(self.tau) else self.tau
        return {"tau": tau, "least": self.least, "scale_free": self.scale_free}

    def reset(self) -> None:
        super().reset()
        self._reservoir = self._minibatches = self._read = None

    def partial_fit(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"], index: Int[Tensor, "b"] | None = None) -> None:
        self._check_map(f_T)
        if not self.K:
            raise FitError('K = "auto" works only in a Distiller, which knows the numbers of pixels and classes; set K')
        if self._reservoir is None:
            wanted = self.pixels_per_centre
            few = 4096 if self.engine == "minibatch" else None  # only for the report
            fits = SAMPLE_BYTES // (4 * f_T.shape[1])
            some = min(self.K * wanted, max(self.K * LEAST_PER_CENTRE, fits)) if isinstance(wanted, int) else 2**62
            self._reservoir = Reservoir(few or some, seed=self.seed)
            self._minibatches = MiniBatches(self.K, seed=self.seed) if few else None
        if self._minibatches is not None:
            self._minibatches.add(f_T)
        self._reservoir.add(f_T, torch.zeros(len(f_T), dtype=torch.int64), index)

    def gather(self) -> None:
        if self.engine == "minibatch" and is_distributed():
            raise FitError(
                f"K-means at {self.where!r} by mini-batches does not work in several processes; fit it in one process first (`letkd fit`)"
            )
        self._reservoir = Reservoir.of_all(self._reservoir)

    def finish(self) -> None:
        seen = 0 if self._reservoir is None else int(self._reservoir.seen.sum())
        if self._reservoir is None or seen < self.K:
            raise FitError(
                f"K-means at {self.where!r} needs at least K={self.K} pixels but got {seen}; choose a smaller K"
                f"{f', such as {few}' if (few := _fewer(seen)) else ''}, or more images"
            )
        F, _ = self._reservoir.sample()  # Alg. 1, offline: F, the teacher's pixels  [n d]
        rho = (
            kmeans(F, self.K, iterations=self.iterations, seed=self.seed)
            if self._minibatches is None
            else self._minibatches.finish()
        )  # Alg. 1, offline: ρ_k  [K d]
        self._reservoir = self._minibatches = None
        nearest = nearest_gaps(rho).mean() if self.K > 1 else torch.ones(())
        if not nearest > 0:
            raise FitError(
                f"the teacher's maps at {self.where!r} contain fewer than K={self.K} different pixels ({len(F.unique(dim=0))} of "
                f"{len(F)}); choose another tap or a smaller K"
            )
        self.rho_, self.nearest_ = rho, nearest.float()
        some = F[:: max(1, len(F) // 4096)]
        d = (rho * rho).sum(dim=1) - 2 * some @ rho.T  # squared distances minus ‖f_i‖²  [n K]
        if math.isnan(self.tau):
            self.tau_ = torch.tensor(tau_for(d, self.perplexity, self.where))
        some = some.T[None, :, None]  # [1 d 1 n]
        tau = self._tau(some)
        p_T = self.p_T(some, torch.zeros(1, dtype=torch.int64))
        peak = p_T.amax(dim=1, keepdim=True)
        kept = p_T > self.least * peak
        self.report_ = {
            "pixels seen": seen,
            "pixels clustered": seen if self.engine == "minibatch" else len(F),
            f"mean of largest label at tau {tau if math.isnan(self.tau) else self.tau:.4g}": float(peak.mean()),
            "mean perplexity": mean_perplexity(d, tau),
            f"labels per pixel above {self.least:g} of it": float(kept.sum(dim=1).double().mean()),
            "mass of the other labels": float((p_T * ~kept).sum(dim=1).mean()),
        }
        self._warn(d)

    def _warn(self, d: Float[Tensor, "n K"]) -> None:
        """Log a warning if the labels are nearly one-hot or nearly uniform, with a better τ."""
        found = self.report_["mean perplexity"]
        kind = "one-hot" if found < ONE_HOT else "uniform" if found > UNIFORM * self.K else ""
        if self.K < 2 or not kind or math.isnan(self.tau):
            return
        wanted, advice = min(PERPLEXITY, self.K / 2), ""
        with suppress(FitError):  # no τ gives this perplexity
            tau = tau_for(d[:: max(1, len(d) // 512)], wanted, self.where)
            advice = f"; tau = {tau * (self.nearest_.item() if self.scale_free else 1):.3g} would give about {wanted:g}"
        say(
            f"warning: the teacher's labels at {self.where!r} are nearly {kind}: p_T has a perplexity of {found:.3g} for K={self.K} at tau "
            f"{self.tau:g}{advice}"
        )

    def p_T(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Float[Tensor, "b K h w"]:
        tau = self._tau(f_T)
        with torch.autocast(f_T.device.type, enabled=False):  # bf16 rounding is larger than the differences between centres
            return soft_assign(f_T.to(self.rho_.dtype), self.rho_, tau)

    def labels(self, f_T: Float[Tensor, "b d h w"], y: Int[Tensor, "b"]) -> Labels:
        tau = self._tau(f_T)
        with torch.autocast(f_T.device.type, enabled=False):
            entries = largest_entries(pixels(f_T.to(self.rho_.dtype)), self.rho_, tau, least=self.least)
        return super().labels(f_T, y) if entries is None else entries

    def _tau(self, f_T: Tensor) -> float:
        self._check_fitted()
        self._check_channels(f_T, self.rho_.shape[1])
        if math.isnan(self.tau):
            return self._number(self.tau_)
        return self.tau / self._number(self.nearest_) if self.scale_free else self.tau

    def _number(self, buffer: Tensor) -> float:
        """The value of a buffer; read once, because reading waits for the device."""
        if self._read is None or self._read[0] is not buffer:
            self._read = buffer, buffer.item()
        return self._read[1]

    def extra_repr(self) -> str:
        tau = "auto" if math.isnan(self.tau) else f"{self.tau:g}"
        return f"K={self.K or 'auto'}, tau={tau}"
