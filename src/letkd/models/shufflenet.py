"""ShuffleNets for small images: V1 (Zhang et al. 2018) with 3 groups, V2 (Ma et al. 2018) of size 1; 1x1 stems of stride 1."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from letkd.models.base import register_model
from letkd.taps import Tap

GROUPS = 3
UNITS = 4, 8, 4  # per stage


def conv1x1(d_in: int, d_out: int, *, groups: int = 1) -> nn.Conv2d:
    """1x1 convolution without bias."""
    return nn.Conv2d(d_in, d_out, 1, groups=groups, bias=False)


def depthwise(d: int, *, stride: int) -> nn.Conv2d:
    """Depthwise 3x3 convolution without bias."""
    return nn.Conv2d(d, d, 3, stride=stride, padding=1, groups=d, bias=False)


def shuffle(x: Float[Tensor, "b d h w"], groups: int) -> Float[Tensor, "b d h w"]:
    """Reorder the channels: the first of every group, then the second of every group, and so on."""
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _taps(stem: str, widths: tuple[int, int, int], *, penultimate: Tap) -> dict[str, Tap]:
    """The role table; stage i has stride 2^i."""
    taps = {"stem": Tap(stem, 24, 1)}
    for i, (n, width) in enumerate(zip(UNITS, widths, strict=True), start=1):
        taps[f"stage{i}"] = Tap(f"layer{i}", width, 2**i)
        taps[f"stage{i}.preact"] = Tap(f"layer{i}.{n - 1}.relu3", width, 2**i, io="input")
    return taps | {
        "intermediate": Tap("layer3.0", widths[2], 8),
        "penultimate": penultimate,
        "pooled": Tap("linear", io="input"),
        "logits": Tap("linear"),
    }


class Unit1(nn.Module):
    """V1: relu(BN(1x1(relu(BN(depthwise(shuffle(relu(BN(1x1(x))))))))) + x), the 1x1 in groups.

    With stride 2 the average-pooled input is not added but concatenated after the other channels.

    Args:
        d_in: input channels.
        d_out: output channels.
        groups: of the first 1x1 and of the shuffle.
        stride: 1 or 2.
    """

    def __init__(self, d_in: int, d_out: int, *, groups: int, stride: int):
        super().__init__()
        self.groups = groups
        self.shortcut = None if stride == 1 else nn.AvgPool2d(3, stride=stride, padding=1)
        d = d_out if stride == 1 else d_out - d_in
        self.conv1 = conv1x1(d_in, d // 4, groups=groups)
        self.bn1 = nn.BatchNorm2d(d // 4)
        self.relu1 = nn.ReLU()
        self.conv2 = depthwise(d // 4, stride=stride)
        self.bn2 = nn.BatchNorm2d(d // 4)
        self.relu2 = nn.ReLU()
        self.conv3 = conv1x1(d // 4, d, groups=GROUPS)
        self.bn3 = nn.BatchNorm2d(d)
        self.relu3 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        y = shuffle(self.relu1(self.bn1(self.conv1(x))), self.groups)
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu3(y + x if self.shortcut is None else torch.cat((y, self.shortcut(x)), dim=1))


class ShuffleNetV1(nn.Module):
    """ShuffleNetV1 with 3 groups for images of at least 8x8 pixels.

    Args:
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = conv1x1(3, 24)
        self.bn1 = nn.BatchNorm2d(24)
        self.relu = nn.ReLU()
        self.layer1 = _stage1(24, 240, n=UNITS[0], groups=1)  # 24 channels are too few for groups
        self.layer2 = _stage1(240, 480, n=UNITS[1], groups=GROUPS)
        self.layer3 = _stage1(480, 960, n=UNITS[2], groups=GROUPS)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(960, num_classes)
        self.taps = _taps("relu", (240, 480, 960), penultimate=Tap("layer3", 960, 8))

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu(self.bn1(self.conv1(x)))  # [b 24 H W]
        x = self.layer1(x)  # [b 240 H/2 W/2]
        x = self.layer2(x)  # [b 480 H/4 W/4]
        x = self.layer3(x)  # [b 960 H/8 W/8]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 960]
        return self.linear(x)


def _stage1(d_in: int, d_out: int, *, n: int, groups: int) -> nn.Sequential:
    first = Unit1(d_in, d_out, groups=groups, stride=2)
    return nn.Sequential(first, *(Unit1(d_out, d_out, groups=GROUPS, stride=1) for _ in range(n - 1)))


class SecondHalfReLU(nn.Module):
    """ReLU on the second half of the channels; a separate module, so that the whole map before it can be read."""

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        kept, new = x.chunk(2, dim=1)
        return torch.cat((kept, new.relu()), dim=1)


class Unit2(nn.Module):
    """V2: keeps the first half of the channels, passes the second through 1x1, depthwise and 1x1, then shuffles both."""

    def __init__(self, d: int):
        super().__init__()
        self.conv1 = conv1x1(d // 2, d // 2)
        self.bn1 = nn.BatchNorm2d(d // 2)
        self.relu1 = nn.ReLU()
        self.conv2 = depthwise(d // 2, stride=1)
        self.bn2 = nn.BatchNorm2d(d // 2)
        self.conv3 = conv1x1(d // 2, d // 2)
        self.bn3 = nn.BatchNorm2d(d // 2)
        self.relu3 = SecondHalfReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        kept, y = x.chunk(2, dim=1)
        y = self.relu1(self.bn1(self.conv1(y)))
        y = self.bn2(self.conv2(y))
        y = self.bn3(self.conv3(y))
        return shuffle(self.relu3(torch.cat((kept, y), dim=1)), groups=2)


class DownUnit2(nn.Module):
    """V2, stride 2: both halves are computed from the whole input, the first by depthwise and 1x1, the second as in `Unit2`."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        d = d_out // 2
        self.conv1 = depthwise(d_in, stride=2)
        self.bn1 = nn.BatchNorm2d(d_in)
        self.conv2 = conv1x1(d_in, d)
        self.bn2 = nn.BatchNorm2d(d)
        self.relu2 = nn.ReLU()
        self.conv3 = conv1x1(d_in, d)
        self.bn3 = nn.BatchNorm2d(d)
        self.relu3 = nn.ReLU()
        self.conv4 = depthwise(d, stride=2)
        self.bn4 = nn.BatchNorm2d(d)
        self.conv5 = conv1x1(d, d)
        self.bn5 = nn.BatchNorm2d(d)
        self.relu5 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d_out h_out w_out"]:
        left = self.bn1(self.conv1(x))
        left = self.relu2(self.bn2(self.conv2(left)))
        right = self.relu3(self.bn3(self.conv3(x)))
        right = self.bn4(self.conv4(right))
        right = self.relu5(self.bn5(self.conv5(right)))
        return shuffle(torch.cat((left, right), dim=1), groups=2)


class ShuffleNetV2(nn.Module):
    """ShuffleNetV2 of size 1 for images of at least 8x8 pixels.

    A stage's map before its activation is not yet shuffled, and half of it has passed the activations of earlier units.

    Args:
        num_classes: number of logits.
    """

    input_size = (3, 32, 32)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = conv1x1(3, 24)
        self.bn1 = nn.BatchNorm2d(24)
        self.relu1 = nn.ReLU()
        self.layer1 = _stage2(24, 116, n=UNITS[0])
        self.layer2 = _stage2(116, 232, n=UNITS[1])
        self.layer3 = _stage2(232, 464, n=UNITS[2])
        self.conv2 = conv1x1(464, 1024)
        self.bn2 = nn.BatchNorm2d(1024)
        self.relu2 = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(1024, num_classes)
        self.taps = _taps("relu1", (116, 232, 464), penultimate=Tap("relu2", 1024, 8))

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b C"]:
        x = self.relu1(self.bn1(self.conv1(x)))  # [b 24 H W]
        x = self.layer1(x)  # [b 116 H/2 W/2]
        x = self.layer2(x)  # [b 232 H/4 W/4]
        x = self.layer3(x)  # [b 464 H/8 W/8]
        x = self.relu2(self.bn2(self.conv2(x)))  # [b 1024 H/8 W/8]
        x = torch.flatten(self.pool(x), start_dim=1)  # [b 1024]
        return self.linear(x)


def _stage2(d_in: int, d_out: int, *, n: int) -> nn.Sequential:
    return nn.Sequential(DownUnit2(d_in, d_out), *(Unit2(d_out) for _ in range(n - 1)))


@register_model
def shufflenet_v1(num_classes: int) -> ShuffleNetV1:
    """ShuffleNetV1 with 3 groups: 4, 8 and 4 units, 240, 480 and 960 channels."""
    return ShuffleNetV1(num_classes=num_classes)


@register_model
def shufflenet_v2(num_classes: int) -> ShuffleNetV2:
    """ShuffleNetV2 of size 1: 4, 8 and 4 units, 116, 232 and 464 channels, then 1024."""
    return ShuffleNetV2(num_classes=num_classes)
