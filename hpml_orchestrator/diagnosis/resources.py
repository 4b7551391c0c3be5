"""Findings about requested resources: memory that runs out, and resources that are not used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    busy_cpus,
    find,
    hours,
    is_idle,
    is_judged,
    nodes_text,
    steps_known,
)
from hpml_orchestrator.diagnosis.thresholds import SEEN_SECONDS, THRESHOLDS
from hpml_orchestrator.records.texts import human_bytes, seconds_text
from hpml_orchestrator.records.units import MIB

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts, Finding, GpuFacts

_GIB = 1 << 30
_RESERVE = 1.3  # memory, cores and time that a right-sized job still has to spare
_SMALL_BYTES = 8 * _GIB
_FEW_CPUS = 1.0
_FULL_GPU = 0.97


def memory_pressure(facts: Facts) -> Finding | str | None:
    """Return whether memory ran out, or nearly did, on a node or on a GPU."""
    known = [
        (node.memory_peak_bytes / node.memory_limit_bytes, node)
        for node in facts.nodes
        if node.memory_peak_bytes and node.memory_limit_bytes
    ]
    killed = [node for node in facts.nodes if node.oom_events]
    if facts.state == "OUT_OF_MEMORY" or killed:
        peak = max((node.memory_peak_bytes or 0 for node in facts.nodes), default=0)
        limit = max((node.memory_limit_bytes or 0 for node in facts.nodes), default=0)
        nodes = f" on {nodes_text([node.node for node in killed])}" if killed else ""
        evidence = ["100% of the memory"]
        if peak:
            evidence.append(f"{human_bytes(peak)} used at most")
        lost = hours(facts) if facts.over and facts.state != "COMPLETED" else None
        return find(
            facts,
            "memory-pressure",
            1.0,
            f"out of memory{nodes}: the kernel ended a process",
            evidence,
            _more_memory(facts, max(peak, limit)),
            free_hours=lost,
        )
    gpu, share = _fullest(facts)
    if gpu is not None and share >= _FULL_GPU:
        text = f"{human_bytes(gpu.memory_peak_bytes or 0)} of GPU memory used at most"
        changes = [
            Change("a smaller batch per rank, with gradient accumulation", touches_accuracy=True),
            Change("activation checkpointing, or FSDP (`hpml advise`)"),
        ]
        verdict = f"GPU memory is nearly full: {share:.0%}"
        return find(facts, "memory-pressure", min(share, 0.969), verdict, [text], changes)
    if not known:
        return None
    share, node = max(known, key=lambda item: item[0])
    peak, limit = node.memory_peak_bytes or 0, node.memory_limit_bytes or 0
    text = f"{human_bytes(peak)} of {human_bytes(limit)} on {node.node}: {share:.0%}"
    changes = _more_memory(facts, limit)
    verdict = f"memory is nearly full: {share:.0%} of the limit on {node.node}"
    found = find(facts, "memory-pressure", share, verdict, [text], changes)
    return found or f"memory {share:.0%} of its limit at most"


def _fullest(facts: Facts) -> tuple[GpuFacts | None, float]:
    known = [
        (gpu, gpu.memory_peak_bytes / gpu.memory_total_bytes)
        for node in facts.nodes
        for gpu in node.gpus
        if gpu.memory_peak_bytes and gpu.memory_total_bytes
    ]
    return max(known, key=lambda item: item[1], default=(None, 0.0))


def _more_memory(facts: Facts, limit: float) -> list[Change]:
    in_ram = _staged_in_ram(facts)
    limit = limit or (facts.memory_bytes or 0.0)
    most = None if facts.node_memory_bytes is None else facts.node_memory_bytes - in_ram
    less = Change("fewer loader workers, or smaller prefetch, take less memory")
    if not limit or most is None:
        text = "ask for more memory per node (`resources.memory`), if a node has it: "
        unknown = "how much was used" if not limit else "the size of a node"
        return [Change(f"{text}{unknown} is not recorded"), less]
    # hpml adds data staged to /dev/shm to the requested memory, so `resources.memory` is what
    # remains for the program.
    wanted = limit * _RESERVE - in_ram
    if _GIB * math.ceil(wanted / _GIB) > most:
        wanted = _GIB * math.floor(most / _GIB)
    if wanted + in_ram <= limit:
        return [less, Change("use more nodes, or nodes with more memory: these have no more")]
    return [_asking_for(facts, wanted), less]


def _asking_for(facts: Facts, count: float) -> Change:
    """Return the change to so many bytes of memory per node."""
    asked = facts.job.resources
    if asked.memory_per_cpu:
        size = f"{max(1, math.ceil(count / asked.cores / MIB))}M"
        return Change(f"ask for {size} per CPU", "resources.memory_per_cpu", size)
    size = _size(count)
    return Change(f"ask for {size} per node", "resources.memory", size)


def _staged_in_ram(facts: Facts) -> float:
    return sum(stage.bytes or 0.0 for stage in facts.stages if stage.target == "shm")


def _size(count: float) -> str:
    return f"{max(1, math.ceil(count / _GIB))}G"


def gpu_unused(facts: Facts) -> Finding | str | None:
    """Return allocated GPUs that no process of the job opened, or that never worked."""
    if not facts.gpu_count or not _has_worked(facts):
        return None
    unused, known, nodes = 0.0, 0.0, []
    for node in facts.nodes:
        allocated = max(node.gpus_allocated or 0.0, len(node.gpus))
        idle = sum(map(is_idle, node.gpus))
        missing = 0.0 if node.gpus_used is None else allocated - node.gpus_used
        count = max(float(idle), missing)
        known += allocated
        if count >= 1:
            nodes.append(node.node)
        unused += count
    if not known:
        return None
    if not nodes:
        return f"{known:.0f} of {known:.0f} GPUs have work"
    each = int(known / len(facts.nodes))
    needed = max(each - int(unused / len(facts.nodes)), 1 if unused < known else 0)
    asked = facts.job.resources
    kinds = asked.gpus.kinds
    kind = kinds[0][0] if kinds else ""
    changes = []
    if len(kinds) <= 1 and needed < each:
        value = f"{kind}:{needed}" if kind and needed else needed
        also = {}
        ranks = asked.ranks_per_node
        if ranks and needed and ranks > needed * asked.ranks_per_gpu:
            also = {"resources.ranks_per_node": needed}
        changes.append(
            Change(f"ask for {needed} GPUs per node", "resources.gpus", value, also=also)
        )
    changes.append(Change("or start a rank on each GPU: `resources.ranks_per_node`"))
    return find(
        facts,
        "gpu-unused",
        unused,
        f"{unused:.0f} of {known:.0f} GPUs unused",
        [f"{unused:.0f} GPUs without work on {nodes_text(nodes)}"],
        changes,
        free_hours=unused * (facts.elapsed_seconds or 0.0) / 3600,
    )


def _has_worked(facts: Facts) -> bool:
    # A run that failed early had no chance to use its GPUs; its failure is the finding.
    if facts.over and facts.state != "COMPLETED":
        return False
    seconds = max((node.seconds or 0.0 for node in facts.nodes), default=0.0)
    runs = "training" in facts.phases or "running" in facts.phases
    return steps_known(facts) or (runs and seconds >= SEEN_SECONDS)


def cpus_unused(facts: Facts) -> Finding | str | None:
    """Return whether most of the allocated CPUs were idle."""
    known = busy_cpus(facts)
    if known is None:
        return None
    busy, cpus, nodes = known
    share, ranks = busy / cpus, max(1, facts.world_size)
    if not is_judged(facts) or cpus - busy < _FEW_CPUS * nodes:
        if THRESHOLDS["cpus-unused"].level(share):
            return None  # what is not judged is not praised either
        return f"{busy:.1f} of {cpus:.0f} CPUs busy"
    per_rank = facts.job.resources.cpus_per_rank
    # binding keeps a core for each loader worker that the job file names
    workers = facts.job.binding.loader_workers
    needed = max(1 + workers, math.ceil(busy / ranks * _RESERVE))
    if needed >= per_rank:
        return f"{busy:.1f} of {cpus:.0f} CPUs busy"
    text = f"ask for {needed} CPUs per rank instead of {per_rank}"
    changes = [Change(text, "resources.cpus_per_rank", needed)]
    idle = (per_rank - needed) * ranks * (facts.elapsed_seconds or 0.0) / 3600
    evidence = [f"{share:.0%} of {cpus:.0f} CPUs busy", f"about {idle:.2g} core-hours were idle"]
    verdict = f"CPUs unused: {share:.0%} of {cpus:.0f} busy"
    found = find(
        facts,
        "cpus-unused",
        share,
        verdict,
        evidence,
        changes,
        free_hours=None if facts.gpu_count else idle,
    )
    return found or f"{busy:.1f} of {cpus:.0f} CPUs busy"


def memory_over_asked(facts: Facts) -> Finding | None:
    """Return whether a job asked for several times the memory that it used."""
    asked = facts.job.resources.node_memory
    known = [
        (node.memory_peak_bytes, node.memory_limit_bytes)
        for node in facts.nodes
        if node.memory_peak_bytes and node.memory_limit_bytes
    ]
    if not asked or not is_judged(facts) or len(known) < max(1, facts.node_count):
        return None
    peak, limit = max(peak for peak, _ in known), max(limit for _, limit in known)
    if limit < _SMALL_BYTES:
        return None
    wanted = max(0.0, peak - _staged_in_ram(facts)) * _RESERVE
    return find(
        facts,
        "memory-over-asked",
        limit / peak,
        f"memory asked for: {limit / peak:.0f} times what was used",
        [f"{limit / peak:.1f} times the peak", f"{human_bytes(peak)} of {human_bytes(limit)}"],
        [_asking_for(facts, wanted)],
    )


def time_over_asked(facts: Facts) -> Finding | None:
    """Return whether a job asked for many times the time that it took."""
    limit, took = facts.limit_seconds, facts.elapsed_seconds
    if not limit or not took or not facts.over or not is_judged(facts):
        return None
    minutes = math.ceil(took * 1.5 / 60)
    value = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    text = f"{limit / took:.0f} times the run: {seconds_text(took)} of {seconds_text(limit)}"
    return find(
        facts,
        "time-over-asked",
        limit / took,
        f"time limit: {limit / took:.0f} times what the run took",
        [text, "shorter jobs fit into gaps of the schedule, and start sooner"],
        [Change(f"ask for {value}", "resources.time", value)],
    )
