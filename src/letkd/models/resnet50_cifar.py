"""ResNet-50 for small images: ImageNet's four stages of bottlenecks after a stem that keeps the size."""

from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.models.resnet import conv3x3, layer_taps, projection, stage
from letkd.models.resnet_bottleneck import BottleneckBranch
from letkd.taps import Tap

WIDTHS = (256, 512, 1024, 2048)


class ShortcutBottleneck(BottleneckBranch):
    """relu(branch(x) + shortcut(x)): a bottleneck whose shortcut is named as in the published weights."""

    conv3x3: ClassVar[str] = "conv2"
    last_relu: ClassVar[str] = "relu3"

    def __init__(self, d_in: int, d_out: int, *, expansion: int, stride: int):
        super().__init__(d_in, d_out, expansion=expansion, stride=stride)
        self.shortcut = projection(d_in, d_out, stride=stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        return self.relu3(super().forward(x) + self.shortcut(x))


class ResNet50Cifar(nn.Module):
    """ResNet-50 with a 3x3 stem of stride 1 and no max-pool, for images of at least 8x8 pixels.

    Args:
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        block = partial(ShortcutBottleneck, expansion=4)
        self.conv1 = conv3x3(3, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = stage(block, 64, WIDTHS[0], n=3, stride=1)
        self.layer2 = stage(block, WIDTHS[0], WIDTHS[1], n=4, stride=2)
        self.layer3 = stage(block, WIDTHS[1], WIDTHS[2], n=6, stride=2)
        self.layer4 = stage(block, WIDTHS[2], WIDTHS[3], n=3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[3], num_classes)
        layers = (self.layer1, self.layer2, self.layer3, self.layer4)
        self.taps = layer_taps(Tap("relu", 64, 1), layers, WIDTHS, (1, 2, 4, 8), classifier="linear")
        kaiming_fan_out(self)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu(self.bn1(self.conv1(x)))  # [b 64 H W]
        x = self.layer1(x)  # [b 256 H W]
        x = self.layer2(x)  # [b 512 H/2 W/2]
        x = self.layer3(x)  # [b 1024 H/4 W/4]
        x = self.layer4(x)  # [b 2048 H/8 W/8]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 2048]
        return self.linear(x)


@register_model
def resnet50_cifar(num_classes: int) -> ResNet50Cifar:
    """ResNet-50 for small images: 3, 4, 6 and 3 bottlenecks, 256 to 2048 channels."""
    return ResNet50Cifar(num_classes=num_classes)
