"""MobileNetV2 (Sandler et al. 2018): half width for small images; width 1 for ImageNet, named as in torchvision."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out, small_normal
from letkd.models.resnet import conv3x3
from letkd.taps import Tap

# Expansion, channels, blocks and stride of the first of them.
ROWS_HALF = ((1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1))
ROWS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def depthwise(d: int, *, stride: int) -> nn.Conv2d:
    """Depthwise 3x3 convolution without bias."""
    return nn.Conv2d(d, d, 3, stride=stride, padding=1, groups=d, bias=False)


class InvertedResidual(nn.Module):
    """x + conv(x) if the shape is unchanged, else conv(x). No activation follows.

    Args:
        conv: widens the map and narrows it again.
        skip: whether to add x.
    """

    def __init__(self, conv: nn.Sequential, *, skip: bool):
        super().__init__()
        self.conv = conv
        self.skip = skip

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        return x + self.conv(x) if self.skip else self.conv(x)


class MobileNetV2Half(nn.Module):
    """MobileNetV2 of width 0.5 with ReLU, for images of at least 16x16 pixels: `mobile_half` in other code.

    The stem and three rows of blocks halve the map. Every block has the convolution that widens its input, even if the factor
    is 1.

    Args:
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Sequential(conv3x3(3, 16, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        rows, d_in = [], 16
        for t, d_out, n, stride in ROWS_HALF:
            first = _half_block(d_in, d_out, t=t, stride=stride)
            rows.append(nn.Sequential(first, *(_half_block(d_out, d_out, t=t, stride=1) for _ in range(n - 1))))
            d_in = d_out
        self.blocks = nn.Sequential(*rows)
        self.conv2 = nn.Sequential(nn.Conv2d(160, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        linear = nn.Linear(1280, num_classes)
        self.classifier = nn.Sequential(linear)
        stages = (Tap("blocks.1", 12, 2), Tap("blocks.2", 16, 4), Tap("blocks.4", 48, 8), Tap("blocks.6", 160, 16))
        self.taps = {"stem": Tap("conv1", 16, 2), **_stage_taps(*stages)} | {
            "intermediate": Tap("blocks.5.0", 80, 16),
            "penultimate": Tap("conv2", 1280, 16),
            "pooled": Tap("classifier.0", io="input"),
            "logits": Tap("classifier.0"),
        }
        kaiming_fan_out(self)
        small_normal(linear)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.conv1(x)  # [b 16 H/2 W/2]
        x = self.blocks(x)  # [b 160 H/16 W/16]
        x = self.conv2(x)  # [b 1280 H/16 W/16]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 1280]
        return self.classifier(x)


def _half_block(d_in: int, d_out: int, *, t: int, stride: int) -> InvertedResidual:
    d = d_in * t
    conv = nn.Sequential(
        nn.Conv2d(d_in, d, 1, bias=False),
        nn.BatchNorm2d(d),
        nn.ReLU(),
        depthwise(d, stride=stride),
        nn.BatchNorm2d(d),
        nn.ReLU(),
        nn.Conv2d(d, d_out, 1, bias=False),
        nn.BatchNorm2d(d_out),
    )
    return InvertedResidual(conv, skip=stride == 1 and d_in == d_out)


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1 with ReLU6, for images of at least 32x32 pixels.

    Args:
        num_classes: number of logits.

    In training a fifth of the pooled features is dropped, as in torchvision; the role `pooled` is read after this dropout.
    """

    input_size = (3, 224, 224)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        features: list[nn.Module] = [nn.Sequential(conv3x3(3, 32, stride=2), nn.BatchNorm2d(32), nn.ReLU6())]
        d_in = 32
        for t, d_out, n, stride in ROWS:
            for i in range(n):
                features.append(_block(d_in, d_out, t=t, stride=stride if i == 0 else 1))
                d_in = d_out
        features.append(nn.Sequential(nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()))
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(1)
        linear = nn.Linear(1280, num_classes)
        self.classifier = nn.Sequential(nn.Dropout(0.2), linear)
        stages = (Tap("features.3", 24, 4), Tap("features.6", 32, 8), Tap("features.13", 96, 16), Tap("features.17", 320, 32))
        self.taps = {"stem": Tap("features.0", 32, 2), **_stage_taps(*stages)} | {
            "intermediate": Tap("features.14", 160, 32),
            "penultimate": Tap("features", 1280, 32),
            "pooled": Tap("classifier.1", io="input"),
            "logits": Tap("classifier.1"),
        }
        kaiming_fan_out(self)
        small_normal(linear)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.features(x)  # [b 1280 H/32 W/32]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 1280]
        return self.classifier(x)


def _block(d_in: int, d_out: int, *, t: int, stride: int) -> InvertedResidual:
    d = d_in * t
    widen = [nn.Sequential(nn.Conv2d(d_in, d, 1, bias=False), nn.BatchNorm2d(d), nn.ReLU6())] if t != 1 else []
    conv = nn.Sequential(
        *widen,
        nn.Sequential(depthwise(d, stride=stride), nn.BatchNorm2d(d), nn.ReLU6()),
        nn.Conv2d(d, d_out, 1, bias=False),
        nn.BatchNorm2d(d_out),
    )
    return InvertedResidual(conv, skip=stride == 1 and d_in == d_out)


def _stage_taps(*stages: Tap) -> dict[str, Tap]:
    """A stage's output has no activation, so it is also its map before the activation."""
    both = {}
    for i, tap in enumerate(stages, start=1):
        both[f"stage{i}"] = both[f"stage{i}.preact"] = tap
    return both


@register_model
def mobilenetv2_half(num_classes: int) -> MobileNetV2Half:
    """MobileNetV2 of half width for small images: 8 to 160 channels, then 1280."""
    return MobileNetV2Half(num_classes=num_classes)


@register_model
def mobilenetv2(num_classes: int) -> MobileNetV2:
    """MobileNetV2 for ImageNet: 16 to 320 channels, then 1280."""
    return MobileNetV2(num_classes=num_classes)
