"""Wide ResNets (Zagoruyko and Komodakis 2016): pre-activation blocks, three stages, no dropout."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.models.init import kaiming_fan_out
from letkd.models.resnet import conv3x3
from letkd.taps import Tap


class PreActBlock(nn.Module):
    """x + 3x3(relu(BN(3x3(y)))) with y = relu(BN(x)); if the width changes, a 1x1 convolution of y replaces x.

    Args:
        d_in: input channels.
        d_out: output channels.
        stride: of the first convolution and of the 1x1.
    """

    def __init__(self, d_in: int, d_out: int, *, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(d_in)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(d_in, d_out, stride=stride)
        self.bn2 = nn.BatchNorm2d(d_out)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(d_out, d_out)
        self.convShortcut = nn.Conv2d(d_in, d_out, 1, stride=stride, bias=False) if d_in != d_out else None

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        y = self.relu1(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        return shortcut + self.conv2(self.relu2(self.bn2(self.conv1(y))))


class Stage(nn.Module):
    """A sequence of blocks, nested in `layer` because the published weights are named `block1.layer.0`."""

    def __init__(self, d_in: int, d_out: int, *, n: int, stride: int):
        super().__init__()
        first = PreActBlock(d_in, d_out, stride=stride)
        self.layer = nn.Sequential(first, *(PreActBlock(d_out, d_out, stride=1) for _ in range(n - 1)))

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        return self.layer(x)


class WideResNet(nn.Module):
    """WRN of depth 6n+4 for images of at least 8x8 pixels.

    A stage's output is a sum without activation; the BN after it belongs to the next stage, the last one to the network.

    Args:
        n: blocks in each of the three stages, which have strides 1, 2 and 2.
        k: the stages have 16k, 32k and 64k channels.
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, n: int, k: int, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = conv3x3(3, 16)
        self.block1 = Stage(16, 16 * k, n=n, stride=1)
        self.block2 = Stage(16 * k, 32 * k, n=n, stride=2)
        self.block3 = Stage(32 * k, 64 * k, n=n, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * k)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * k, num_classes)
        self.taps = _taps(n, k)
        kaiming_fan_out(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.conv1(x)  # [b 16 H W]
        x = self.block1(x)  # [b 16k H W]
        x = self.block2(x)  # [b 32k H/2 W/2]
        x = self.block3(x)  # [b 64k H/4 W/4]
        x = self.relu(self.bn1(x))
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 64k]
        return self.fc(x)


def _taps(n: int, k: int) -> dict[str, Tap]:
    taps = {"stem": Tap("conv1", 16, 1)}
    norms = ("block2.layer.0.bn1", "block3.layer.0.bn1", "bn1")
    for i, (norm, width, stride) in enumerate(zip(norms, (16 * k, 32 * k, 64 * k), (1, 2, 4), strict=True), start=1):
        taps[f"stage{i}"] = Tap(f"block{i}", width, stride)
        taps[f"stage{i}.preact"] = Tap(norm, width, stride)
    return taps | {
        "intermediate": Tap("block3.layer.0", 64 * k, 4),
        "intermediate.conv3x3": Tap("block3.layer.0.conv1", 64 * k, 4),
        "penultimate": Tap("relu", 64 * k, 4),
        "penultimate.conv3x3": Tap(f"block3.layer.{n - 1}.conv1", 64 * k, 4),
        "pooled": Tap("fc", io="input"),
        "logits": Tap("fc"),
    }


@register_model
def wrn_16_1(num_classes: int) -> WideResNet:
    """WRN-16-1: 2 blocks per stage, 16, 32 and 64 channels."""
    return WideResNet(2, 1, num_classes=num_classes)


@register_model
def wrn_16_2(num_classes: int) -> WideResNet:
    """WRN-16-2: 2 blocks per stage, 32, 64 and 128 channels."""
    return WideResNet(2, 2, num_classes=num_classes)


@register_model
def wrn_40_1(num_classes: int) -> WideResNet:
    """WRN-40-1: 6 blocks per stage, 16, 32 and 64 channels."""
    return WideResNet(6, 1, num_classes=num_classes)


@register_model
def wrn_40_2(num_classes: int) -> WideResNet:
    """WRN-40-2: 6 blocks per stage, 32, 64 and 128 channels."""
    return WideResNet(6, 2, num_classes=num_classes)
