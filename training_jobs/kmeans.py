"""Find clusters of points by k-means (Lloyd) on any number of ranks, which share the points.

    python kmeans.py --points 200000 --clusters 100
    torchrun --standalone --nproc-per-node=2 kmeans.py --data points.npy --clusters 100

Each rank assigns its points to the nearest centres; sums and counts over all ranks give the next
centres. The result equals that of one rank, and of scikit-learn's KMeans with the same start.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

import hpml_job
from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement
from hpml_job import JobError, raise_together, say
from hpml_profile import trace_steps
from kmeans_data import Points, given_centres, make_points

NUMBERS = {  # numeric options: default, minimum, help
    "points": (200_000, 1, "of all ranks together; with --data: those of the file"),
    "dimensions": (16, 1, "of a point; with --data: those of the file"),
    "clusters": (100, 1, "to find, and to generate"),
    "spread": (0.2, 0.0, "standard deviation of a generated cluster; its centre is in a unit cube"),
    "iterations": (300, 1, "at most"),
    "tolerance": (1e-4, 0.0, "end when centres move by less; a part of the points' variance"),
    "block": (8192, 1, "points that are compared with all centres at once"),
    "seed": (1, 0, "of the points and of the first centres"),
    "checkpoint-every": (20, 1, "iterations"),
}


@dataclass
class Progress:
    """The progress of a run, over all restarts."""

    iterations: int = 0
    moved: float = math.inf  # sum of the centres' squared movements in the last iteration
    relocated: int = 0  # empty clusters that got a point
    seconds: float = 0.0


class Sums(NamedTuple):
    """The result of an assignment over all ranks."""

    sums: Tensor  # clusters x dimensions, in double precision
    counts: Tensor
    inertia: float  # sum of the squared distances
    nearest: Tensor  # cluster of each point of this rank
    distances: Tensor  # its squared distance
    comm_seconds: float


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    hpml_job.add_options(parser, NUMBERS)
    text = "points x dimensions, as numpy.save writes; each rank reads its rows only"
    parser.add_argument("--data", type=Path, metavar="FILE.npy", help=text)
    text = "first centres: k-means++, random points, or a file of numpy.save; default %(default)s"
    parser.add_argument("--init", default="k-means++", metavar="HOW", help=text)
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    return options


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks, in place."""
    dist.all_reduce(tensor)
    return tensor


def row_of(points: Points, index: int, before: int) -> Tensor:
    """Return a point of any rank by its global index; `before` counts the points of lower ranks."""
    place, row = index - before, torch.zeros_like(points.values[0])
    if 0 <= place < len(points.values):
        row += points.values[place]
    return total(row)


def first_centres(points: Points, options: argparse.Namespace, ranks: Ranks) -> Tensor:
    """Return the initial centres: equal on all ranks and for any number of ranks."""
    count = options.clusters
    before = sum(ranks.gather(len(points.values))[: ranks.rank])
    random = torch.Generator().manual_seed(options.seed)
    if options.init == "random":
        chosen = torch.randperm(points.total, generator=random)[:count].tolist()
        return torch.stack([row_of(points, index, before) for index in chosen])
    centres = [row_of(points, int(torch.randint(points.total, (), generator=random)), before)]
    distances = torch.full_like(points.values[:, 0], math.inf)
    for _ in range(count - 1):  # draw by squared distance to the nearest centre
        for some, far in blocks(options, points.values, distances):
            torch.minimum(far, (some - centres[-1]).square().sum(1), out=far)
        parts = torch.zeros(ranks.world_size, dtype=torch.double, device=distances.device)
        sums = distances.double().cumsum(0)
        parts[ranks.rank] = sums[-1]
        ends = total(parts).cumsum(0).cpu()
        drawn = torch.rand((), generator=random, dtype=torch.double) * ends[-1]
        owner = min(int(torch.searchsorted(ends, drawn, right=True)), ranks.world_size - 1)
        place = -1
        if owner == ranks.rank:
            rest = drawn - (ends[owner - 1] if owner else 0.0)
            place = min(int(torch.searchsorted(sums, rest.to(sums), right=True)), len(sums) - 1)
        centres.append(row_of(points, place + before if place >= 0 else -1, before))
    return torch.stack(centres)


def blocks(options: argparse.Namespace, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors, so that no product with all centres exceeds a block."""
    return zip(*(tensor.split(options.block) for tensor in tensors))  # noqa: B905 - Python 3.9


def assign(points: Points, centres: Tensor, options: argparse.Namespace) -> Sums:
    """Find each point's nearest centre, and sum points and distances over the ranks."""
    nearest = torch.empty(len(points.values), dtype=torch.long, device=centres.device)
    distances = torch.empty_like(points.values[:, 0])
    lengths = centres.square().sum(1)
    for some, near, far in blocks(options, points.values, nearest, distances):
        # |x - c|^2 = |x|^2 - 2 x c + |c|^2, and |x|^2 is the same for all centres.
        torch.argmin(torch.addmm(lengths, some, centres.T, alpha=-2), 1, out=near)
        far.copy_((some - centres[near]).square().sum(1))
    count, dimensions = centres.shape
    # One message: the sums, the counts and the inertia. In double precision, the order of the sums,
    # which depends on the number of ranks, changes less than a centre's last digit.
    whole = torch.zeros(count, dimensions + 2, dtype=torch.double, device=centres.device)
    for some, near, far in blocks(options, points.values, nearest, distances):
        columns = [some, torch.ones_like(far)[:, None], far[:, None]]
        whole.index_add_(0, near, torch.cat(columns, 1).double())
    if whole.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    inertia = float(total(whole)[:, -1].sum())
    took = time.perf_counter() - began
    return Sums(whole[:, :-2], whole[:, -2], inertia, nearest, distances, took)


def next_centres(found: Sums, centres: Tensor, points: Points, ranks: Ranks) -> tuple[Tensor, int]:
    """Return the mean of each cluster's points, and the number of empty clusters.

    An empty cluster gets the point that is farthest from its centre, as in scikit-learn.
    """
    sums, counts = found.sums.clone(), found.counts.clone()
    empty = (counts == 0).nonzero().flatten().tolist()
    if empty:
        far, places = found.distances.topk(min(len(empty), len(found.distances)))
        old, rows = found.nearest[places].tolist(), points.values[places].double().cpu()
        offers = [one for some in ranks.gather([*zip(far.tolist(), old, rows)]) for one in some]  # noqa: B905
        offers.sort(key=lambda offer: -float(offer[0]))
        for cluster, (distance, owner, row) in zip(empty, offers):  # noqa: B905
            if distance > 0:  # otherwise there are fewer distinct points than clusters
                sums[owner], counts[owner] = sums[owner] - row.to(sums), counts[owner] - 1
                sums[cluster], counts[cluster] = row.to(sums), 1
    means = (sums / counts.clamp(min=1)[:, None]).float()
    return torch.where(counts[:, None] > 0, means, centres), len(empty)


def purity(points: Points, found: Sums, clusters: int) -> float | None:
    """Return the fraction of points whose label is the most frequent one in their cluster."""
    if points.labels is None:
        return None
    pairs = points.labels * clusters + found.nearest
    table = total(torch.bincount(pairs, minlength=clusters**2)).view(clusters, clusters)
    return float(table.max(0).values.sum()) / points.total


def variance(points: Points) -> float:
    """Return the variance of the points of all ranks, averaged over the dimensions."""
    values = points.values.double()
    mean = total(values.sum(0)) / points.total
    return float(total((values - mean).square().sum(0)).mean()) / points.total


def prepare(
    options: argparse.Namespace, ranks: Ranks, device: torch.device
) -> tuple[Points, Tensor | None]:
    """Return this rank's points, and the first centres if a file has them."""
    hpml_job.make_directories(options, ranks)
    try:
        points = make_points(options, ranks, device)
        found = points, given_centres(options, points)
        problem = ""
    except JobError as error:
        problem = str(error)
    raise_together(ranks, problem)
    return found


def train(options: argparse.Namespace, channel: Channel, device: torch.device) -> None:
    """Move the centres until they no longer change, from the newest checkpoint if there is one."""
    ranks = Ranks()
    points, centres = prepare(options, ranks, device)
    names = ("clusters", "seed", "tolerance", "init", "spread")
    job = {name: getattr(options, name) for name in names}
    job.update(
        points=points.total,
        dimensions=points.values.shape[1],
        data=options.data and str(options.data),
    )
    at, times = Progress(), list[float]()
    saves = None
    if options.checkpoint:
        saves = Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
        if found := saves.load():
            vars(at).update(found.state["position"])
            centres = found.state["centres"].to(device)
            say(ranks, f"resumed from {found.path}: {at.iterations} iterations are done")
    began = time.perf_counter()
    if centres is None:
        centres = first_centres(points, options, ranks)
    init_seconds, limit = time.perf_counter() - began, options.tolerance * variance(points)
    agreement = StopAgreement(ranks)
    channel.event("training", step=at.iterations, total_steps=options.iterations)
    stop = bool(agreement.finish())
    with trace_steps(options.profile, ranks.rank, after=1) as tracer:
        while at.iterations < options.iterations and at.moved > limit and not stop:
            began = time.perf_counter()
            with record_function("hpml.step"):
                sums = assign(points, centres, options)
                after, empty = next_centres(sums, centres, points, ranks)
                at.moved = float((after - centres).double().square().sum())
            centres, at.iterations, at.relocated = after, at.iterations + 1, at.relocated + empty
            times.append(time.perf_counter() - began)
            at.seconds += times[-1]
            tracer.step()
            channel.gauge(loss=sums.inertia / points.total)
            parts = {"step_seconds": times[-1], "comm_seconds": sums.comm_seconds}
            channel.count(steps=1, samples=len(points.values), **parts)
            stop = bool(agreement.exchange(channel.stop_requested()))
            is_end = stop or at.iterations == options.iterations or at.moved <= limit
            if saves and (is_end or at.iterations % options.checkpoint_every == 0):
                # The points need not be saved: they depend only on the seed or the file.
                state = {"centres": centres.cpu(), "position": vars(at)}
                saves.save(state, step=at.iterations)
    if stop:
        channel.event("stopping", step=at.iterations)
    last = assign(points, centres, options)  # inertia of the last centres
    seconds = ranks.highest(median(times[1:] or times or [0.0]))[0]  # the first one is the warm-up
    result = {
        "inertia": last.inertia, "iterations": at.iterations, "converged": at.moved <= limit,
        "seconds_per_iteration": seconds or None, "init_seconds": init_seconds,
        "samples_per_second": points.total / seconds if seconds else None,
        "train_seconds": at.seconds, "purity": purity(points, last, options.clusters),
        "relocated_clusters": at.relocated, "smallest_cluster": int(last.counts.min()),
        "largest_cluster": int(last.counts.max()), **job, "stopped": stop,
        "world_size": ranks.world_size, "device": hpml_job.device_name(device),
    }  # fmt: skip
    if options.output and ranks.rank == 0:
        write_centres(options.output, centres)
    hpml_job.report(result, channel, options, ranks)
    say(ranks, f"{'stopped' if stop else 'done'}: {json.dumps(result)}")


def write_centres(directory: Path, centres: Tensor) -> None:
    """Write centres.npy, which --init can read."""
    try:
        np.save(directory / "centres.npy", centres.cpu().numpy())
    except OSError as error:
        raise JobError(f"--output {directory}: {error.strerror}") from error


def main(arguments: list[str] | None = None) -> NoReturn:
    """Find the clusters, and exit with 0, or with 2 and a line with the reason."""
    hpml_job.run(train, parse(arguments))


if __name__ == "__main__":
    main()
