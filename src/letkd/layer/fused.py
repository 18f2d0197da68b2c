"""The KD layer and its loss over chunks of pixels: no tensor of K channels is stored, so they need a fraction of the memory.

`layer.KDLayer` and `functional.pixel_kl` are the readable definition, with which this module is tested. For the same labels the results
are equal within rounding. K-means labels below 1e-7 of a pixel's largest are dropped beforehand, which changes the KL by less than
1e-4 (measured; docs/deviations.md, D48). Everything else is exact because of three facts. Pixels are rows x_i of unit length, templates
w_k are rows of W, and scores are a = x Wᵀ:

1. Batch statistics of a linear map follow from those of its input. With m = mean(x) and S = cov(x)

       mean(a_k) = w_kᵀ m        var(a_k) = w_kᵀ S w_k        BN(a_k) = A_k a_k + B_k

   so BN needs no pass over a. Only tensors of K·d and d·d are left, which autograd handles.
2. KL(p_T ‖ softmax(a)) = Σ_k p_T log p_T − x_iᵀ Σ_k p_T w_k + log Z_i, where log Z_i = log Σ_k exp a_{k|i} depends only
   on x: the layer computes it anyway, and labels are needed only in the mixture Σ_k p_T w_k.
3. ν applied to p / ‖p‖ equals ν applied to p, divided by ‖p‖.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.nn.functional import all_reduce

from letkd.distributed.processes import is_distributed
from letkd.distributed.sync_bn import Synced
from letkd.errors import DataError
from letkd.functional import pixels, unit
from letkd.layer.lanes import Sum, mm


def kd_layer(
    x: Float[Tensor, "b d h w"],
    omega: Float[Tensor, "K d 1 1"],
    bn: nn.BatchNorm2d | nn.SyncBatchNorm,
    nu: Float[Tensor, "d K 1 1"],
    *,
    alpha: float,
    normalize: bool,
) -> tuple[Float[Tensor, "b d h w"], Float[Tensor, "n"]]:
    """x̂ of the KD layer, and log Z of its scores for the loss.

    Args:
        omega, nu: kernels of unit length times their scale.
        bn: its statistics are used and updated as in its own forward pass: over this process, or over all if it is synchronised.
        alpha: α of the residual sum; if it is 0, only log Z is computed.
        normalize: whether p is scaled to unit length before ν.
    """
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        rows, W = unit_rows(x), full_precision(omega).flatten(1)
        if alpha == 0:
            return x, _log_Z(rows, W, dtype)
        A, B = bn_affine(bn, rows, W)
        v, log_Z = _Match.apply(rows, W, A, B, full_precision(nu).flatten(1), normalize, dtype)
        b, d, h, w = x.shape
        return x + alpha * v.view(b, h, w, d).permute(0, 3, 1, 2).to(x.dtype), log_Z


def log_partition(x: Float[Tensor, "b d h w"], omega: Float[Tensor, "K d 1 1"]) -> Float[Tensor, "n"]:
    """log Z_i = log Σ_k exp a_{k|i} of every pixel."""
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return _log_Z(unit_rows(x), full_precision(omega).flatten(1), dtype)


def _log_Z(x: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
    none = W.new_empty(0)
    return _Match.apply(x, W, none, none, W.new_empty(0, len(W)), False, dtype)[1]


def unit_rows(x: Float[Tensor, "b d h w"]) -> Float[Tensor, "n d"]:
    """Every pixel as a row of unit length, at least in single precision."""
    return unit(pixels(full_precision(x)))


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of products with K columns: autocast's if it is on and the device supports it, otherwise single or double."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and (kind != "cpu" or _cpu_has_bf16())
    return torch.get_autocast_dtype(kind) if cast else torch.promote_types(x.dtype, torch.float32)


def _cpu_has_bf16() -> bool:
    """Whether products in bf16 are fast here; some builds of torch, such as those for Macs, lack the library that knows."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bn_affine(
    bn: nn.BatchNorm2d | nn.SyncBatchNorm, x: Float[Tensor, "n d"], W: Float[Tensor, "K d"]
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """A and B of BN(a) = A a + B for a = x Wᵀ; in training the running statistics of `bn` are updated."""
    if not bn.training and bn.running_mean is not None and bn.running_var is not None:
        mean, var = bn.running_mean, bn.running_var
    else:
        m, S, n = _moments(x, of_all=isinstance(bn, Synced | nn.SyncBatchNorm))
        mean, var = W @ m, ((W @ S) * W).sum(dim=1).clamp_min(0)
        _track(bn, mean.detach(), var.detach() * (n / (n - 1)))
    A = bn.weight * torch.rsqrt(var + bn.eps)
    return A, bn.bias - mean * A


def _moments(x: Tensor, *, of_all: bool) -> tuple[Tensor, Tensor, Tensor | float]:
    """Mean [d], covariance [d d] (divided by n) and number n of the rows, of this process or of all."""
    total = x.sum(dim=0)
    if of_all and is_distributed():
        sums = all_reduce(torch.cat([total, total.new_tensor([len(x)])]))
        n = sums[-1].detach()  # stays on the device; at least one pixel per process
        m = sums[:-1] / n
        return m, all_reduce((x - m).T @ (x - m)) / n, n
    n = float(len(x))
    if n < 2:
        raise DataError(
            f"batch normalisation needs at least two pixels in training but got {n:.0f}; use a larger batch, or eval()"
        )
    m = total / n
    return m, (x - m).T @ (x - m) / n, n


def _track(bn: nn.BatchNorm2d | nn.SyncBatchNorm, mean: Tensor, var: Tensor) -> None:
    if bn.running_mean is None or bn.running_var is None or bn.num_batches_tracked is None:
        return
    bn.num_batches_tracked.add_(1)
    share = 1 / float(bn.num_batches_tracked) if bn.momentum is None else bn.momentum
    bn.running_mean.lerp_(mean.to(bn.running_mean.dtype), share)
    bn.running_var.lerp_(var.to(bn.running_var.dtype), share)


def full_precision(t: Tensor) -> Tensor:
    """The tensor at least in single precision."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _chunk(x: Tensor, K: int) -> int:
    """Rows per chunk: on a CPU a chunk of scores fits into the cache; on other devices it is large enough to keep them busy."""
    return max(1, min(len(x), (3 * 2**19 if x.device.type == "cpu" else 2**25) // K))


LOG2_E = math.log2(math.e)


class _Match(torch.autograd.Function):
    """v = ν(relu(A a + B)) and log Z of a = x Wᵀ; the backward pass recomputes a, chunk by chunk.

    With u = relu(A a + B), r = ‖u‖, v = V u / r, and g, g_Z the gradients of v and log Z:

        du = (Vᵀ g − u (vᵀ g) / r) / r, where u > 0        da = A du + softmax(a) g_Z
        dx = da W        dW = daᵀ x        dA = Σ du a        dB = Σ du        dV = Σ g uᵀ / r

    Without normalisation, r = 1 and there is no term with vᵀ g. If V has no rows, only log Z is computed. Scores are stored in
    base 2, as a2 = a log₂ e, because 2^a2 is faster than exp a; A2 is A for such scores.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, A: Tensor, B: Tensor, V: Tensor, normalize: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        n, K, chunk = len(x), len(W), _chunk(x, len(W))
        x_, W2, V_ = x.to(dtype), (W * LOG2_E).to(dtype), V.to(dtype)
        v, r, log_Z = x.new_empty(n, len(V)), x.new_ones(n), x.new_empty(n)
        A2 = A / LOG2_E
        scores, values = x.new_empty(chunk, K), x.new_empty(chunk, K)  # allocated once: no page faults in the loop
        for s in _slices(n, chunk):
            m = s.stop - s.start
            a2 = mm(x_[s], W2.T, scores[:m])
            top = a2.amax(dim=1)
            u = torch.sub(a2, top[:, None], out=values[:m]).exp2_()
            log_Z[s] = u.sum(dim=1).log2_().add_(top).div_(LOG2_E)
            if len(V):
                torch.addcmul(B, a2, A2, out=u).relu_()
                if normalize:
                    length = u.norm(dim=1)
                    r[s] = torch.where(length > 0, length, torch.inf)  # a pixel that matches no template
                mm(u.to(dtype), V_.T, v[s])
        v /= r[:, None]
        ctx.save_for_backward(x, W, A, B, V, v, r, log_Z)
        ctx.normalize, ctx.dtype = normalize, dtype
        ctx.set_materialize_grads(False)
        return v, log_Z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gv, gZ = grad_outputs
        x, W, A, B, V, v, r, log_Z = ctx.saved_tensors
        dtype, n, K, chunk = ctx.dtype, len(x), len(W), _chunk(x, len(W))
        x_, W_, W2, V_ = x.to(dtype), W.to(dtype), (W * LOG2_E).to(dtype), V.to(dtype)
        log2_Z, A2 = LOG2_E * log_Z, A / LOG2_E
        g = torch.zeros_like(v) if gv is None else gv / r[:, None]
        along, g_ = (-(g * v).sum(dim=1) / r)[:, None], g.to(dtype)
        dx, dWt, dA, dB, dV = torch.empty_like(x), *(Sum(t) for t in (W.T, A, B, V))
        scores, values, slopes = (x.new_empty(chunk, K) for _ in range(3))
        for s in _slices(n, chunk):
            m = s.stop - s.start
            a2, da = mm(x_[s], W2.T, scores[:m]), slopes[:m]
            if len(V) and gv is not None:
                u = torch.addcmul(B, a2, A2, out=values[:m]).relu_()
                dV.add_product(g_[s], u.to(dtype))
                mm(g_[s], V_, da)
                if ctx.normalize:
                    da.addcmul_(u, along[s])
                torch.ops.aten.threshold_backward.grad_input(da, u, 0, grad_input=da)
                dB.add_rows(da)
                dA.add_rows(torch.mul(da, a2, out=u))
                da.mul_(A)
            else:
                da.zero_()
            if gZ is not None:
                da.addcmul_(a2.sub_(log2_Z[s, None]).exp2_(), gZ[s, None])
            mm(da.to(dtype), W_, dx[s])
            dWt.add_product(x_[s], da.to(dtype))
        if gv is None:  # v is not part of the loss: zeros would let weight decay act on β, γ and ν
            return dx, dWt.total().T, None, None, None, None, None
        return dx, dWt.total().T, dA.total() / LOG2_E, dB.total(), dV.total(), None, None


def _slices(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]
