"""The rows of a sweep's table: the outcome of each start of a point, from the runs' records."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hpml_orchestrator.diagnosis.contention import most_contended
from hpml_orchestrator.diagnosis.model import Facts
from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.jobfile.sweep import MetricPattern
from hpml_orchestrator.records.files import read_json, read_text_or_nothing
from hpml_orchestrator.runs.facts import ranks_of
from hpml_orchestrator.runs.history import RunHistory, read_history
from hpml_orchestrator.runs.reporting.description import Hours, hours_of, last_result
from hpml_orchestrator.runs.reporting.monitor import (
    JOULES_PER_KWH,
    aggregate_nodes,
    monitored_nodes,
    numbers,
)
from hpml_orchestrator.runs.reporting.summary import Summary, binding_of, node_topology, summarise

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.sweeps.plan import Shape, SweepPlan

TEST_ACCURACIES = ("test_accuracy", "eval_accuracy", "evaluation_accuracy")
"""Figures of a result that are the accuracy on data that the training does not see."""

DEFAULT_METRICS = ("validation_accuracy", "test_accuracy")
"""What a sweep chooses by if its file names no metric: the first that its runs report."""

_SETUP = ("start-up", "staging", "launch", "rendezvous", "preparation", "warm-up")
_EVALUATED = "accuracy of the last evaluation"


Requeued: TypeAlias = Mapping[str, Any]
_Evaluation: TypeAlias = tuple[float | None, float, float | None]  # seconds, accuracy, epoch


@dataclass(frozen=True)
class PointRow:
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
    # Seconds by name: the phases of `runs.summary.Phase` of the last attempt, without gaps;
    # `evaluation` and `checkpoint` lie within training.
    phases: Mapping[str, float] = field(default_factory=dict)
    # From start to end without the queue: the headline, staging and I/O included, with the
    # attempts whose work the last one continues from a checkpoint.
    total_seconds: float | None = None
    training_seconds: float | None = None  # warm-up and training, as the program reports them
    samples_per_second: float | None = None  # of all ranks, steady state
    data_wait_ratio: float | None = None  # share of the step time spent waiting for data
    accuracy: float | None = None
    # What the program calls it; see `TEST_ACCURACIES`. Empty in rows of earlier versions.
    accuracy_name: str = ""
    diverged: str = ""  # the accuracy or loss that is not finite, as `test_loss is NaN`
    # Of each evaluation that was better than all before: seconds since the warm-up began, and its
    # accuracy. Empty if none was reported, or if the run continues one that Slurm requeued.
    evaluations: Sequence[tuple[float, float]] = ()
    seconds_to_accuracy: float | None = None  # None if the target was not reached
    epochs_to_target: float | None = None  # of the evaluation that first reached `target_accuracy`
    target_accuracy: float | None = None  # to which `seconds_to_accuracy` belongs: the program's
    evaluation_every: float | None = None  # epochs
    metric: float | None = None  # the figure that a search optimises and a grid is ranked by
    metric_name: str = ""  # what the program calls it. Empty in rows of earlier versions.
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
    # Cores allocated for each core requested; None if that was not recorded, and the hours are
    # those of the request.
    allocated: float | None = None
    # Starts that were requeued within this one: `started`, `ended`, `nodes`, `reason`, `seconds`,
    # and `continued` if the next one continues their work. The hours include theirs.
    requeued: Sequence[Requeued] = ()
    energy_kwh: float | None = None  # of the GPUs, if measured
    gpu_active: float | None = None  # mean share of the time in which the GPUs computed
    # Share of the training in which other processes had the CPUs of the rank that lacked them most.
    cpu_contention: float | None = None
    # Whether a node had staged data already, so that not all of its copying is in the times; None
    # if nothing was staged.
    data_reused: bool | None = None
    binding: str = ""  # its verdict in one line
    verified: bool | None = None  # whether all ranks were bound as planned
    oversubscribed: bool = False  # whether there were more ranks than cores of a machine
    device: str = ""  # what it computed on
    result: Mapping[str, object] = field(default_factory=dict)  # everything the training reported
    code: str = ""  # commit, with `+dirty-<digest>` for uncommitted changes
    environment: str = ""  # digest of interpreter, modules and variables
    hardware: str = ""  # CPU and GPU models of the nodes


def setup_seconds(phases: Mapping[str, float]) -> float:
    """Return the seconds until the training begins, without the queue."""
    return sum(phases.get(name, 0.0) for name in _SETUP)


def is_time_to_target(figure: str) -> bool:
    """Return whether a figure of the results is the time until a run reached a target."""
    return figure.startswith(("seconds_to_", "time_to_"))


def objective(row: PointRow, name: str) -> float | None:
    """Return one of several figures that a sweep compares, if the run has it.

    Every run has the figures `total_seconds` and, if it counts, `samples_per_second`.
    """
    known = {name: getattr(row, name) for name in ("total_seconds", "samples_per_second")}
    return numbers(row.result).get(name, known.get(name))


def metric_name(plan: SweepPlan, rows: Iterable[PointRow]) -> str:
    """Return the figure that a sweep chooses by; empty until a run decides it.

    The sweep file names it, else the first complete run that reports one. All runs have the same:
    a validation accuracy cannot be compared with a test accuracy.
    """
    ended = (row for row in rows if row.state == "COMPLETED" and row.metric is not None)
    return plan.spec.search.metric_name or next((row.metric_name for row in ended), "")


def row_of(
    plan: SweepPlan, shape: Shape, key: tuple[int, int], state: State, metric: str = ""
) -> PointRow:
    """Return the row of a start that is over, from its run's records and its task's last state.

    Args:
        plan: the plan.
        shape: the point's shape.
        key: the numbers of the point and of the start.
        state: the task's last state.
        metric: see `metric_name`; empty if this run decides it.
    """
    shared, hours = _shared(state.submission.at(None)), None
    try:
        summary, attempts = summarise(state), state.run.attempts()
        asked = shared.job.resources
        hours, life = hours_of(state, asked, now=state.ended), read_history(state, summary)
        placed = _placed(state, attempts[-1], shape) if attempts else _Placed()
    except RecordError as error:  # damaged: the row has the reason, and the sweep continues
        state = replace(state, reason=state.reason or str(error))
        summary, attempts, placed, life = Summary(), [], _Placed(), None
    result: Mapping[str, object] = {}
    with contextlib.suppress(RecordError):
        result = last_result(state, summary)
    told = numbers(result)
    phases = {phase.name: phase.seconds for phase in summary.phases}
    for name in ("evaluation", "checkpoint"):
        if f"{name}_seconds" in told:
            phases[name] = told[f"{name}_seconds"]
    begun = attempts[0].started if attempts else None
    took = None if state.started is None or state.ended is None else state.ended - state.started
    requeued = [_requeued(attempt) for attempt in attempts[:-1]]
    hours = hours or Hours(0.0, 0.0, "requested", 0)
    given = numbers(dict(begun.data)) if begun else {}
    cores = given.get("cpus") or shape.cores
    continued = _continued(life, requeued)
    earlier = math.fsum(start["seconds"] for start in continued)
    requeued = [{**one, "continued": True} if one in continued else one for one in requeued]
    evaluations = _evaluations(attempts)
    name, accuracy = _accuracy(told, evaluations)
    # The script's own clock is finer than the scheduler's.
    own = math.fsum(phase.seconds for phase in summary.phases if phase.name != "queue")
    usual = next((name for name in DEFAULT_METRICS if name in told), DEFAULT_METRICS[-1])
    wanted = plan.spec.search.metric
    metric = plan.spec.search.metric_name or metric or usual
    diverged = lost_figure(result, metric)
    if accuracy is not None and not math.isfinite(accuracy):
        diverged = diverged or f"{name} is NaN"
    whole = {name: int(value) for name, value in {**numbers(summary.last_step), **told}.items()}
    per_rank = whole.get("batch_size_per_rank")
    total = (own or took or 0.0) + earlier or None
    own_figures = {"samples_per_second": summary.samples_per_second, "total_seconds": total}
    world = whole.get("world_size") or summary.world_size or None
    energy_kwh, gpu_active = _monitored(summary, attempts[:-1])
    return PointRow(
        *key,
        run=state.submission.label,
        job_id=state.job_id,
        state=state.state,
        reason=state.reason,
        over=True,
        attempts=len(attempts),
        queued=shared.queued,
        started=state.started or (begun.time if begun else None),
        ended=state.ended,
        phases=phases,
        total_seconds=total,
        training_seconds=told.get("train_seconds"),
        samples_per_second=summary.samples_per_second or told.get("samples_per_second"),
        data_wait_ratio=summary.data_wait_ratio,
        accuracy=None if diverged else accuracy,
        accuracy_name=name,
        diverged=diverged,
        evaluations=_best_so_far(evaluations),
        seconds_to_accuracy=told.get("seconds_to_accuracy"),
        epochs_to_target=_epochs_to(told.get("target_accuracy"), evaluations),
        target_accuracy=told.get("target_accuracy"),
        evaluation_every=told.get("eval_every_epochs"),
        metric=(
            _last_match(wanted.pattern, state)
            if isinstance(wanted, MetricPattern)
            else told.get(metric, own_figures.get(metric))
        ),
        metric_name=metric,
        batch_per_rank=per_rank,
        batch_global=per_rank * world if per_rank and world else None,
        learning_rate=told.get("learning_rate"),
        steps=whole.get("steps") or (life.step if life else None) or whole.get("steps_total"),
        epochs=whole.get("epochs"),
        world_size=world,
        nodes=state.nodes,
        gpu_hours=hours.gpu,
        core_hours=hours.core,
        node_hours=hours.wall * shape.nodes,
        allocated=cores / shape.cores if "cpus" in given and shape.cores else None,
        requeued=requeued,
        energy_kwh=energy_kwh,
        gpu_active=gpu_active,
        cpu_contention=_contention(state, summary, shared.job),
        data_reused=any(one.reused for one in summary.stages) if summary.stages else None,
        device=str(result.get("device", "")),
        result=result,
        binding=summary.binding,
        verified=placed.verified,
        oversubscribed=placed.oversubscribed,
        code=shared.code,
        environment=shared.environment,
        hardware=placed.hardware,
    )


def _continued(life: RunHistory | None, requeued: Sequence[Requeued]) -> list[Requeued]:
    """Return the earlier starts whose work the last one continues, from a checkpoint.

    Starts before an attempt that began from scratch are not among them.
    """
    lived, found = life.attempts if life else (), []
    for before, after, start in reversed([*zip(lived, lived[1:], requeued, strict=False)]):
        # Only an unbroken chain of resumed attempts adds up to one training. Whatever came before
        # a fresh start was lost work.
        if not (after.resumed or before.goes_on):
            break
        found.append(start)
    return found


def _requeued(attempt: Attempt) -> Requeued:
    begun, record = attempt.started, attempt.ended or {}
    moment = record.get("time") or attempt.last_written
    ended = None if moment is None else float(moment)
    return {
        "started": begun.time if begun else None,
        "ended": ended,
        "nodes": str(begun.data.get("nodes", "")) if begun else "",
        "reason": str(record.get("reason") or ""),
        "seconds": max(0.0, ended - begun.time) if begun and ended is not None else 0.0,
    }


def _evaluations(attempts: Sequence[Attempt]) -> list[_Evaluation]:
    """Return time since the warm-up began, accuracy and epoch of the last attempt's evaluations.

    The accuracy is NaN after the training diverged. The time is None after a requeue: such a run
    may continue from a checkpoint, so the time of its training is unknown.
    """
    began, found = None, []
    for event in attempts[-1].milestones() if attempts else ():
        if event.event == "warm-up":
            began = min(event.time, event.time if began is None else began)
        if event.event == "evaluation" and not event.data.get("final"):
            known = ("validation_accuracy", *TEST_ACCURACIES, "accuracy")
            names = [name for name in known if name in event.data]
            data = numbers(dict(event.data))
            # The channel has null for NaN.
            epoch = data.get("epoch")
            found += [(event.time, data.get(name, math.nan), epoch) for name in names[:1]]
    if all(math.isnan(value) for _, value, _ in found):
        return []  # never measured, or no figure from the start
    start = None if len(attempts) > 1 else began
    return [
        (None if start is None else max(0.0, time - start), value, epoch)
        for time, value, epoch in sorted(found, key=itemgetter(0))
    ]


def _epochs_to(target: float | None, evaluations: Iterable[_Evaluation]) -> float | None:
    """Return the epoch whose evaluation first reached a target."""
    if target is None:
        return None
    return next((epoch for _, value, epoch in evaluations if value >= target), None)


def lost_figure(result: Mapping[str, object], metric: str, known: Collection[str] = ()) -> str:
    """Return which accuracy, loss or metric is not finite, as `test_loss is NaN`; else nothing.

    `known` are figures of other runs of the sweep, for which null counts too.
    """
    for name, value in result.items():
        # `target_loss` and `seconds_to_accuracy` say nothing about the model.
        is_aim = name.startswith("target_") or "_to_" in name
        is_judged = name.endswith(("accuracy", "loss", "perplexity")) and not is_aim
        is_lost = _is_not_finite(value) or (value is None and name in known)
        if is_lost and (is_judged or name == metric):
            return f"{name} is {'null' if value is None else value}"
    return ""


def _is_not_finite(value: object) -> bool:
    if isinstance(value, str):  # as `read_result` and the channel leave it
        with contextlib.suppress(ValueError):
            value = float(value)
    return isinstance(value, float) and not math.isfinite(value)


def _last_match(pattern: str, state: State) -> float | None:
    """Return the last number that a pattern finds in a line of a run's output."""
    found = None
    with (
        contextlib.suppress(RecordError, OSError),
        state.run.output.open(encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:  # an output may have gigabytes
            for match in re.finditer(pattern, line):
                with contextlib.suppress(ValueError, TypeError):
                    found = float(match[1])
    return found


def _best_so_far(evaluations: Sequence[_Evaluation]) -> tuple[tuple[float, float], ...]:
    """Return evaluations better than all earlier ones: they show when a target was met."""
    best, kept = -math.inf, []
    for time, value, _ in evaluations:
        if time is not None and value > best:
            best = value
            kept.append((round(time, 6), value))
    return tuple(kept)


def _accuracy(
    told: Mapping[str, float], evaluations: Sequence[_Evaluation]
) -> tuple[str, float | None]:
    """Return the name and value of a run's accuracy, preferably on test data.

    A result called `accuracy` may be that of the training set.
    """
    for name in TEST_ACCURACIES:
        if name in told:
            return name, told[name]
    if evaluations:
        return _EVALUATED, evaluations[-1][1]
    aims = {"target_accuracy", "seconds_to_accuracy"}
    others = [name for name in told if f"_{name}".endswith("_accuracy") and name not in aims]
    name = min(others, key=lambda name: (name != "accuracy", name), default="")
    return name, told.get(name)


class _Placed(NamedTuple):
    """How the ranks of a run were placed."""

    verified: bool | None = None
    oversubscribed: bool = False
    hardware: str = ""


def _placed(state: State, attempt: Attempt, shape: Shape) -> _Placed:
    judged = [place.right for place in binding_of(state).places if place.right is not None]
    records = attempt.bindings()
    # By machine: the nodes of a development cluster share one.
    ranks = Counter(str(record.get("host", "")) for record in records)
    nodes = {str(record.get("host", "")): str(record.get("node", "")) for record in records}
    oversubscribed, machines = shape.oversubscribed, set()
    for host, node in nodes.items():
        topology = node_topology(attempt, node)
        cores = len(topology.cores) if topology else 0
        if topology:
            parts = [_cpu_model(attempt, node), counted(cores, "core")]
            parts += [counted(len(topology.gpus), "GPU")] if topology.gpus else []
            machines.add(", ".join(filter(None, parts)))
        oversubscribed = oversubscribed or 0 < cores < ranks[host]
    verified = all(judged) if judged else None
    return _Placed(verified, oversubscribed, "; ".join(sorted(machines)))


def _cpu_model(attempt: Attempt, node: str) -> str:
    with contextlib.suppress(HpmlError, AttributeError):
        record = read_json(attempt.directory / "nodes" / f"{node}.topology.json")
        return str(record.get("cpu_model") or "")
    return ""


def _contention(state: State, summary: Summary, job: Job) -> float | None:
    with contextlib.suppress(ValueError):  # a damaged list of CPUs
        ranks = ranks_of(summary)
        return most_contended(Facts(state.submission.label, state.state, True, job, ranks=ranks))
    return None


def _monitored(summary: Summary, earlier: Sequence[Attempt]) -> tuple[float | None, float | None]:
    """Return energy (kWh) of all attempts and activity of the last one's GPUs, if monitored."""
    last = summary.monitor
    wholes = [last, *(aggregate_nodes(monitored_nodes(attempt)) for attempt in earlier)]
    figures = [gpu.figures for gpu in (last.gpus if last else ())]
    every = [gpu.figures for whole in wholes if whole for gpu in whole.gpus]
    joules = [gpu["energy_joules"] for gpu in every if "energy_joules" in gpu]
    active = [gpu.get("sm_active_ratio", gpu.get("utilization_ratio")) for gpu in figures]
    shares = [share for share in active if share is not None]
    return (
        math.fsum(joules) / JOULES_PER_KWH if joules else None,
        math.fsum(shares) / len(shares) if shares else None,
    )


class _Shared(NamedTuple):
    """What all tasks of a submission share."""

    job: Job
    queued: float | None
    code: str
    environment: str


# All tasks of an array share these facts; without the cache each of a thousand rows would read the
# submission again.
@functools.lru_cache(maxsize=16)
def _shared(submission: Submission) -> _Shared:
    record = submission.record()
    git = record["provenance"]["git"] or {}
    code = str(git.get("commit", ""))
    if git.get("dirty"):
        # Two runs of one commit may differ in uncommitted changes; the digest tells them apart.
        diff = read_text_or_nothing(submission.directory / "dirty.diff")
        digest = _digest("\n".join([diff, *git["untracked"]]))
        code += f"+dirty-{digest}"
    job = submission.requested_job()
    parts = [job.environment.to_json(), record["provenance"]["python"]]
    digest = _digest(json.dumps(parts, sort_keys=True))
    return _Shared(job, submission.started_at(), code, digest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
