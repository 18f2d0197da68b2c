"""CIFAR ResNets: post-activation basic blocks, three stages (He et al. 2016, section 4.2, with 1x1 shortcuts)."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.taps import Tap

Block = Callable[..., nn.Module]
Widths = tuple[int, int, int, int]

WIDTHS: Widths = (16, 16, 32, 64)
WIDTHS_X4: Widths = (32, 64, 128, 256)
WIDTHS_TINY: Widths = (8, 8, 16, 32)


def conv3x3(d_in: int, d_out: int, *, stride: int = 1) -> nn.Conv2d:
    """3x3 convolution without bias that keeps the map's size at stride 1."""
    return nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1, bias=False)


def projection(d_in: int, d_out: int, *, stride: int) -> nn.Module:
    """Shortcut of a block: 1x1 convolution and BN if the shape changes, else the identity."""
    if stride == 1 and d_in == d_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(d_in, d_out, 1, stride=stride, bias=False), nn.BatchNorm2d(d_out))


class BasicBlock(nn.Module):
    """relu(BN(3x3(relu(BN(3x3(x))))) + shortcut(x)).

    The two ReLUs are separate modules, neither in place: the sum before the last one can be read as the input of `relu2`.

    Args:
        d_in: input channels.
        d_out: output channels.
        stride: of the first convolution and of the shortcut.
    """

    conv3x3: ClassVar[str] = "conv1"
    last_relu: ClassVar[str] = "relu2"

    def __init__(self, d_in: int, d_out: int, *, stride: int):
        super().__init__()
        self.conv1 = conv3x3(d_in, d_out, stride=stride)
        self.bn1 = nn.BatchNorm2d(d_out)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(d_out, d_out)
        self.bn2 = nn.BatchNorm2d(d_out)
        self.downsample = projection(d_in, d_out, stride=stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.downsample(x))


def stage(block: Block, d_in: int, d_out: int, *, n: int, stride: int) -> nn.Sequential:
    """`n` blocks; the first changes width and size."""
    return nn.Sequential(block(d_in, d_out, stride=stride), *(block(d_out, d_out, stride=1) for _ in range(n - 1)))


def layer_taps(
    stem: Tap, layers: Sequence[nn.Sequential], widths: Sequence[int], strides: Sequence[int], *, classifier: str
) -> dict[str, Tap]:
    """Role table of a network whose stages `layer1`, `layer2`, … are sequences of residual blocks that end in a ReLU.

    Args:
        stem: the input of the first stage.
        layers: the stages; `last_relu` and `conv3x3` of a block are the names of its last ReLU and its 3x3 convolution.
        widths: channels of each stage.
        strides: of each stage, over the input of the network.
        classifier: path of the last linear layer.
    """
    taps = {"stem": stem}
    for i, (layer, width, stride) in enumerate(zip(layers, widths, strides, strict=True), start=1):
        last: Any = layer[-1]
        taps[f"stage{i}"] = Tap(f"layer{i}", width, stride)
        taps[f"stage{i}.preact"] = Tap(f"layer{i}.{len(layer) - 1}.{last.last_relu}", width, stride, io="input")
    path, last = f"layer{len(layers)}", layers[-1][-1]
    width, stride, d = widths[-1], strides[-1], last.get_submodule(last.conv3x3).out_channels
    return taps | {
        "intermediate": Tap(f"{path}.0", width, stride),
        "intermediate.conv3x3": Tap(f"{path}.0.{last.conv3x3}", d, stride),
        "penultimate": Tap(path, width, stride),
        "penultimate.conv3x3": Tap(f"{path}.{len(layers[-1]) - 1}.{last.conv3x3}", d, stride),
        "pooled": Tap(classifier, io="input"),
        "logits": Tap(classifier),
    }


class ResNet(nn.Module):
    """CIFAR ResNet, with basic blocks of depth 6n+2, for images of at least 8x8 pixels.

    Args:
        n: blocks in each of the three stages, which have strides 1, 2 and 2.
        widths: channels of the stem and of the stages.
        block: builds a block, called as `block(d_in, d_out, stride=stride)`.
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, n: int, widths: Widths, *, block: Block = BasicBlock, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = conv3x3(3, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.layer1 = stage(block, widths[0], widths[1], n=n, stride=1)
        self.layer2 = stage(block, widths[1], widths[2], n=n, stride=2)
        self.layer3 = stage(block, widths[2], widths[3], n=n, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], num_classes)
        layers = (self.layer1, self.layer2, self.layer3)
        self.taps = layer_taps(Tap("relu", widths[0], 1), layers, widths[1:], (1, 2, 4), classifier="fc")
        kaiming_fan_out(self)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu(self.bn1(self.conv1(x)))  # [b d0 H W]
        x = self.layer1(x)  # [b d1 H W]
        x = self.layer2(x)  # [b d2 H/2 W/2]
        x = self.layer3(x)  # [b d3 H/4 W/4]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b d3]
        return self.fc(x)


@register_model
def resnet8(num_classes: int) -> ResNet:
    """ResNet-8: 1 block per stage, 16, 32 and 64 channels."""
    return ResNet(1, WIDTHS, num_classes=num_classes)


@register_model
def resnet14(num_classes: int) -> ResNet:
    """ResNet-14: 2 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(2, WIDTHS, num_classes=num_classes)


@register_model
def resnet20(num_classes: int) -> ResNet:
    """ResNet-20: 3 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(3, WIDTHS, num_classes=num_classes)


@register_model
def resnet32(num_classes: int) -> ResNet:
    """ResNet-32: 5 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(5, WIDTHS, num_classes=num_classes)


@register_model
def resnet44(num_classes: int) -> ResNet:
    """ResNet-44: 7 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(7, WIDTHS, num_classes=num_classes)


@register_model
def resnet56(num_classes: int) -> ResNet:
    """ResNet-56: 9 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(9, WIDTHS, num_classes=num_classes)


@register_model
def resnet110(num_classes: int) -> ResNet:
    """ResNet-110: 18 blocks per stage, 16, 32 and 64 channels."""
    return ResNet(18, WIDTHS, num_classes=num_classes)


@register_model
def resnet8x4(num_classes: int) -> ResNet:
    """ResNet-8 with 64, 128 and 256 channels after a stem of 32."""
    return ResNet(1, WIDTHS_X4, num_classes=num_classes)


@register_model
def resnet32x4(num_classes: int) -> ResNet:
    """ResNet-32 with 64, 128 and 256 channels after a stem of 32."""
    return ResNet(5, WIDTHS_X4, num_classes=num_classes)


@register_model
def resnet8_tiny(num_classes: int) -> ResNet:
    """ResNet-8 with 8, 16 and 32 channels, for the demo and tests."""
    return ResNet(1, WIDTHS_TINY, num_classes=num_classes)


@register_model
def resnet14_tiny(num_classes: int) -> ResNet:
    """ResNet-14 with 8, 16 and 32 channels, for the demo and tests."""
    return ResNet(2, WIDTHS_TINY, num_classes=num_classes)
