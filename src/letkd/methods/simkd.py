"""SimKD: reproduce the teacher's last map and apply the teacher's own classifier to it (Chen et al. 2022)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.errors import UnsupportedPair
from letkd.functional import fit_spatially
from letkd.limits import Count
from letkd.methods.base import Method, Side, View
from letkd.taps import Tap, find_module


def simkd_loss(f_S: Float[Tensor, "b d h w"], f_T: Float[Tensor, "b d H W"]) -> Float[Tensor, ""]:
    """1/(b·d·n) Σ (f_S − f_T)², f_S being the projected student map; the larger map is average-pooled first, to n pixels."""
    dtype = torch.promote_types(f_S.dtype, torch.float32)
    return F.mse_loss(*fit_spatially(f_S.to(dtype), f_T.to(dtype)))


class Projector(nn.Module):
    """From the student's last map to the teacher's channels: 1x1-BN-ReLU, 3x3-BN-ReLU, 1x1-BN-ReLU, without biases.

    Args:
        d_S, d_T: input and output channels.
        f: the two inner maps have d_T / f channels. The authors use 2.
        size: height and width to which the map is average-pooled first, if the teacher's map is smaller.
    """

    def __init__(self, d_S: int, d_T: int, *, f: int = 2, size: tuple[int, int] | None = None):
        super().__init__()
        if not 1 <= f <= d_T:
            raise UnsupportedPair(f"SimKD's projector cannot have d_T / f = {d_T} / {f} channels; f must be from 1 to {d_T}")
        self.d_S, self.d_T, self.f, self.size = d_S, d_T, f, size
        self.transfer = nn.Sequential(
            *_conv_bn_relu(d_S, d_T // f, 1), *_conv_bn_relu(d_T // f, d_T // f, 3), *_conv_bn_relu(d_T // f, d_T, 1)
        )

    def forward(self, x: Float[Tensor, "b d_S h w"]) -> Float[Tensor, "b d_T H W"]:
        if self.size is not None:  # never enlarges a map, at any image size
            x = F.adaptive_avg_pool2d(x, (min(self.size[0], x.shape[-2]), min(self.size[1], x.shape[-1])))
        return self.transfer(x)

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, from which the layer can be rebuilt."""
        return {"d_S": self.d_S, "d_T": self.d_T, "f": self.f, "size": self.size}


def _conv_bn_relu(d_in: int, d_out: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(d_in, d_out, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(d_out), nn.ReLU()]


class FrozenLinear(nn.Linear):
    """A classifier that is copied from a teacher and is not trained."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        self.requires_grad_(False)

    @classmethod
    def copy_of(cls, linear: nn.Linear, order: tuple[int, ...] | None = None) -> "FrozenLinear":
        """A copy of the weights, with the classes reordered if `order` is given."""
        copy = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        copy.load_state_dict({name: value[list(order or range(len(value)))] for name, value in linear.state_dict().items()})
        return copy

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, from which the layer can be rebuilt."""
        return {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}


class SimKD(Method):
    """`simkd_loss` at the last map. The student gets a projector after that map, and a frozen copy of the teacher's classifier.

    Args:
        f: factor by which the projector's inner maps have fewer channels. The authors use 2.

    Both stay in the student, so that it predicts as SimKD does. Another method that reads after the projector gets the projected
    map. Term: `simkd`. The authors use this term alone: the weight of `ce` is 0.
    """

    name: ClassVar[str] = "simkd"
    paper: ClassVar[str] = "Chen et al., 2022"
    loss: ClassVar[str] = "mean squared error between the projected student's and the teacher's last map"
    formulae: ClassVar = (simkd_loss,)

    def __init__(self, f: Count = 2):
        super().__init__()
        self.f = f

    def build(self, student: Side, teacher: Side) -> None:
        (d_S, *size_S), (d_T, *size_T) = (side.map_shape("penultimate") for side in (student, teacher))
        _classifier(student, d_S)
        classifier = FrozenLinear.copy_of(_classifier(teacher, d_T), teacher.order)
        size = (min(size_S[0], size_T[0]), min(size_S[1], size_T[1]))
        projector = Projector(d_S, d_T, f=self.f, size=None if [*size] == size_S else size)
        path = student.graft(projector, "penultimate", "kd_projector")
        student.replace("pooled", classifier)
        self.reads.student["penultimate.projected"] = Tap(path, channels=d_T)
        self.reads.teacher["penultimate"] = teacher.taps["penultimate"]

    def terms(self, view: View) -> dict[str, Tensor]:
        return {self.name: simkd_loss(view.student["penultimate.projected"], view.teacher["penultimate"])}


def _classifier(side: Side, d: int) -> nn.Linear:
    side.shape("pooled")
    module, sizes = find_module(side.model, path := side.taps["pooled"].path), ""
    if isinstance(module, nn.Linear):
        if type(module) in (nn.Linear, FrozenLinear) and (module.in_features, module.out_features) == (d, side.num_classes):
            return module
        sizes = f" from {module.in_features} to {module.out_features}"
    raise UnsupportedPair(
        "SimKD replaces the student's classifier with the teacher's, so each must be a plain nn.Linear from the pooled last map "
        f"to the classes, in the {side.who} {type(side.model).__name__} from {d} to {side.num_classes}; but the "
        f"module of the role 'pooled', {path!r}, is a {type(module).__name__}{sizes}"
    )
