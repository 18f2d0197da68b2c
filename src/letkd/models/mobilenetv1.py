"""MobileNetV1 for ImageNet (Howard et al. 2017): the network that the paper's ImageNet tables call MNV2."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.models.resnet import conv3x3
from letkd.taps import Tap

# Channels and stride of each block.
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


def separable(d_in: int, d_out: int, *, stride: int) -> nn.Sequential:
    """relu(BN(1x1(relu(BN(depthwise 3x3)))))."""
    return nn.Sequential(
        nn.Conv2d(d_in, d_in, 3, stride=stride, padding=1, groups=d_in, bias=False),
        nn.BatchNorm2d(d_in),
        nn.ReLU(),
        nn.Conv2d(d_in, d_out, 1, bias=False),
        nn.BatchNorm2d(d_out),
        nn.ReLU(),
    )


class MobileNetV1(nn.Module):
    """MobileNetV1 of width 1 for images of at least 32x32 pixels.

    A stage ends before a block that halves the map; the blocks at half the input's size count as part of the stem.

    Args:
        num_classes: number of logits.
    """

    input_size = (3, 224, 224)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        widths = [32, *(width for width, _ in BLOCKS)]
        blocks = [separable(d_in, d_out, stride=s) for d_in, (d_out, s) in zip(widths[:-1], BLOCKS, strict=True)]
        stem = nn.Sequential(conv3x3(3, 32, stride=2), nn.BatchNorm2d(32), nn.ReLU())
        self.model = nn.Sequential(stem, *blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1024, num_classes)
        self.taps = {"stem": Tap("model.0", 32, 2)}
        for i, (k, width, stride) in enumerate(((3, 128, 4), (5, 256, 8), (11, 512, 16), (13, 1024, 32)), start=1):
            self.taps[f"stage{i}"] = Tap(f"model.{k}", width, stride)
            self.taps[f"stage{i}.preact"] = Tap(f"model.{k}.4", width, stride)
        self.taps |= {
            "intermediate": Tap("model.12", 1024, 32),
            "penultimate": Tap("model", 1024, 32),
            "pooled": Tap("fc", io="input"),
            "logits": Tap("fc"),
        }
        kaiming_fan_out(self)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.model(x)  # [b 1024 H/32 W/32]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 1024]
        return self.fc(x)


@register_model
def mobilenetv1(num_classes: int) -> MobileNetV1:
    """MobileNetV1 for ImageNet: 13 depthwise separable blocks, 64 to 1024 channels."""
    return MobileNetV1(num_classes=num_classes)
