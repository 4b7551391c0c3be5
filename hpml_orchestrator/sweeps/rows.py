"""What became of each start of a point: the rows of a sweep's table, from the runs' records."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, counted
from hpml_orchestrator.records.files import read_json, read_text_or_nothing
from hpml_orchestrator.runs.bound import node_topology
from hpml_orchestrator.runs.monitored import JOULES_PER_KWH, numbers
from hpml_orchestrator.runs.summary import Summary, binding_of, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.store import Attempt, Submission
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.sweeps.plan import Shape, SweepPlan

__all__ = ["Row", "row_of"]

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class Row:
    """One start of a point; a retry makes another row. None and empty mean: not known.

    Times are seconds since the epoch. Hours are allocated, over the wall-clock time.
    """

    point: int  # the point's number in the plan
    start: int = 0  # 0 for the first start of the point, 1 for its first retry, …
    run: str = ""  # id of the run, `<sid>.<index>`
    job_id: str = ""  # the scheduler's
    # A scheduler's state, or `WAITING` (not submitted yet), `REFUSED`, `PRUNED` (stopped early by
    # the search), `EXCLUDED` (left out by a rule of the sweep).
    state: str = "WAITING"
    reason: str = ""  # why, in a few words
    over: bool = False  # whether nothing more will happen to this start
    attempts: int = 0  # starts of the job by Slurm itself (requeues) within this start
    queued: float | None = None
    started: float | None = None
    ended: float | None = None
    # Seconds by name: the phases of `runs.summary.Phase` without gaps; `evaluation` and
    # `checkpoint` lie within training.
    phases: Mapping[str, float] = field(default_factory=dict)
    # From start to end without the queue: the headline, staging and I/O included.
    total_seconds: float | None = None
    training_seconds: float | None = None  # warm-up and training, as the program reports them
    samples_per_second: float | None = None  # of all ranks, steady state
    data_wait_ratio: float | None = None  # share of the step time spent waiting for data
    accuracy: float | None = None  # on the test set
    seconds_to_accuracy: float | None = None  # None where the target was not reached
    target_accuracy: float | None = None
    evaluation_every: float | None = None  # epochs
    metric: float | None = None  # of a search, the figure that it optimises
    batch_per_rank: int | None = None  # this and the next four as the training reported them
    batch_global: int | None = None
    learning_rate: float | None = None
    steps: int | None = None
    epochs: int | None = None
    world_size: int | None = None  # ranks that trained
    nodes: str = ""  # node list
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    node_hours: float = 0.0
    energy_kwh: float | None = None  # of the GPUs, where measured
    gpu_active: float | None = None  # mean share of the time in which the GPUs computed
    binding: str = ""  # its verdict in one line
    verified: bool | None = None  # whether all ranks were bound as planned
    oversubscribed: bool = False  # whether there were more ranks than cores of a machine
    device: str = ""  # what it computed on
    result: Mapping[str, Any] = field(default_factory=dict)  # all that the training reported
    code: str = ""  # commit, with `+dirty-<digest>` for uncommitted changes
    environment: str = ""  # digest of interpreter, modules and variables
    hardware: str = ""  # CPU and GPU models of the nodes


def row_of(plan: SweepPlan, shape: Shape, key: tuple[int, int], state: State) -> Row:
    """Return the row of a start that is over, from its run's records and its task's last state.

    `key` has the numbers of the point and of the start.
    """
    try:
        summary, attempts = summarise(state), state.run.attempts()
        placed = _placed(state, attempts[-1], shape) if attempts else {}
    except RecordError as error:  # damaged: the row says so, and the sweep goes on
        state = replace(state, reason=state.reason or str(error))
        summary, attempts, placed = Summary(), [], {}
    result = summary.result or _result_file(state)
    told = numbers(result)
    phases = {phase.name: phase.seconds for phase in summary.phases}
    for name in ("evaluation", "checkpoint"):
        if f"{name}_seconds" in told:
            phases[name] = told[f"{name}_seconds"]
    begun = attempts[0].started if attempts else None
    took = None if state.started is None or state.ended is None else state.ended - state.started
    hours = (_earlier_seconds(attempts) + max(0.0, took or 0.0)) / _HOUR_SECONDS
    # The script's own clock is finer than the scheduler's.
    own = math.fsum(phase.seconds for phase in summary.phases if phase.name != "queue")
    whole = {name: int(value) for name, value in {**numbers(summary.last_step), **told}.items()}
    per_rank = whole.get("batch_size_per_rank")
    world = whole.get("world_size") or summary.world_size or None
    row = Row(
        *key,
        run=state.submission.label,
        job_id=state.job_id,
        state=state.state,
        reason=state.reason,
        over=True,
        attempts=len(attempts),
        started=state.started or (begun.time if begun else None),
        ended=state.ended,
        phases=phases,
        total_seconds=own or took,
        training_seconds=told.get("train_seconds"),
        samples_per_second=summary.samples_per_second or told.get("samples_per_second"),
        data_wait_ratio=summary.data_wait_ratio,
        accuracy=told.get("test_accuracy", told.get("accuracy")),
        seconds_to_accuracy=told.get("seconds_to_accuracy"),
        target_accuracy=told.get("target_accuracy"),
        evaluation_every=told.get("eval_every_epochs"),
        metric=told.get(plan.spec.search.metric),
        batch_per_rank=per_rank,
        batch_global=per_rank * world if per_rank and world else None,
        learning_rate=told.get("learning_rate"),
        steps=whole.get("steps") or whole.get("steps_total"),
        epochs=whole.get("epochs"),
        world_size=world,
        nodes=state.nodes,
        gpu_hours=hours * shape.gpus,
        core_hours=hours * shape.cores,
        node_hours=hours * shape.nodes,
        device=str(result.get("device", "")),
        result=result,
        binding=summary.binding,
    )
    return replace(
        row, **placed, **_monitored(summary), **_described(replace(state.submission, index=None))
    )


def _result_file(state: State) -> dict[str, Any]:
    """Return `result.json` of a program that reports nothing through the channel."""
    with contextlib.suppress(NotFoundError, RecordError):
        result: dict[str, Any] = read_json(state.run.directory / "result.json")
        return {name: value for name, value in result.items() if name != "schema_version"}
    return {}


def _earlier_seconds(attempts: Sequence[Attempt]) -> float:
    """Return for how long resources were allocated to starts that Slurm requeued."""
    seconds = 0.0
    for attempt in attempts[:-1]:
        begun, ended = attempt.started, (attempt.ended or {}).get("time") or attempt.last_written
        seconds += max(0.0, float(ended) - begun.time) if begun and ended else 0.0
    return seconds


def _placed(state: State, attempt: Attempt, shape: Shape) -> dict[str, Any]:
    """Return what is known of the ranks' places: binding, CPUs and GPUs."""
    judged = [place.right for place in binding_of(state).places if place.right is not None]
    records = attempt.bindings()
    # By machine: the nodes of a development cluster share one.
    ranks = Counter(str(record.get("host", "")) for record in records)
    nodes = {str(record.get("host", "")): str(record.get("node", "")) for record in records}
    oversubscribed, machines = shape.oversubscribed, set()
    for host, node in nodes.items():
        topology = node_topology(attempt, node)
        cores = len(topology.cores) if topology else 0
        models = sorted({gpu.name for gpu in topology.gpus if gpu.name}) if topology else []
        machines.add(", ".join([counted(cores, "core"), *models]))
        oversubscribed = oversubscribed or 0 < cores < ranks[host]
    return {
        "verified": all(judged) if judged else None,
        "oversubscribed": oversubscribed,
        "hardware": "; ".join(sorted(machines)),
    }


def _monitored(summary: Summary) -> dict[str, Any]:
    """Return energy and activity of the GPUs, where they were monitored."""
    figures = [gpu.figures for gpu in (summary.monitor.gpus if summary.monitor else ())]
    joules = [gpu["energy_joules"] for gpu in figures if "energy_joules" in gpu]
    active = [gpu.get("sm_active_ratio", gpu.get("utilization_ratio")) for gpu in figures]
    shares = [share for share in active if share is not None]
    return {
        "energy_kwh": math.fsum(joules) / JOULES_PER_KWH if joules else None,
        "gpu_active": math.fsum(shares) / len(shares) if shares else None,
    }


@functools.lru_cache(maxsize=16)
def _described(submission: Submission) -> dict[str, Any]:
    """Return what all tasks of a submission share: its time, the code, the environment."""
    record = submission.record()
    git = record["provenance"]["git"] or {}
    code = str(git.get("commit", ""))
    if git.get("dirty"):
        diff = read_text_or_nothing(submission.directory / "dirty.diff")
        digest = _digest("\n".join([diff, *git["untracked"]]))
        code += f"+dirty-{digest}"
    parts = [record["job"]["environment"], record["provenance"]["python"]]
    return {
        "queued": submission.started_at(),
        "code": code,
        "environment": _digest(json.dumps(parts, sort_keys=True)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
