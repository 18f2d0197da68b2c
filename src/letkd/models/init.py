"""Initialisations of the zoo's convolutional families that differ from PyTorch's defaults."""

from torch import nn


def kaiming_fan_out(model: nn.Module) -> None:
    """Every convolution: normal with variance 2 / (kernel area · output channels), bias 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_normal(linear: nn.Linear) -> None:
    """A classifier that starts near 0: normal with standard deviation 0.01, bias 0."""
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
