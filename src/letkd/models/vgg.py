"""VGG with BN (Simonyan and Zisserman 2015) for small images: five blocks of 3x3 convolutions, one linear layer."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out, small_normal
from letkd.taps import Tap

Depths = tuple[int, int, int, int, int]


class VGG(nn.Module):
    """VGG for images of at least 8x8 pixels.

    A max-pool follows the first three blocks, and the fourth only if the image is 64 pixels high, so that the last maps are 4x4 for
    images of 32x32 and of 64x64. Their stride is therefore not in the role table. The last ReLU of each block is outside of it.

    Args:
        depths: convolutions in each block; the blocks have 64, 128, 256, 512 and 512 channels.
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, depths: Depths, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.block0 = _block(3, 64, n=depths[0])
        self.relu0 = nn.ReLU()
        self.pool0 = nn.MaxPool2d(2)
        self.block1 = _block(64, 128, n=depths[1])
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.block2 = _block(128, 256, n=depths[2])
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.block3 = _block(256, 512, n=depths[3])
        self.relu3 = nn.ReLU()
        self.pool3 = nn.MaxPool2d(2)
        self.block4 = _block(512, 512, n=depths[4])
        self.relu4 = nn.ReLU()
        self.pool4 = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, num_classes)
        self.taps = _taps(depths[4])
        kaiming_fan_out(self)
        small_normal(self.classifier)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        small = x.shape[2] != 64
        x = self.relu0(self.block0(x))  # [b 64 H W]
        x = self.relu1(self.block1(self.pool0(x)))  # [b 128 H/2 W/2]
        x = self.relu2(self.block2(self.pool1(x)))  # [b 256 H/4 W/4]
        x = self.relu3(self.block3(self.pool2(x)))  # [b 512 H/8 W/8]
        x = self.relu4(self.block4(x if small else self.pool3(x)))
        x = torch.flatten(self.pool4(x), start_dim=1)  # [b 512]
        return self.classifier(x)


def _block(d_in: int, d_out: int, *, n: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(n):
        layers += [nn.Conv2d(d_in if i == 0 else d_out, d_out, 3, padding=1), nn.BatchNorm2d(d_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _taps(n: int) -> dict[str, Tap]:
    taps = {"stem": Tap("relu0", 64, 1)}
    for i, width, stride in ((1, 128, 2), (2, 256, 4), (3, 512, 8), (4, 512, None)):
        taps[f"stage{i}"] = Tap(f"relu{i}", width, stride)
        taps[f"stage{i}.preact"] = Tap(f"relu{i}", width, stride, io="input")
    return taps | {
        "intermediate": Tap("block4.2" if n > 1 else "relu4", 512),
        "intermediate.conv3x3": Tap("block4.0", 512),
        "penultimate": Tap("relu4", 512),
        "penultimate.conv3x3": Tap(f"block4.{3 * (n - 1)}", 512),
        "pooled": Tap("classifier", io="input"),
        "logits": Tap("classifier"),
    }


@register_model
def vgg8(num_classes: int) -> VGG:
    """VGG-8 with BN: 1 convolution per block."""
    return VGG((1, 1, 1, 1, 1), num_classes=num_classes)


@register_model
def vgg11(num_classes: int) -> VGG:
    """VGG-11 with BN: 1, 1, 2, 2 and 2 convolutions."""
    return VGG((1, 1, 2, 2, 2), num_classes=num_classes)


@register_model
def vgg13(num_classes: int) -> VGG:
    """VGG-13 with BN: 2 convolutions per block."""
    return VGG((2, 2, 2, 2, 2), num_classes=num_classes)


@register_model
def vgg16(num_classes: int) -> VGG:
    """VGG-16 with BN: 2, 2, 3, 3 and 3 convolutions."""
    return VGG((2, 2, 3, 3, 3), num_classes=num_classes)


@register_model
def vgg19(num_classes: int) -> VGG:
    """VGG-19 with BN: 2, 2, 4, 4 and 4 convolutions."""
    return VGG((2, 2, 4, 4, 4), num_classes=num_classes)
