"""PointNet with one or two T-Nets for trees.py, and a baseline that only gets a tree's size."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def layers(*widths: int) -> nn.Sequential:
    """Return a small network that is applied to each point separately.

    LayerNorm, not BatchNorm: a tree's result does not depend on the other trees of a batch, so any
    number of ranks computes the same.
    """
    parts: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):  # noqa: B905, RUF007 - Python 3.9
        parts += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*parts)


class TNet(nn.Module):
    """Transforms the values of each point by a matrix computed from all points of its tree.

    The matrix is the identity before training.

    Attributes:
        penalty: how far the matrices of the last clouds are from orthogonal: the sum over the trees
            of the squared Frobenius norm of I - A A^T.
    """

    penalty: Tensor

    def __init__(self, values: int, width: int) -> None:
        super().__init__()
        self.values = values
        self.points = layers(values, width, 2 * width, 4 * width)
        self.cloud = layers(4 * width, 2 * width)
        self.matrix = nn.Linear(2 * width, values * values)
        nn.init.zeros_(self.matrix.weight)
        nn.init.zeros_(self.matrix.bias)

    def forward(self, cloud: Tensor) -> Tensor:
        """Return the transformed values (trees, points, values)."""
        matrix = self.matrix(self.cloud(self.points(cloud).amax(1)))
        one = torch.eye(self.values, device=matrix.device, dtype=matrix.dtype)
        matrix = matrix.view(-1, self.values, self.values) + one
        with torch.autocast(cloud.device.type, enabled=False):  # small difference of large sums
            exact = matrix.float()
            self.penalty = (exact @ exact.mT - one.float()).square().sum()
        turned: Tensor = cloud @ matrix
        return turned


class PointNet(nn.Module):
    """T-Net, features of each point, their maximum over the points, and a classifier.

    The maximum does not depend on the order of the points, nor much on their number. With
    `feature_tnet` a second T-Net transforms the features of a point: 64x64 with a width of 64.
    """

    def __init__(self, classes: int, width: int, *, feature_tnet: bool = False) -> None:
        super().__init__()
        self.tnet = TNet(3, width // 2)
        self.points = layers(3, width, width, 2 * width, 8 * width)
        self.feature_tnet = TNet(width, width // 2) if feature_tnet else None
        self.classify = nn.Sequential(layers(8 * width, 2 * width), nn.Linear(2 * width, classes))

    def forward(self, cloud: Tensor) -> Tensor:
        """Return the scores of the classes (trees, classes) for points (trees, points, 3)."""
        points = self.tnet(cloud)
        if self.feature_tnet is None:
            points = self.points(points)
        else:  # after two layers of three modules each
            points = self.points[6:](self.feature_tnet(self.points[:6](points)))
        scores: Tensor = self.classify(points.amax(1))
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
