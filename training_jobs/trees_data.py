"""The point clouds that a rank reads, and its part of each batch."""

from __future__ import annotations

import math
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpml_checkpoint import Ranks
from hpml_job import JobError, make_directories, raise_together
from make_trees import SPECIES, Floats, Integers, make_trees


class Data:
    """The trees of this rank: centred and scaled to size 1, so that only their shape differs."""

    def __init__(self, options: Namespace, ranks: Ranks) -> None:
        if options.data is None:
            points, labels = make_trees(options.trees, options.seed)
            self.species = SPECIES
        else:
            points, labels, self.species = read_trees(options.data)
        clouds, targets = torch.from_numpy(points), torch.from_numpy(labels)
        if options.model != "box":
            clouds = clouds - clouds.mean(1, keepdim=True)
            clouds /= clouds.square().sum(2).mean(1).sqrt().clamp(min=1e-9)[:, None, None]
        numbers, self.parts = torch.arange(len(targets)), dict[str, tuple[Tensor, Tensor]]()
        for part, every in (("test", 5), ("validation", 10)):  # of the remaining trees
            is_held_out = torch.arange(len(numbers)) % every == 0
            self.parts[part] = clouds[numbers[is_held_out]], targets[numbers[is_held_out]]
            numbers = numbers[~is_held_out]
        self.clouds, self.targets = clouds[numbers], targets[numbers]
        self.batch, self.options, self.ranks = options.batch_size * ranks.world_size, options, ranks
        self.steps_per_epoch = -(-len(self.targets) // self.batch)
        if not self.steps_per_epoch:
            raise ValueError(f"--trees {len(targets)}: too few to train with")

    def batch_of(self, step: int) -> tuple[Tensor, Tensor, int]:
        """Return this rank's part of a step's batch, and the number of trees on all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        seed = self.options.seed * 1_000_003 + epoch
        order = torch.randperm(len(self.targets), generator=torch.Generator().manual_seed(seed))
        numbers = order[place * self.batch :][: self.batch]
        mine = numbers[self.ranks.rank :: self.ranks.world_size]
        clouds = [self.augmented(number, seed) for number in mine.tolist()]
        empty = torch.empty(0, self.options.points, 3)  # the last batch may have too few trees
        return torch.stack(clouds) if clouds else empty, self.targets[mine], len(numbers)

    def groups_of(self, clouds: Tensor) -> Tensor:
        """Return clouds (trees, groups, --points or a few more, 3) that use each point once.

        A maximum over more points than in the training is higher, which would cost accuracy.
        """
        trees, points, _ = clouds.shape
        groups = max(1, points // self.options.points)
        count = points // groups
        return clouds[:, : count * groups].view(trees, count, groups, 3).transpose(1, 2)

    def augmented(self, number: int, seed: int) -> Tensor:
        """Return a tree's points, turned about the vertical axis, depending on tree and epoch."""
        options = self.options
        # Seeded by tree, not by rank: any number of ranks trains with the same clouds.
        random = torch.Generator().manual_seed(seed * 1_000_003 + number)
        cloud = self.clouds[number]
        cloud = cloud[torch.randint(len(cloud), (options.points,), generator=random)]
        angle = 2 * math.pi * float(torch.rand(1, generator=random))
        sine, cosine = math.sin(angle), math.cos(angle)
        turn = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
        noise = options.jitter * torch.randn(cloud.shape, generator=random)
        return torch.addmm(noise, cloud, turn)


def read_trees(file: Path) -> tuple[Floats, Integers, tuple[str, ...]]:
    """Return points, labels and species of a file.

    Raises:
        ValueError: it cannot be read, or contains something else.
    """
    try:
        with np.load(file) as content:
            points, labels, species = (content[name] for name in ("points", "labels", "species"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or 'not a file of make_trees.py'}") from None
    except (ValueError, LookupError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"{file}: not a file of make_trees.py") from None
    if points.shape != (len(labels), *points.shape[1:2], 3):
        raise ValueError(f"{file}: {labels.shape} labels do not fit to {points.shape} points")
    if not len(labels) or not 0 <= labels.min() <= labels.max() < len(species):
        raise ValueError(f"{file}: labels are not from 0 to {len(species) - 1}")
    return points.astype("float32"), labels.astype("int64"), tuple(map(str, species))


def load_data(options: Namespace, ranks: Ranks) -> Data:
    """Return the data of this rank, and create the directories of the results.

    Raises:
        JobError: that fails on one rank; it is raised on all, so that none waits for it.
    """
    data, problem, size = None, "", 0
    try:
        data = Data(options, ranks)
        size = len(data.targets)
    except (ValueError, OSError) as error:
        problem = str(error)
    # Ranks with different files would take different numbers of steps, and some would wait forever.
    raise_together(ranks, problem)
    if data is None or len(sizes := set(ranks.gather(size))) > 1:
        raise JobError(f"--data {options.data}: ranks see different numbers of trees, {sizes}")
    make_directories(options, ranks)
    return data
