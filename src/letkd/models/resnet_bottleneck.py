"""CIFAR ResNets with bottlenecks of expansion 2: depth 9n+2, three stages (RN29 and RN83 of the paper's Table 3)."""

from functools import partial
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.resnet import ResNet, Widths, conv3x3, projection

WIDTHS: Widths = (16, 32, 64, 128)


class BottleneckBranch(nn.Module):
    """BN(1x1(relu(BN(3x3(relu(BN(1x1(x)))))))): what a bottleneck adds to its shortcut.

    Args:
        d_in: input channels.
        d_out: output channels.
        expansion: output channels over the channels of the 3x3 convolution.
        stride: of the 3x3 convolution.
    """

    def __init__(self, d_in: int, d_out: int, *, expansion: int, stride: int):
        super().__init__()
        d = d_out // expansion
        self.conv1 = nn.Conv2d(d_in, d, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(d)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(d, d, stride=stride)
        self.bn2 = nn.BatchNorm2d(d)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(d, d_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(d_out)

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        return self.bn3(self.conv3(y))


class Bottleneck(BottleneckBranch):
    """relu(branch(x) + downsample(x)); the sum can be read as the input of `relu3`."""

    conv3x3: ClassVar[str] = "conv2"
    last_relu: ClassVar[str] = "relu3"

    def __init__(self, d_in: int, d_out: int, *, expansion: int, stride: int):
        super().__init__(d_in, d_out, expansion=expansion, stride=stride)
        self.downsample = projection(d_in, d_out, stride=stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        return self.relu3(super().forward(x) + self.downsample(x))


@register_model
def resnet29(num_classes: int) -> ResNet:
    """ResNet-29: 3 bottlenecks per stage, 32, 64 and 128 channels, half as many inside."""
    return ResNet(3, WIDTHS, block=partial(Bottleneck, expansion=2), num_classes=num_classes)


@register_model
def resnet83(num_classes: int) -> ResNet:
    """ResNet-83: 9 bottlenecks per stage, 32, 64 and 128 channels, half as many inside."""
    return ResNet(9, WIDTHS, block=partial(Bottleneck, expansion=2), num_classes=num_classes)
