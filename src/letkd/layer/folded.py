"""Folding: what is constant after training is computed once, not in every forward pass."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import ExportedProgram

from letkd.functional import unit
from letkd.layer.kd_layer import KDLayer
from letkd.modules import copied
from letkd.taps import replace_module
from letkd.taps.fold_bn import fold_bn


class FoldedKDLayer(nn.Module):
    """A trained `KDLayer` in eval mode, in which everything that is the same for all images is precomputed.

        p_i = relu(ω x_i / ‖x_i‖ + β)        x̂_i = x_i + ν p_i / ‖p_i‖ + b

    ω are the unit kernels times their scale times BN's γ/σ, β is the shift of BN, and ν are the unit kernels times their scale times α.
    The division by ‖p_i‖ follows the product, on d channels instead of K. b is 0 unless templates are pruned.

    Args:
        d: channels of the map.
        K: number of templates.
        normalize_value_input: whether x' is divided by ‖p_i‖, as in `KDLayer`.

    The state consists of four buffers. BN is constant, so the layer is for inference only.
    """

    omega: Tensor
    beta: Tensor
    nu: Tensor
    bias: Tensor

    def __init__(self, d: int, K: int, *, normalize_value_input: bool = True):
        super().__init__()
        self.normalize_value_input = normalize_value_input
        self.register_buffer("omega", torch.zeros(K, d, 1, 1))
        self.register_buffer("beta", torch.zeros(K))
        self.register_buffer("nu", torch.zeros(d, K, 1, 1))
        self.register_buffer("bias", torch.zeros(d))

    def match(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b K h w"]:
        """p: how well each pixel matches each template; 0 below the template's threshold."""
        return F.conv2d((x * per_length(x)).to(x.dtype), self.omega, self.beta).relu_()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        p = self.match(x)
        x_prime = F.conv2d(p, self.nu)
        if self.normalize_value_input:
            x_prime = (x_prime * per_length(p)).to(x.dtype)
        return x + (x_prime + self.bias[:, None, None])

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, from which the layer can be rebuilt."""
        K, d = self.omega.shape[:2]
        return {"d": d, "K": K, "normalize_value_input": self.normalize_value_input}

    def extra_repr(self) -> str:
        K, d = self.omega.shape[:2]
        return f"{d}, {K}, normalize_value_input={self.normalize_value_input}"


def per_length(x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b 1 h w"]:
    """1 / ‖x_i‖ of every pixel, with ‖x_i‖ bounded from below as in `F.normalize`; at least in single precision.

    Not `torch.linalg.norm`, which is six to ten times slower over the channels of a map on a CPU.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x * x).sum(dim=1, keepdim=True).clamp_min(1e-24).rsqrt()


@torch.no_grad()
def fold_layer(layer: KDLayer) -> FoldedKDLayer:
    """The same function from x to x̂ as `layer.eval()`, computed in float64 and stored in the layer's own type.

    In float64 the two agree to 1e-10, in float32 to about 1e-6 of the largest value.
    """
    K, d = layer.omega.weight.shape[:2]
    omega, nu, bn = layer.omega, layer.nu, layer.bn
    if bn.running_mean is None or bn.running_var is None:
        raise TypeError("the BN of a KD layer must have running statistics, but this one has none")
    gain = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()  # [K]
    folded = FoldedKDLayer(d, K, normalize_value_input=nu.normalize_input).to(omega.weight)
    folded.omega.copy_(gain[:, None, None, None] * omega.scale.double() * unit(omega.weight.double()))
    folded.beta.copy_(bn.bias.double() - gain * bn.running_mean.double())
    folded.nu.copy_(layer.alpha * nu.scale.double() * unit(nu.weight.double()))
    return folded.eval()


def fold_student(student: nn.Module) -> nn.Module:
    """A copy of a student, in eval mode, with every `KDLayer` folded; layers with α = 0 have no effect and are removed."""
    student = copied(student).eval()
    for path, module in list(student.named_modules()):
        if isinstance(module, KDLayer):
            replace_module(student, path, fold_layer(module) if module.alpha else nn.Identity())
    return student


def fold_batch_norms(model: nn.Module, program: ExportedProgram) -> int:
    """Fold every BN that is the only reader of a convolution into that convolution, in place; return their number.

    Args:
        model: in eval mode.
        program: `torch.export` of this model. Its graph shows what reads each output, so nothing is guessed from the order of
            modules; a BN that is followed by a grafted layer is kept.
    """
    parameters = program.graph_signature.inputs_to_parameters
    pairs = [pair for node in program.graph.nodes if (pair := _conv_and_bn(node, parameters))]
    return sum(fold_bn(model, conv_path, bn_path) for conv_path, bn_path in pairs)


def _conv_and_bn(node: Any, parameters: Mapping[str, str]) -> tuple[str, str] | None:
    """Module paths of the convolution and the BN that is its only reader; neither may share its weights with another module."""
    if node.target is not torch.ops.aten.batch_norm.default:
        return None
    conv, gamma = node.args[0], node.args[1]
    if getattr(conv, "target", None) is not torch.ops.aten.conv2d.default or len(conv.users) != 1:
        return None
    kernel = conv.args[1]
    names = [parameters.get(getattr(part, "name", "")) for part in (kernel, gamma)]
    if None in names or len(kernel.users) != 1 or len(gamma.users) != 1:
        return None
    conv_path, bn_path = (str(name).rpartition(".")[0] for name in names)
    return conv_path, bn_path
