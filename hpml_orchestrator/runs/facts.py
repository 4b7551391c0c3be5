"""Facts about a run for its diagnosis, from its own records and, for what they lack, Prometheus."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.model import (
    Facts,
    GpuFacts,
    NodeFacts,
    Peaks,
    RankFacts,
    StageFacts,
)
from hpml_orchestrator.errors import HpmlError, RecordError
from hpml_orchestrator.runs.monitored import numbers
from hpml_orchestrator.runs.summary import Timeline, binding_of, summarise
from hpml_orchestrator.spec.values import parse_gpus, parse_time
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.monitored import Gpu, Monitored
    from hpml_orchestrator.runs.prometheus import Prometheus
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.runs.summary import Summary

__all__ = ["gather"]

_COUNTERS = (
    "samples steps step_seconds data_wait_seconds transfer_seconds wait_seconds comm_seconds "
    "save_seconds evaluation_seconds"
).split()
_GPU = (
    "utilization_ratio sm_active_ratio tensor_active_ratio dram_active_ratio memory_peak_bytes "
    "memory_total_bytes power_watts power_limit_watts"
).split()
_ACCURACY = ("accuracy", "loss")


def gather(
    state: State,
    *,
    prometheus: Prometheus | None = None,
    peaks: Peaks | None = None,
    now: float | None = None,
) -> Facts:
    """Return what is known of a run's last attempt; before its start only what it asked for.

    Args:
        state: of the run, or of one task of an array.
        prometheus: asked for what the record lacks.
        peaks: what the nodes can do.
        now: seconds since the epoch; the clock when left out.

    Raises:
        RecordError: its records may not be read, or are damaged.
    """
    now = time.time() if now is None else now
    try:
        return _facts(state, prometheus, peaks, now)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        where = state.submission.directory
        raise RecordError(f"a record in {where} is damaged: {error!r}") from error


def _facts(state: State, prometheus: Prometheus | None, peaks: Peaks | None, now: float) -> Facts:
    job: Mapping[str, Any] = state.submission.record()["job"]
    asked = job["resources"]
    gpus = parse_gpus(asked["gpus"]).count
    nodes, per_node = int(asked["nodes"]), asked["ranks_per_node"]
    ranks = int(per_node or gpus * int(asked["ranks_per_gpu"]) or 1)
    facts = Facts(
        run=state.submission.label,
        state=state.state,
        over=state.over,
        job=job,
        limit_seconds=float(parse_time(asked["time"])),
        node_count=nodes,
        gpu_count=nodes * gpus,
        core_count=nodes * ranks * int(asked["cpus_per_rank"]),
        world_size=nodes * ranks,
        monitored=bool(job["monitor"]["enabled"]),
        peaks=peaks,
    )
    attempt = state.run.newest()
    if attempt is None:
        return facts
    begun = attempt.started
    allocated = numbers(begun.data) if begun else {}
    summary, timeline = summarise(state), Timeline(attempt.milestones())
    started = state.started or (begun.time if begun else None)
    ended = state.ended or (attempt.ended or {}).get("time")
    ended = ended or (attempt.last_written if state.over or state.lost else now)
    phases = {phase.name: phase.seconds for phase in summary.phases}
    facts = replace(
        facts,
        phases={name: seconds for name, seconds in phases.items() if name != "queue"},
        elapsed_seconds=max(0.0, ended - started) if started and ended else None,
        node_count=int(allocated.get("node_count", nodes)),
        gpu_count=int(allocated.get("gpus", facts.gpu_count)),
        core_count=int(allocated.get("cpus", facts.core_count)),
        world_size=summary.world_size or facts.world_size,
        channel=bool(timeline.steps or timeline.result),
        ranks=_ranks(state, timeline),
        nodes=[_node(node, attempt) for node in summary.monitored],
        stages=_stages(summary, job),
        accuracy=_accuracy(summary),
    )
    if facts.stages:
        facts = replace(
            facts,
            data_files=sum(stage.files or 0 for stage in facts.stages),
            data_bytes=sum(stage.bytes or 0 for stage in facts.stages),
        )
    return facts


def _ranks(state: State, timeline: Timeline) -> list[RankFacts]:
    """Return the counters of each rank since its warm-up, and where it ran."""
    places = {place.rank: place for place in binding_of(state).places if place.rank >= 0}
    uuids = {
        rank.rank: rank.uuid or rank.gpu or "" for p in binding_of(state).proofs for rank in p.ranks
    }
    ranks = []
    for number in sorted({*places, *timeline.steps}):
        known: dict[str, Any] = {}
        if number in timeline.steps:
            first, last = (numbers(event.data) for event in timeline.steps[number])
            known = {
                name: max(0.0, last[f"{name}_total"] - first.get(f"{name}_total", 0.0))
                for name in _COUNTERS
                if f"{name}_total" in last
            }
            known["node"] = timeline.steps[number][1].node
        if place := places.get(number):
            known |= {
                "node": place.node,
                "cpus": parse_list(place.cpus) if place.cpus else None,
                "bound_as_planned": place.right,
                "gpu": uuids.get(number) or place.gpu or "",
                "binding_faults": place.wrong,
            }
        ranks.append(RankFacts(number, **known))
    return ranks


def _node(node: Monitored, attempt: Attempt) -> NodeFacts:
    figures = node.figures
    return NodeFacts(
        node=node.node,
        seconds=node.seconds or None,
        cpus=figures.get("cpus") or _planned_cpus(attempt, node.node),
        mean_cpus=figures.get("mean_cpus"),
        memory_peak_bytes=figures.get("memory_peak_bytes"),
        memory_limit_bytes=figures.get("memory_limit_bytes"),
        oom_events=figures.get("oom_events"),
        read_bytes=figures.get("io_read_bytes"),
        written_bytes=figures.get("io_write_bytes"),
        syscall_read_bytes=figures.get("io_syscall_read_bytes"),
        gpus_allocated=figures.get("gpus_allocated"),
        gpus=[_gpu(gpu) for gpu in node.gpus],
        gpus_used=figures.get("gpus_used"),
    )


def _planned_cpus(attempt: Attempt, node: str) -> float | None:
    """Return the number of CPUs that the plan of a node gives to its ranks."""
    from hpml_orchestrator.placement.planfile import header  # noqa: PLC0415 - seldom needed

    with contextlib.suppress(ValueError, HpmlError):
        allowed = header(attempt.plans().get(node, "")).get("allowed", "")
        return float(len(parse_list(allowed))) or None
    return None


def _gpu(gpu: Gpu) -> GpuFacts:
    known: dict[str, Any] = {name: gpu.figures.get(name) for name in _GPU}
    return GpuFacts(
        gpu.uuid,
        gpu.name,
        seconds=gpu.seconds or None,
        throttled_seconds=dict(gpu.throttled_seconds),
        xid_errors=dict(gpu.xid_errors),
        **known,
    )


def _stages(summary: Summary, job: Mapping[str, Any]) -> list[StageFacts]:
    given = {entry["name"]: entry for entry in job["stage"]}
    return [
        StageFacts(
            name=one.name,
            source=str(given.get(one.name, {}).get("source", "")),
            target=str(given.get(one.name, {}).get("target", "")),
            seconds=one.seconds,
            bytes=one.bytes / max(1, one.nodes),
            files=one.files / max(1, one.nodes),
            reused=one.nodes > 0 and one.reused == one.nodes,
        )
        for one in summary.stages
    ]


def _accuracy(summary: Summary) -> dict[str, float]:
    """Return the final figures of the result about the model's quality."""
    return {
        name: value
        for name, value in numbers(summary.result).items()
        if any(word in name for word in _ACCURACY) and not name.startswith(("target", "seconds"))
    }
