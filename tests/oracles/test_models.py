"""Networks against their definition, written out over the state dict in float64: what is added, shuffled and activated where."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.models import create_model


class State:
    """A state dict that computes: convolutions find their padding and groups in the weights, BN is spelt out."""

    def __init__(self, model: nn.Module):
        self.state = model.state_dict()

    def __contains__(self, key: str) -> bool:
        return key in self.state

    def conv(self, x: Tensor, key: str, stride: int = 1) -> Tensor:
        weight, bias = self.state[f"{key}.weight"], self.state.get(f"{key}.bias")
        return F.conv2d(x, weight, bias, stride, weight.shape[2] // 2, groups=x.shape[1] // weight.shape[1])

    def bn(self, x: Tensor, key: str) -> Tensor:
        weight, bias, mean, var = (
            self.state[f"{key}.{name}"].view(-1, 1, 1) for name in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    def conv_bn(self, x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
        return self.bn(self.conv(x, conv, stride), bn)

    def linear(self, x: Tensor, key: str) -> Tensor:
        return x.mean(dim=(2, 3)) @ self.state[f"{key}.weight"].T + self.state[f"{key}.bias"]

    def blocks(self, path: str, key: str) -> list[tuple[str, bool]]:
        """The blocks under a path that have a key, and whether each is the first."""
        found = []
        while f"{path}.{len(found)}.{key}" in self.state:
            found.append((f"{path}.{len(found)}", not found))
        return found


def dealt(x: Tensor, groups: int) -> Tensor:
    """Channel j of group i goes to place j · groups + i."""
    d = x.shape[1] // groups
    return torch.stack([x[:, i * d + j] for j in range(d) for i in range(groups)], dim=1)


def resnet(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "conv1", "bn1").relu()
    for i, stride in ((1, 1), (2, 2), (3, 2)):
        for key, first in s.blocks(f"layer{i}", "conv1.weight"):
            here = stride if first else 1
            z = s.conv_bn(y, f"{key}.conv1", f"{key}.bn1", here).relu()
            z = s.conv_bn(z, f"{key}.conv2", f"{key}.bn2")
            if f"{key}.downsample.0.weight" in s:
                y = s.conv_bn(y, f"{key}.downsample.0", f"{key}.downsample.1", here)
            y = (y + z).relu()
    return s.linear(y, "fc")


def bottlenecks(s: State, x: Tensor, shortcut: str, linear: str, strides: tuple[int, ...]) -> Tensor:
    y = s.conv_bn(x, "conv1", "bn1").relu()
    for i, stride in enumerate(strides, start=1):
        for key, first in s.blocks(f"layer{i}", "conv1.weight"):
            here = stride if first else 1
            z = s.conv_bn(y, f"{key}.conv1", f"{key}.bn1").relu()
            z = s.conv_bn(z, f"{key}.conv2", f"{key}.bn2", here).relu()
            z = s.conv_bn(z, f"{key}.conv3", f"{key}.bn3")
            y = (z + (s.conv_bn(y, f"{key}.{shortcut}.0", f"{key}.{shortcut}.1", here) if first else y)).relu()
    return s.linear(y, linear)


def resnet29(s: State, x: Tensor) -> Tensor:
    return bottlenecks(s, x, "downsample", "fc", (1, 2, 2))


def resnet50_cifar(s: State, x: Tensor) -> Tensor:
    return bottlenecks(s, x, "shortcut", "linear", (1, 2, 2, 2))


def resnet20_a(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "conv1", "bn1").relu()
    for i, stride in ((1, 1), (2, 2), (3, 2)):
        for key, first in s.blocks(f"layer{i}", "conv1.weight"):
            z = s.conv_bn(y, f"{key}.conv1", f"{key}.bn1", stride if first else 1).relu()
            z = s.conv_bn(z, f"{key}.conv2", f"{key}.bn2")
            if z.shape != y.shape:
                small = y[:, :, ::2, ::2]
                zeros = torch.zeros_like(small[:, : small.shape[1] // 2])
                y = torch.cat((zeros, small, zeros), dim=1)
            y = (y + z).relu()
    return s.linear(y, "linear")


def wrn(s: State, x: Tensor) -> Tensor:
    y = s.conv(x, "conv1")
    for i, stride in ((1, 1), (2, 2), (3, 2)):
        for key, first in s.blocks(f"block{i}.layer", "conv1.weight"):
            here = stride if first else 1
            active = s.bn(y, f"{key}.bn1").relu()
            z = s.conv_bn(active, f"{key}.conv1", f"{key}.bn2", here).relu()
            z = s.conv(z, f"{key}.conv2")
            y = z + (s.conv(active, f"{key}.convShortcut", here) if f"{key}.convShortcut.weight" in s else y)
    return s.linear(s.bn(y, "bn1").relu(), "fc")


def vgg(s: State, x: Tensor) -> Tensor:
    for i in range(5):
        j = 0
        while f"block{i}.{j}.weight" in s:
            x = s.conv_bn(x, f"block{i}.{j}", f"block{i}.{j + 1}").relu()
            j += 3
        if i < 3:
            x = F.max_pool2d(x, 2)
    return s.linear(x, "classifier")


def shufflenet_v1(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "conv1", "bn1").relu()
    for i in (1, 2, 3):
        for key, first in s.blocks(f"layer{i}", "conv1.weight"):
            z = s.conv_bn(y, f"{key}.conv1", f"{key}.bn1").relu()
            z = z if key == "layer1.0" else dealt(z, 3)
            z = s.conv_bn(z, f"{key}.conv2", f"{key}.bn2", 2 if first else 1).relu()
            z = s.conv_bn(z, f"{key}.conv3", f"{key}.bn3")
            y = (torch.cat((z, F.avg_pool2d(y, 3, 2, 1)), dim=1) if first else y + z).relu()
    return s.linear(y, "linear")


def shufflenet_v2(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "conv1", "bn1").relu()
    for i in (1, 2, 3):
        for key, first in s.blocks(f"layer{i}", "conv1.weight"):
            half = y.shape[1] // 2
            left, right, convs = (y, y, (3, 4, 5)) if first else (y[:, :half], y[:, half:], (1, 2, 3))
            if first:
                left = s.conv_bn(left, f"{key}.conv1", f"{key}.bn1", 2)
                left = s.conv_bn(left, f"{key}.conv2", f"{key}.bn2").relu()
            a, b, c = convs
            right = s.conv_bn(right, f"{key}.conv{a}", f"{key}.bn{a}").relu()
            right = s.conv_bn(right, f"{key}.conv{b}", f"{key}.bn{b}", 2 if first else 1)
            right = s.conv_bn(right, f"{key}.conv{c}", f"{key}.bn{c}").relu()
            y = dealt(torch.cat((left, right), dim=1), 2)
    return s.linear(s.conv_bn(y, "conv2", "bn2").relu(), "linear")


def mobilenetv2_half(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "conv1.0", "conv1.1", 2).relu()
    for i, stride in enumerate((1, 1, 2, 2, 1, 2, 1)):
        for key, first in s.blocks(f"blocks.{i}", "conv.0.weight"):
            z = s.conv_bn(y, f"{key}.conv.0", f"{key}.conv.1").relu()
            z = s.conv_bn(z, f"{key}.conv.3", f"{key}.conv.4", stride if first else 1).relu()
            z = s.conv_bn(z, f"{key}.conv.6", f"{key}.conv.7")
            y = z if z.shape != y.shape else y + z
    return s.linear(s.conv_bn(y, "conv2.0", "conv2.1").relu(), "classifier.0")


def mobilenetv1(s: State, x: Tensor) -> Tensor:
    y = s.conv_bn(x, "model.0.0", "model.0.1", 2).relu()
    for i in range(1, 14):
        y = s.conv_bn(y, f"model.{i}.0", f"model.{i}.1", 2 if i in (2, 4, 6, 12) else 1).relu()
        y = s.conv_bn(y, f"model.{i}.3", f"model.{i}.4").relu()
    return s.linear(y, "fc")


def mobilenetv2(s: State, x: Tensor) -> Tensor:
    def relu6(y: Tensor) -> Tensor:
        return y.clamp(0, 6)

    y = relu6(s.conv_bn(x, "features.0.0", "features.0.1", 2))
    for i in range(1, 18):
        key, z, k = f"features.{i}.conv", y, 0
        if i > 1:
            z, k = relu6(s.conv_bn(z, f"{key}.0.0", f"{key}.0.1")), 1
        z = relu6(s.conv_bn(z, f"{key}.{k}.0", f"{key}.{k}.1", 2 if i in (2, 4, 7, 14) else 1))
        z = s.conv_bn(z, f"{key}.{k + 1}", f"{key}.{k + 2}")
        y = z if z.shape != y.shape else y + z
    return s.linear(relu6(s.conv_bn(y, "features.18.0", "features.18.1")), "classifier.1")


DEFINITIONS = {
    "resnet14": resnet,
    "resnet8x4": resnet,
    "resnet14_tiny": resnet,
    "resnet29": resnet29,
    "resnet50_cifar": resnet50_cifar,
    "resnet20_a": resnet20_a,
    "wrn_16_1": wrn,
    "wrn_16_2": wrn,
    "vgg8": vgg,
    "vgg11": vgg,
    "shufflenet_v1": shufflenet_v1,
    "shufflenet_v2": shufflenet_v2,
    "mobilenetv2_half": mobilenetv2_half,
    "mobilenetv1": mobilenetv1,
    "mobilenetv2": mobilenetv2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_network_computes_its_definition(name):
    model = create_model(name, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.momentum = None  # take the statistics as they are: with others the signal fades from layer to layer
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    model = model.double()
    x = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        model.eval()
        got, expected = model(x), DEFINITIONS[name](State(model), x)
    assert torch.allclose(got, expected, rtol=1e-8, atol=1e-8)
    assert (got[0] - got[1]).abs().max() > 1e-3
