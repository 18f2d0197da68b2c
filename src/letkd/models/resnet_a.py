"""CIFAR ResNets as in He et al. 2016: shortcuts without parameters ("option A")."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.models.resnet import WIDTHS, BasicBlock, conv3x3, layer_taps, stage
from letkd.taps import Tap


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, padded with channels of zeros, half of them before and half after the input's."""

    def __init__(self, d_in: int, d_out: int, *, stride: int):
        super().__init__()
        self.pad = (d_out - d_in) // 2
        self.stride = stride

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.pad, self.pad))


class PaddedBlock(BasicBlock):
    """A basic block whose shortcut is `PadShortcut` if the shape changes."""

    def __init__(self, d_in: int, d_out: int, *, stride: int):
        super().__init__(d_in, d_out, stride=stride)
        if stride != 1 or d_in != d_out:
            self.downsample = PadShortcut(d_in, d_out, stride=stride)


class ResNetA(nn.Module):
    """CIFAR ResNet of depth 6n+2 with shortcuts that have no parameters, for images of at least 8x8 pixels.

    Args:
        n: blocks in each of the three stages, which have strides 1, 2 and 2.
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, n: int, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = conv3x3(3, WIDTHS[0])
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = stage(PaddedBlock, WIDTHS[0], WIDTHS[1], n=n, stride=1)
        self.layer2 = stage(PaddedBlock, WIDTHS[1], WIDTHS[2], n=n, stride=2)
        self.layer3 = stage(PaddedBlock, WIDTHS[2], WIDTHS[3], n=n, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[3], num_classes)
        layers = (self.layer1, self.layer2, self.layer3)
        self.taps = layer_taps(Tap("relu", WIDTHS[0], 1), layers, WIDTHS[1:], (1, 2, 4), classifier="linear")
        kaiming_fan_out(self)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu(self.bn1(self.conv1(x)))  # [b 16 H W]
        x = self.layer1(x)  # [b 16 H W]
        x = self.layer2(x)  # [b 32 H/2 W/2]
        x = self.layer3(x)  # [b 64 H/4 W/4]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 64]
        return self.linear(x)


@register_model
def resnet20_a(num_classes: int) -> ResNetA:
    """ResNet-20 with shortcuts without parameters: 3 blocks per stage."""
    return ResNetA(3, num_classes=num_classes)


@register_model
def resnet32_a(num_classes: int) -> ResNetA:
    """ResNet-32 with shortcuts without parameters: 5 blocks per stage."""
    return ResNetA(5, num_classes=num_classes)


@register_model
def resnet44_a(num_classes: int) -> ResNetA:
    """ResNet-44 with shortcuts without parameters: 7 blocks per stage."""
    return ResNetA(7, num_classes=num_classes)


@register_model
def resnet56_a(num_classes: int) -> ResNetA:
    """ResNet-56 with shortcuts without parameters: 9 blocks per stage."""
    return ResNetA(9, num_classes=num_classes)


@register_model
def resnet110_a(num_classes: int) -> ResNetA:
    """ResNet-110 with shortcuts without parameters: 18 blocks per stage."""
    return ResNetA(18, num_classes=num_classes)
