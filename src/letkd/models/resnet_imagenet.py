"""ResNets for ImageNet (He et al. 2016), stride on the bottleneck's 3x3; weights are named as in torchvision."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.models.resnet import BasicBlock, Block, layer_taps, stage
from letkd.models.resnet_bottleneck import Bottleneck
from letkd.taps import Tap

Four = tuple[int, int, int, int]

WIDTHS: Four = (64, 128, 256, 512)
WIDTHS_BOTTLENECK: Four = (256, 512, 1024, 2048)


class ImageNetResNet(nn.Module):
    """ResNet with four stages after a 7x7 stem and a max-pool, for images of at least 32x32 pixels.

    Args:
        ns: blocks in each stage; the stages have strides 1, 2, 2 and 2 after the stem's 4.
        widths: channels of the stages.
        block: builds a block, called as `block(d_in, d_out, stride=stride)`.
        num_classes: number of logits.
    """

    input_size = (3, 224, 224)

    def __init__(self, ns: Four, widths: Four, *, block: Block, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, 64, widths[0], n=ns[0], stride=1)
        self.layer2 = stage(block, widths[0], widths[1], n=ns[1], stride=2)
        self.layer3 = stage(block, widths[1], widths[2], n=ns[2], stride=2)
        self.layer4 = stage(block, widths[2], widths[3], n=ns[3], stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], num_classes)
        layers = (self.layer1, self.layer2, self.layer3, self.layer4)
        self.taps = layer_taps(Tap("maxpool", 64, 4), layers, widths, (4, 8, 16, 32), classifier="fc")
        kaiming_fan_out(self)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu(self.bn1(self.conv1(x)))  # [b 64 H/2 W/2]
        x = self.maxpool(x)  # [b 64 H/4 W/4]
        x = self.layer1(x)  # [b d1 H/4 W/4]
        x = self.layer2(x)  # [b d2 H/8 W/8]
        x = self.layer3(x)  # [b d3 H/16 W/16]
        x = self.layer4(x)  # [b d4 H/32 W/32]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b d4]
        return self.fc(x)


@register_model
def resnet18(num_classes: int) -> ImageNetResNet:
    """ResNet-18 for ImageNet: 2 basic blocks per stage, 64 to 512 channels."""
    return ImageNetResNet((2, 2, 2, 2), WIDTHS, block=BasicBlock, num_classes=num_classes)


@register_model
def resnet34(num_classes: int) -> ImageNetResNet:
    """ResNet-34 for ImageNet: 3, 4, 6 and 3 basic blocks, 64 to 512 channels."""
    return ImageNetResNet((3, 4, 6, 3), WIDTHS, block=BasicBlock, num_classes=num_classes)


@register_model
def resnet50(num_classes: int) -> ImageNetResNet:
    """ResNet-50 for ImageNet: 3, 4, 6 and 3 bottlenecks, 256 to 2048 channels."""
    block = partial(Bottleneck, expansion=4)
    return ImageNetResNet((3, 4, 6, 3), WIDTHS_BOTTLENECK, block=block, num_classes=num_classes)
