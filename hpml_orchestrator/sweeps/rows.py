"""What became of each start of a point: the rows of a sweep's table, from the runs' records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One start of a point; a retry makes another row. None and empty mean: not known.

    Attributes:
        point: the point's number in the plan; of a search the trial's.
        start: 0 for the first start of the point, 1 for its first retry, …
        run: id of the run, `<sid>.<index>`; job_id: the scheduler's.
        state: a scheduler's state, or `WAITING` (not submitted yet), `REFUSED`, `PRUNED` (stopped
            early by the search), `EXCLUDED` (left out by a rule of the sweep).
        reason: why, in a few words. over: whether nothing more will happen to this start.
        attempts: starts of the job by Slurm itself (requeues) within this start.
        queued, started, ended: seconds since the epoch.
        phases: seconds by name: `queue`, `start-up`, `staging`, `launch`, `rendezvous`, `warm-up`,
            `training`, `end`, without gaps; `evaluation` and `checkpoint` lie within training.
        total_seconds: from start to end without the queue: the headline, staging and I/O included.
        training_seconds: warm-up and training as the program reports them (`train_seconds`).
        samples_per_second: of all ranks, steady state.
        data_wait_ratio: share of the step time spent waiting for data.
        accuracy: on the test set. seconds_to_accuracy: None where the target was not reached.
        target_accuracy, evaluation_every: the target, and the interval of evaluations (epochs).
        metric: of a search, the figure that it optimises.
        batch_per_rank, batch_global, learning_rate, steps, epochs: as the training reported them.
        world_size: ranks that trained. nodes: node list.
        gpu_hours, core_hours, node_hours: allocated, over the wall-clock time.
        energy_kwh: of the GPUs, where measured.
        gpu_active: mean share of the time in which the GPUs computed, where monitored.
        binding: its verdict in one line; verified: whether all ranks were bound as planned.
        oversubscribed: whether there were more ranks than cores of this machine.
        device: what it computed on. result: all figures that the training reported at its end.
        code: commit of the code, with `+dirty-<digest>` for uncommitted changes; environment:
            digest of interpreter, modules and variables. hardware: CPU and GPU model of the nodes.
    """

    point: int
    start: int = 0
    run: str = ""
    job_id: str = ""
    state: str = "WAITING"
    reason: str = ""
    over: bool = False
    attempts: int = 0
    queued: float | None = None
    started: float | None = None
    ended: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    total_seconds: float | None = None
    training_seconds: float | None = None
    samples_per_second: float | None = None
    data_wait_ratio: float | None = None
    accuracy: float | None = None
    seconds_to_accuracy: float | None = None
    target_accuracy: float | None = None
    evaluation_every: float | None = None
    metric: float | None = None
    batch_per_rank: int | None = None
    batch_global: int | None = None
    learning_rate: float | None = None
    steps: int | None = None
    epochs: int | None = None
    world_size: int | None = None
    nodes: str = ""
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    node_hours: float = 0.0
    energy_kwh: float | None = None
    gpu_active: float | None = None
    binding: str = ""
    verified: bool | None = None
    oversubscribed: bool = False
    device: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    environment: str = ""
    hardware: str = ""
