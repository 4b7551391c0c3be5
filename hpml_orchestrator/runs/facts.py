"""Facts about a run for its diagnosis, from its own records and, for what they lack, Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.devices import specification
from hpml_orchestrator.diagnosis.model import (
    Facts,
    GpuFacts,
    NodeFacts,
    Peaks,
    RankFacts,
    StageFacts,
)
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.damage import Damage
from hpml_orchestrator.records.units import MIB
from hpml_orchestrator.runs.history import silence_of
from hpml_orchestrator.runs.reporting.description import describe, times_of
from hpml_orchestrator.runs.reporting.monitor import Monitored, MonitoredGpu, numbers
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.state import cluster_job, damage_error, damage_of, naming_damage
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.runs.prometheus import Prometheus
    from hpml_orchestrator.runs.reporting.description import Code
    from hpml_orchestrator.runs.reporting.summary import Summary
    from hpml_orchestrator.runs.state import State

_COUNTERS = (
    "seconds samples steps step_seconds data_wait_seconds transfer_seconds wait_seconds "
    "comm_seconds cpu_wait_seconds cpu_seconds helper_cpu_seconds loader_cpu_seconds "
    "python_cpu_seconds save_seconds evaluation_seconds measured_steps slowest_steps"
).split()
_GPU = (
    "utilization_ratio sm_active_ratio tensor_active_ratio dram_active_ratio memory_peak_bytes "
    "memory_total_bytes power_watts power_limit_watts"
).split()
_ACCURACY = ("accuracy", "loss")
_REPORTED = {"rendezvous", "preparation", "warm-up"}  # phases that begin when a rank reports them


def gather(
    state: State,
    *,
    prometheus: Prometheus | None = None,
    peaks: Peaks | None = None,
    summary: Summary | None = None,
    silence: str | None = None,
    now: float | None = None,
) -> Facts:
    """Return the facts about a run's last attempt; before its start only what it requested.

    Args:
        state: of the run, or of one task of an array.
        prometheus: asked for what the record lacks.
        peaks: what the nodes can do.
        summary: of its last attempt, if it was read already.
        silence: how long a running job has reported nothing, in words, if already known.
        now: seconds since the epoch; the clock when left out.

    Raises:
        RecordError: its records may not be read, or are damaged.
        PrometheusError: it gives no usable answer.
    """
    now = time.time() if now is None else now
    with naming_damage(state):
        attempt = state.run.newest()
        if attempt is not None and (found := damage_of(state, [attempt])):
            raise damage_error(state, found)
        silence = silence_of(state, now)[1] if silence is None else silence
        facts = replace(_facts(state, summary, now), peaks=peaks, silence=silence)
        # The run's own record wins: it covers exactly the attempt, while Prometheus samples every
        # few seconds and may have gaps.
        if prometheus is None or facts.nodes or attempt is None or not facts.elapsed_seconds:
            return facts
        begun = attempt.started
        ended = (state.started or (begun.time if begun else now)) + facts.elapsed_seconds
        cluster, job_id = cluster_job(attempt)
        seconds = facts.elapsed_seconds
        samples = prometheus.job_over(cluster, job_id, seconds=seconds, ended=ended)
        return replace(facts, nodes=_measured(samples, seconds))


def _facts(state: State, summary: Summary | None, now: float) -> Facts:
    job = state.submission.requested_job()
    asked = job.resources
    facts = Facts(
        run=state.submission.label,
        state=state.state,
        over=state.over,
        job=job,
        limit_seconds=asked.time,
        node_count=asked.nodes,
        gpu_count=asked.nodes * asked.gpu_count,
        core_count=asked.nodes * asked.cores,
        world_size=asked.world_size,
        monitored=job.monitor.enabled,
        reason=state.reason or (f"exit code {state.exit_code}" if state.exit_code else ""),
        on_slurm=state.backend == "slurm",
        attempts=state.attempts,
    )
    attempt = state.run.newest()
    if attempt is None:
        return facts
    begun = attempt.started
    allocated = numbers(begun.data) if begun else {}
    summary = summary or summarise(state)
    if unreadable := summary.bound.unreadable:
        binding = attempt.directory / "binding"
        damage = [Damage(binding / f"{one.node}.proof.json", one.why) for one in unreadable]
        raise damage_error(state, damage)
    started, ended = times_of(attempt, state, now=now)
    phases = {phase.name: phase.seconds for phase in summary.phases}
    described = describe(state, summary, now=now)
    stages = _stages(summary, job)
    averaged = numbers(summary.last_step)
    # without a limit of the scheduler, what was requested
    limit = own = float(asked.node_memory * MIB) or None
    if own is not None:
        limit = own + sum(stage.bytes or 0 for stage in stages if stage.target == "shm")
    facts = replace(
        facts,
        phases={name: seconds for name, seconds in phases.items() if name != "queue"},
        elapsed_seconds=max(0.0, ended - started) if started and ended else None,
        node_count=int(allocated.get("node_count", asked.nodes)),
        gpu_count=int(allocated.get("gpus", facts.gpu_count)),
        core_count=int(allocated.get("cpus", facts.core_count)),
        world_size=summary.world_size or facts.world_size,
        channel=bool(summary.training or summary.result or _REPORTED & phases.keys()),
        ranks=ranks_of(summary),
        nodes=[_node(node, attempt, limit) for node in summary.monitored],
        stages=stages,
        memory_bytes=own,
        achieved_flops=_flops(summary, facts.gpu_count),
        gradient_bytes=averaged.get("gradient_bytes"),
        gradient_buckets=int(averaged.get("gradient_buckets", 0)) or None,
        accuracy=_accuracy(summary),
        formulas=_formulas(summary),
        values=described.values,
        code=_code(described.code),
    )
    if stages:
        files, size = (
            sum(getattr(one, name) or 0 for one in stages) for name in ("files", "bytes")
        )
        facts = replace(facts, data_files=files, data_bytes=size)
    return facts


def _code(code: Code | None) -> str:
    return f"{code['commit'][:7]}{' + changes' if code['dirty'] else ''}" if code else ""


def ranks_of(summary: Summary) -> list[RankFacts]:
    """Return the counters and the binding of a run's ranks."""
    bound = summary.bound
    places = {place.rank: place for place in bound.places if place.rank >= 0}
    uuids = {rank.rank: rank.uuid for proof in bound.proofs for rank in proof.ranks}
    counters = {int(rank["rank"]): rank for rank in summary.training}
    if "sampled" in str(summary.last_step.get("comm_method")):
        # older copies of hpml_waits.py do not count how many steps they measured
        counters = {number: {"measured_steps": 0.0, **rank} for number, rank in counters.items()}
    saves = summary.timeline.saves if summary.timeline else {}
    ranks = []
    for number in sorted({*places, *counters}):
        counted = counters.get(number, {})
        known: dict[str, Any] = {name: counted[name] for name in _COUNTERS if name in counted}
        own = [counted[name] for name in counted if name.endswith("_seconds") and name not in known]
        rank = RankFacts(
            number,
            saves=len(saves.get(number, ())) or None,
            other_seconds=sum(own) if own else None,
            **known,
        )
        if place := places.get(number):
            rank = replace(
                rank,
                node=place.node,
                cpus=parse_list(place.cpus) if place.cpus else None,
                bound_as_planned=place.right,
                gpu=uuids.get(number) or place.gpu or "",
                binding_faults=place.wrong,
            )
        ranks.append(rank)
    return ranks


def _node(
    node: Monitored, attempt: Attempt | None = None, limit_bytes: float | None = None
) -> NodeFacts:
    figures = node.figures
    return NodeFacts(
        node=node.node,
        seconds=node.seconds or None,
        cpus=figures.get("cpus") or (attempt and _planned_cpus(attempt, node.node)) or None,
        mean_cpus=figures.get("mean_cpus"),
        memory_peak_bytes=figures.get("memory_peak_bytes"),
        memory_limit_bytes=figures.get("memory_limit_bytes") or limit_bytes,
        oom_events=figures.get("oom_events"),
        read_bytes=figures.get("io_read_bytes"),
        written_bytes=figures.get("io_write_bytes"),
        syscall_read_bytes=figures.get("io_syscall_read_bytes"),
        gpus_allocated=figures.get("gpus_allocated"),
        gpus=[_gpu(gpu) for gpu in node.gpus],
        gpus_used=figures.get("gpus_used"),
    )


def _measured(
    samples: Sequence[tuple[Mapping[str, str], float]], seconds: float
) -> list[NodeFacts]:
    """Return Prometheus' figures for a job's nodes, in the form that records have."""
    nodes: dict[str, dict[str, float]] = defaultdict(dict)
    names: dict[tuple[str, str], str] = {}
    # of each GPU by node and UUID: figures, and what is by reason or by XID
    of_gpus: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for labels, value in samples:
        name, node = labels["figure"], labels.get("node", "")
        if labels.get("of") != "gpu":
            nodes[node][name] = max(value, nodes[node].get(name, 0.0))
            continue
        key = node, labels["uuid"]
        names[key] = labels.get("name") or names.get(key, "")
        which = labels.get("reason") or labels.get("xid")
        group = name if name in ("throttled_seconds", "xid_errors") else "figures"
        of_gpus[key][group][which or name] = value
    gpus = {
        key: MonitoredGpu(key[1], names[key], seconds, **groups) for key, groups in of_gpus.items()
    }
    return [
        _node(
            Monitored(
                node=node,
                seconds=seconds,
                figures=figures,
                gpus=[gpu for (where, _), gpu in gpus.items() if where == node],
            )
        )
        for node, figures in nodes.items()
        if node
    ]


def _planned_cpus(attempt: Attempt, node: str) -> float | None:
    from hpml_orchestrator.placement.planfile import header  # noqa: PLC0415 - seldom needed

    with contextlib.suppress(ValueError, HpmlError):
        allowed = header(attempt.plans().get(node, "")).get("allowed", "")
        return float(len(parse_list(allowed))) or None
    return None


def _gpu(gpu: MonitoredGpu) -> GpuFacts:
    known: dict[str, Any] = {name: gpu.figures.get(name) for name in _GPU}
    return GpuFacts(
        gpu.uuid,
        gpu.name,
        seconds=gpu.seconds or None,
        throttled_seconds=dict(gpu.throttled_seconds),
        xid_errors=dict(gpu.xid_errors),
        **known,
    )


def _stages(summary: Summary, job: Job) -> list[StageFacts]:
    given = {entry.name: entry for entry in job.stage}
    return [
        StageFacts(
            name=one.name,
            source=given[one.name].source if one.name in given else "",
            target=given[one.name].target if one.name in given else "",
            seconds=one.seconds,
            bytes=one.bytes / max(1, one.nodes),
            files=one.files / max(1, one.nodes),
            reused=one.nodes > 0 and one.reused == one.nodes,
        )
        for one in summary.stages
    ]


def _flops(summary: Summary, gpu_count: int) -> float | None:
    """Return the FLOP/s of all ranks: reported per token or sample, else as MFU of a known GPU."""
    told = numbers({**summary.last_step, **summary.result})
    told.setdefault("samples_per_second", summary.samples_per_second or 0.0)
    for one, rate in (("token", "tokens_per_second"), ("sample", "samples_per_second")):
        if flops := told.get(f"flops_per_{one}", 0.0) * told.get(rate, 0.0):
            return flops
    gpus = [gpu for node in summary.monitored for gpu in node.gpus]
    peaks = specification(gpus[0].name) if gpus else None
    if "mfu" not in told or peaks is None or "bfloat16" not in peaks.flops:
        return None
    return told["mfu"] * peaks.flops["bfloat16"] * gpu_count


def _formulas(summary: Summary) -> dict[str, tuple[float, float]]:
    told = numbers(summary.result)
    pairs = {name: (value, told.get(f"{name}_formula")) for name, value in told.items()}
    return {name: (one, other) for name, (one, other) in pairs.items() if other is not None}


def _accuracy(summary: Summary) -> dict[str, float]:
    return {
        name: value
        for name, value in numbers(summary.result).items()
        if any(word in name for word in _ACCURACY) and not name.startswith(("target", "seconds"))
    }
