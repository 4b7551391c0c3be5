"""Networks for images of 8x8 to 64x64 pixels; one width scales each of them.

All take the shape of an image (channels, height, width), the number of classes, the width and the
dropout before the last layer. Their last layer is a Linear, which a transfer (`--from`) replaces.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]  # channels, height, width
LEAST = 4  # minimum size that VGG still halves: a convolution is pointless on one pixel


def normalization(channels: int) -> nn.Module:
    """Return a GroupNorm: a BatchNorm's averages would differ between ranks."""
    return nn.GroupNorm(gcd(4, channels), channels)


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution followed by normalization and activation."""
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), normalization(outputs), nn.ReLU()]


def halve() -> nn.Module:
    """Return a pooling layer that halves an image, but keeps a single pixel."""
    return nn.MaxPool2d(2, ceil_mode=True)


def cnn(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a network of three convolutions."""
    layers = [*convolution(shape[0], width), *convolution(width, 2 * width), nn.MaxPool2d(2)]
    layers += [*convolution(2 * width, 2 * width), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(8 * width, classes))


def lenet(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a LeNet-5 (LeCun et al. 1998), original width 6, with tanh and no normalization."""
    layers: list[nn.Module] = []
    middle, inputs = width * 8 // 3, shape[0]
    for outputs in (width, middle):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    layers += [nn.Linear(16 * middle, 20 * width), nn.Tanh()]
    layers += [nn.Linear(20 * width, 14 * width), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(14 * width, classes))


def alexnet(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return an AlexNet (Krizhevsky et al. 2012), original width 64, with a small first layer."""
    layers: list[nn.Module] = [nn.Conv2d(shape[0], width, 5, padding=2), nn.ReLU(), halve()]
    layers += [nn.Conv2d(width, 3 * width, 5, padding=2), nn.ReLU(), halve()]
    inputs = 3 * width
    for outputs in (6 * width, 4 * width, 4 * width):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
    layers += [halve(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    for inputs in (16 * width, 16 * width):
        layers += [nn.Dropout(dropout), nn.Linear(inputs, 16 * width), nn.ReLU()]
    return init_relu(nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(16 * width, classes)))


def vgg(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a VGG-11 (Simonyan and Zisserman 2014), original width 64, with normalization."""
    layers: list[nn.Module] = []
    inputs, shorter = shape[0], min(shape[1:])
    for times in ([1], [2], [4, 4], [8, 8], [8, 8]):
        for outputs in (width * one for one in times):
            layers += convolution(inputs, outputs)
            inputs = outputs
        if shorter >= LEAST:
            layers.append(halve())
            shorter = -(-shorter // 2)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    return init_relu(nn.Sequential(*layers, nn.Linear(inputs, classes)))


class Residual(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        layers = [*convolution(inputs, outputs, stride), *convolution(outputs, outputs)[:-1]]
        # Start as the identity: otherwise the network did not learn at its usual width.
        nn.init.zeros_(layers[-1].get_parameter("weight"))
        self.inner, self.shortcut = nn.Sequential(*layers), nn.Sequential()  # identity
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride))
            self.shortcut.append(normalization(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of both paths."""
        return nn.functional.relu(self.inner(images) + self.shortcut(images))


def resnet18(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a ResNet-18 for small images (its first layer keeps their size); usual width 64."""
    layers, inputs = convolution(shape[0], width), width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Residual(inputs, width << stage, stride))
            inputs = width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


class Patches(nn.Module):
    """Cuts an image into patches, maps each to a vector, and adds a vector for its position."""

    def __init__(self, shape: Shape, size: int, features: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(shape[0], features, size, size)
        places = (shape[1] // size) * (shape[2] // size)
        self.places = nn.Parameter(0.02 * torch.randn(places, features))

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors: images, positions, features."""
        vectors: Tensor = self.cut(images)
        return vectors.flatten(2).transpose(1, 2) + self.places


class Mean(nn.Module):
    """Averages the vectors of an image."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Return one vector per image."""
        return vectors.mean(1)


def vit(shape: Shape, classes: int, width: int, dropout: float) -> nn.Module:
    """Return a vision transformer (Dosovitskiy et al. 2020) of four blocks with four heads.

    It has 4 * width features. A patch is an eighth of the shorter side, but at least 2 pixels.
    """
    features, shorter = 4 * width, min(shape[1:])
    size = min(max(2, -(-shorter // 8)), shorter)
    layers: list[nn.Module] = [Patches(shape, size, features)]
    block = partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
    layers += [block(features, 4, 4 * features, 0.0, "gelu") for _ in range(4)]
    layers += [nn.LayerNorm(features), Mean(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(features, classes))


def init_relu(network: nn.Sequential) -> nn.Sequential:
    """Initialize weights for ReLU (He et al. 2015): PyTorch's default makes deep layers vanish."""
    for layer in list(network)[:-1]:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.get_parameter("bias"))
    return network


MODELS = {
    "cnn": cnn,
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg": vgg,
    "resnet18": resnet18,
    "vit": vit,
}
