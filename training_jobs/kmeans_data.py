"""The points of kmeans.py: generated, or rows of a file; each rank has its own part."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpml_checkpoint import Ranks
from hpml_job import JobError

GENERATED = 4096  # points per random generator: the same points for any number of ranks


class Points(NamedTuple):
    """The points of a rank."""

    values: Tensor  # points x dimensions
    labels: Tensor | None  # clusters from which they were generated
    total: int  # number of points on all ranks


def read_array(path: Path, option: str) -> NDArray[np.generic]:
    """Open a matrix of numbers without reading it yet."""
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not a file of numpy.save"
        raise JobError(f"{option} {path}: {reason}") from error
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:  # noqa: PLR2004
        found = f"{array.dtype} {array.shape}"
        raise JobError(f"{option} {path}: must be rows of numbers, and is {found}")
    return array


def make_points(options: argparse.Namespace, ranks: Ranks, device: torch.device) -> Points:
    """Generate or read this rank's part of the points: equal ranges of rows, by rank."""

    def mine(count: int) -> tuple[int, int]:
        if count < max(options.clusters, ranks.world_size):
            needed = f"{options.clusters} clusters and {ranks.world_size} ranks"
            raise JobError(f"{count} points are too few for {needed}")
        return count * ranks.rank // ranks.world_size, count * (ranks.rank + 1) // ranks.world_size

    if options.data:
        array = read_array(options.data, "--data")
        first, last = mine(len(array))
        rows = torch.from_numpy(np.array(array[first:last], dtype=np.float32))
        if not bool(rows.isfinite().all()):
            raise JobError(f"--data {options.data}: has numbers that are not finite")
        return Points(rows.to(device), None, len(array))
    first, last = mine(options.points)
    random = torch.Generator().manual_seed(options.seed)
    centres = torch.rand(options.clusters, options.dimensions, generator=random)
    values, labels = list[Tensor](), list[Tensor]()
    for block in range(first // GENERATED, -(-last // GENERATED)):
        random.manual_seed(options.seed * 1_000_003 + block + 1)
        label = torch.randint(options.clusters, (GENERATED,), generator=random)
        noise = torch.randn(GENERATED, options.dimensions, generator=random)
        part = slice(max(0, first - block * GENERATED), last - block * GENERATED)
        values.append((centres[label] + options.spread * noise)[part])
        labels.append(label[part])
    return Points(torch.cat(values).to(device), torch.cat(labels).to(device), options.points)


def given_centres(options: argparse.Namespace, points: Points) -> Tensor | None:
    """Return the initial centres if --init names a file, or None."""
    if options.init in ("k-means++", "random"):
        return None
    array, size = read_array(Path(options.init), "--init"), points.values.shape[1]
    if array.shape != (options.clusters, size):
        needed = f"{options.clusters} clusters of {size} dimensions"
        raise JobError(f"--init {options.init}: is {array.shape}, and not {needed}")
    return torch.from_numpy(np.array(array, dtype=np.float32)).to(points.values.device)
