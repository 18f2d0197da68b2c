"""The learnable KD layer: templates that the teacher supervises, semantic vectors that belong to the student (section 4.1, Fig. 2)."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.functional import pixels, unit
from letkd.layer import fused


def soft_match(a: Float[Tensor, "b K *i"], *, mu: float = 0.0, epsilon: float = 1.0) -> Float[Tensor, "b K *i"]:
    """Assign each pixel to the templates it matches, or to none: the solution of (A.2).

        p_{k|i} = exp(ε a_{k|i}) / (exp(ε μ) + Σ_k' exp(ε a_{k'|i}))                               (A.3)

    q = 1 − Σ_k p_{k|i} ≥ 0 is the share of "no template matches". As ε grows, p tends to the arg-max of (A.1): one-hot at the best
    template, or zero everywhere if every a is below μ.

    Args:
        a: matching scores, templates along dimension 1.
        mu: threshold μ; lower scores do not count as a match.
        epsilon: smoothness ε; the larger it is, the harder the assignment.

    `KDLayer` does not use this function: its BN-ReLU learns the threshold from batch statistics (appendix).

    Examples:
        Two templates at two pixels. The first pixel matches template 0; the second matches none, so its weights sum to almost 0:

        >>> a = torch.tensor([[[3.0, -4.0], [0.0, -4.0]]])  # [b K i]
        >>> soft_match(a).round(decimals=2)
        tensor([[[0.9100, 0.0200],
                 [0.0500, 0.0200]]])
    """
    null = torch.full_like(a[:, :1], mu)
    return torch.softmax(epsilon * torch.cat([a, null], dim=1), dim=1)[:, :-1]  # (A.3)


class CosineConv1x1(nn.Module):
    """Normalised 1x1 convolution: kernels of unit length times one learnable scale (supplement, "Formulation of 1x1 convolution").

        a_k = s · (w_k / ‖w_k‖)ᵀ (x_i / ‖x_i‖)

    Args:
        in_channels: length of a kernel.
        out_channels: number of kernels.
        scale: initial value of s. The authors use 3.0 for the templates and 1.0 for the semantic vectors.
        normalize_input: whether pixels are scaled to unit length as well, so that the output is a scaled cosine.

    There is no bias. The initial length of the kernels cancels in the forward pass, but determines how far an optimiser step rotates them.

    Examples:
        >>> conv = CosineConv1x1(8, 5, scale=3.0)
        >>> a = conv(torch.randn(2, 8, 4, 4))  # cosines times 3
        >>> a.shape, bool((a.abs() <= 3).all())
        (torch.Size([2, 5, 4, 4]), True)
    """

    def __init__(self, in_channels: int, out_channels: int, *, scale: float, normalize_input: bool = True):
        super().__init__()
        self.normalize_input = normalize_input
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, 1, 1) * (2.0 / in_channels) ** 0.5)
        self.scale = nn.Parameter(torch.tensor([float(scale)]))

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b K h w"]:
        if self.normalize_input:
            x = unit(x)  # supplement 2.2: x_i / ‖x_i‖
        return F.conv2d(x, self.kernels())

    def kernels(self) -> Float[Tensor, "K d 1 1"]:
        """The kernels in use: of unit length, times the scale."""
        return self.scale * unit(self.weight)  # supplement 2.2: s · w_k / ‖w_k‖

    def extra_repr(self) -> str:
        out_channels, in_channels = self.weight.shape[:2]
        return f"{in_channels}, {out_channels}, normalize_input={self.normalize_input}"


class KDLayer(nn.Module):
    """A residual 1x1-BN-ReLU-1x1 block that lets the student use, reshape or discard what the teacher knows (Fig. 2).

        a_{k|i} = ω_kᵀ x_i        p_{|i} ≈ BN-ReLU(a_{|i})        x'_i = Σ_k p_{k|i} ν_k        x̂_i = x_i + α x'_i

    The templates ω are supervised by the teacher's per-pixel labels through p_S = softmax(a), read before BN by a tap on the
    child `omega`; the layer itself returns x̂ and stores nothing. The semantic vectors ν learn from the student's own loss.

    Args:
        d: channels of the map.
        K: number of templates. The paper uses 4096 (penultimate) and 8 per class (intermediate).
        alpha: α of (4.1), a constant. The paper uses 1, and 0.1 to 0.5 for RN50-MNV2. At 0 the output is x itself.
        scale_omega: initial value of the learnable scale of ω. The authors use 3.0.
        scale_nu: initial value of the learnable scale of ν. The authors use 1.0.
        beta: initial value of BN's shift β of (A.4), the threshold of a match. With 0, as in PyTorch and the authors' code, a pixel
            matches about half of all templates; with −2 one in forty.
        normalize_value_input: whether p is scaled to unit length before ν. The authors' code does so; the paper's text mentions
            only the kernels. With False, x̂ depends on the strength of the match (docs/deviations.md, D3 and D4).

    `forward` is the definition. If `fused` is set, which methods do for training, `letkd.layer.fused` computes the same x̂ within rounding
    in a fraction of the memory: all of `a` is never in memory at once, and the child `log_Z` returns log Σ_k exp a_{k|i} for the loss.
    Compiled and exported models always use the definition.

    Examples:
        >>> layer = KDLayer(d=64, K=256)
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
        >>> sum(parameter.numel() for parameter in layer.parameters())  # 2dK + 2K + 2
        33282
    """

    def __init__(
        self,
        d: int,
        K: int,
        *,
        alpha: float = 1.0,
        scale_omega: float = 3.0,
        scale_nu: float = 1.0,
        beta: float = 0.0,
        normalize_value_input: bool = True,
    ):
        super().__init__()
        self.alpha, self.fused = float(alpha), False
        self.omega = CosineConv1x1(d, K, scale=scale_omega)
        self.bn = nn.BatchNorm2d(K)
        nn.init.constant_(self.bn.bias, beta)
        self.nu = CosineConv1x1(K, d, scale=scale_nu, normalize_input=normalize_value_input)
        self.log_Z = nn.Identity()  # only for taps; no weights

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        if self.fused and not torch.compiler.is_compiling():
            return self._fused(x)
        a = self.omega(x)  # section 4.1: a_{k|i} = ω_kᵀ x_i  [b K h w]
        if self.fused:  # compiled: the fused loss still reads log Z
            self.log_Z(torch.logsumexp(pixels(a).to(torch.promote_types(a.dtype, torch.float32)), dim=1))
        if self.alpha == 0:
            return x
        p = F.relu(self.bn(a))  # section 4.1; (A.4); (A.7): p_{|i} ≈ BN-ReLU(a_{|i})  [b K h w]
        x_prime = self.nu(p)  # section 4.1: x'_i = Σ_k p_{k|i} ν_k  [b d h w]
        return x + self.alpha * x_prime  # (4.1)

    def _fused(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        omega, nu = self.omega.kernels(), self.nu.kernels()
        x_hat, log_Z = fused.kd_layer(x, omega, self.bn, nu, alpha=self.alpha, normalize=self.nu.normalize_input)
        self.log_Z(log_Z)
        return x_hat

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, from which the layer can be rebuilt."""
        K, d = self.omega.weight.shape[:2]
        return {"d": d, "K": K, "alpha": self.alpha, "normalize_value_input": self.nu.normalize_input}

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"
