"""Networks of the evidence study that are not in the zoo."""

from torch import nn

from letkd.models.resnet import ResNet


def resnet8_wider(num_classes: int) -> nn.Module:
    """ResNet-8 enlarged to the parameters of a ResNet-8 with a KD layer of K = 512: 22, 22, 44, 88 channels, not 16, 16, 32, 64."""
    return ResNet(1, (22, 22, 44, 88), num_classes=num_classes)
