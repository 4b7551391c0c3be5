"""The models of ddp_images.py and horovod_images.py: a small CNN and a ResNet-18."""

from __future__ import annotations

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Return a layer; GroupNorm, because the averages of BatchNorm would differ between ranks."""
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU()]


def cnn(channels: int, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a network of three convolutions."""
    layers = [*convolution(channels, width), *convolution(width, 2 * width), nn.MaxPool2d(2)]
    layers += [*convolution(2 * width, 2 * width), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(8 * width, classes))


class Residual(nn.Module):
    """Two convolutions, to whose result the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        layers = [*convolution(inputs, outputs, stride), *convolution(outputs, outputs)[:-1]]
        self.inner, self.shortcut = nn.Sequential(*layers), nn.Sequential()  # the input as it is
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride))
            self.shortcut.append(nn.GroupNorm(4, outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of both ways."""
        return nn.functional.relu(self.inner(images) + self.shortcut(images))


def resnet18(channels: int, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a ResNet-18 for small images (its first layer keeps their size); usual width 64."""
    layers, inputs = convolution(channels, width), width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Residual(inputs, width << stage, stride))
            inputs = width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


MODELS = {"cnn": cnn, "resnet18": resnet18}
