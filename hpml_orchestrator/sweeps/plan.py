"""A sweep's plan: its points in order, the scripts that they share, and what they may cost.

It is on disk, complete, before anything is submitted:

    <records>/sweeps/<id>/plan.json        the sweep, the base job, the shapes, the estimate
    <records>/sweeps/<id>/points.jsonl     one point per line, in the order of the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Point", "Shape", "SweepPlan"]


@dataclass(frozen=True)
class Shape:
    """Points whose scripts are equal: what differs between them comes from `points.sh`.

    Attributes:
        number: its place in the plan, from 0.
        settings: fields of the job that differ from the base job, as `--set` takes them, `args`
            with `{point.NAME}` where a value of the point stands.
        nodes, ranks, gpus, cores: of one point, in all.
        seconds: the time limit of one point.
    """

    number: int
    settings: Mapping[str, Any]
    nodes: int
    ranks: int
    gpus: int
    cores: int
    seconds: int


@dataclass(frozen=True)
class Point:
    """One planned run.

    Attributes:
        number: its place in the order of the plan, from 0; of a search the trial's number.
        shape: number of its shape.
        scale: nodes, ranks or GPUs (`plan.unit`) of a strong or weak sweep, else None.
        values: the axes' values by their names in the sweep file.
        repeat: which repeat of these values it is, from 0.
        seed: random seed of the repeat.
        variables: what `points.sh` sets, by the placeholder's name: `{"lr": "0.1"}` for
            `{point.lr}`.
        batch_global, batch_per_rank: planned batch sizes, None where not known.
        learning_rate: planned, of the optimiser; None where the sweep does not set it.
    """

    number: int
    shape: int
    scale: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 0
    seed: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    batch_global: int | None = None
    batch_per_rank: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Estimate:
    """What the whole sweep costs at most: every point until its time limit, without retries."""

    points: int
    node_hours: float
    core_hours: float
    gpu_hours: float


@dataclass(frozen=True)
class SweepPlan:
    """Everything that is decided before the first submission.

    Attributes:
        id: `<name>-<date>-<time>-<6 characters>`, as of runs.
        name: the sweep's name.
        mode: as in the sweep file.
        sweep: the sweep file, complete (`Sweep.model_dump(mode="json")`).
        backend: `slurm` or `local`; host: of the local backend.
        site: the site profile's files.
        created: seconds since the epoch.
        unit: `nodes`, `ranks` or `gpus` of a strong or weak sweep, else empty.
        baseline: the scale that speedups refer to, None without scales.
        shapes, points: see there; a search has no points here, they are in its batches.
        blocks: numbers of points that are submitted together, in order (see `order`).
        estimate: the most that it may cost.
        notes: what a reader has to know, such as which argument was taken for the batch size.
        cores: CPU cores of this machine on the local backend, 0 on a cluster.
    """

    id: str
    name: str
    mode: str
    sweep: Mapping[str, Any]
    backend: str
    host: str
    site: tuple[str, ...]
    created: float
    unit: str
    baseline: int | None
    shapes: tuple[Shape, ...]
    points: tuple[Point, ...]
    blocks: tuple[tuple[int, ...], ...]
    estimate: Estimate
    notes: tuple[str, ...] = ()
    cores: int = 0
