"""PointNet with a T-Net, and a network that gets the size of a tree only; used by trees.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def layers(*widths: int) -> nn.Sequential:
    """Return a small network that is applied to each point separately.

    LayerNorm, not BatchNorm: no tree's result depends on the other trees of a batch, so any number
    of ranks computes the same.
    """
    parts: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):  # noqa: B905, RUF007 - Python 3.9
        parts += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*parts)


class TNet(nn.Module):
    """Transforms a cloud by a 3x3 matrix computed from it, the identity before training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = layers(3, width, 2 * width, 4 * width)
        self.cloud = layers(4 * width, 2 * width)
        self.matrix = nn.Linear(2 * width, 9)
        nn.init.zeros_(self.matrix.weight)
        nn.init.zeros_(self.matrix.bias)

    def forward(self, cloud: Tensor) -> Tensor:
        """Return the changed points (trees, points, 3)."""
        matrix = self.matrix(self.cloud(self.points(cloud).amax(1))).view(-1, 3, 3)
        turned: Tensor = cloud @ (matrix + torch.eye(3, device=matrix.device, dtype=matrix.dtype))
        return turned


class PointNet(nn.Module):
    """T-Net, features of each point, their maximum over the points, and a classifier.

    The maximum does not depend on the order of the points, nor much on their number.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.tnet = TNet(width // 2)
        self.points = layers(3, width, width, 2 * width, 8 * width)
        self.classify = nn.Sequential(layers(8 * width, 2 * width), nn.Linear(2 * width, classes))

    def forward(self, cloud: Tensor) -> Tensor:
        """Return the scores of the classes (trees, classes) for points (trees, points, 3)."""
        scores: Tensor = self.classify(self.points(self.tnet(cloud)).amax(1))
        return scores


class Box(nn.Module):
    """The baseline: what height and widths of a tree reveal, without its shape."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.classify = nn.Sequential(
            layers(5, 2 * width, 2 * width), nn.Linear(2 * width, classes)
        )

    def forward(self, cloud: Tensor) -> Tensor:
        """Return the scores of the classes (trees, classes) for points (trees, points, 3)."""
        size = cloud.amax(1) - cloud.amin(1)
        parts = size[:, :2] / size[:, 2:]
        scores: Tensor = self.classify(torch.cat((size, parts), 1))
        return scores


MODELS = {"pointnet": PointNet, "box": Box}
