"""From facts to findings: what costs most first, then what could not be found out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis import balance, data, gpu, phases, resources
from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Finding
from hpml_orchestrator.diagnosis.shares import shares, steps_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.diagnosis.model import Facts

__all__ = ["FINDINGS", "diagnose"]

FINDINGS: tuple[Callable[[Facts], Finding | str | None], ...] = (
    data.waits_for_data,
    balance.slow_rank,
    balance.wrong_binding,
    balance.communication,
    data.host_to_device,
    gpu.tensor_cores_idle,
    gpu.launch_bound,
    gpu.cpu_bound,
    balance.throttled,
    gpu.faulty_gpu,
    gpu.memory_headroom,
    resources.memory_pressure,
    resources.gpu_unused,
    resources.cpus_unused,
    resources.memory_over_asked,
    resources.time_over_asked,
    data.slow_storage,
    data.slow_staging,
    phases.slow_start,
    phases.slow_saving,
    phases.slow_evaluation,
)
"""Each returns a finding, a sentence with figures if all is well, or None without data."""


def diagnose(facts: Facts) -> Diagnosis:
    """Return what holds a run back, what is as it should be, and what is not known."""
    results = [finding(facts) for finding in FINDINGS]
    found = [result for result in results if isinstance(result, Finding)]
    notes = [one for one in found if one.kind == "memory-headroom"]
    found = [one for one in found if one.kind != "memory-headroom"]
    # the sort is stable: of equal costs, the critical ones come first, in the order above
    found.sort(key=lambda one: (-(one.gain_hours or 0.0), one.level != "critical"))
    return Diagnosis(
        facts,
        tuple(found),
        tuple(_unknown(facts)),
        tuple(result for result in results if isinstance(result, str)),
        tuple(replace(one, level="note") for one in notes),
    )


def _unknown(facts: Facts) -> Iterator[Finding]:
    """Yield what could not be judged, one per source of data that is missing."""
    channel = "the channel in the training (`hpml_channel.py`)"
    if not facts.channel:
        yield _needs("waits-for-data", "what a step's time is spent on", channel)
    elif not steps_known(facts):
        why = "too few steps after the warm-up" if facts.over else "too few steps so far"
        yield _needs("waits-for-data", f"what a step's time is spent on: {why}", "a longer run")
    else:
        if not shares(facts, "data_wait_seconds"):
            needs = "`count(data_wait_seconds=…)` in the training"
            yield _needs("waits-for-data", "waiting for data", needs)
        if facts.world_size > 1:
            if not shares(facts, "wait_seconds"):
                needs = "`wait_seconds` from the channel"
                yield _needs("slow-rank", "which rank the others wait for", needs)
            if not shares(facts, "comm_seconds"):
                needs = "`comm_seconds` from the channel"
                yield _needs("communication", "communication", needs)
        if facts.gpu_count and not shares(facts, "transfer_seconds"):
            needs = "`transfer_seconds` from the channel"
            yield _needs("host-to-device", "copies to the GPU", needs)
    monitor = Change("monitor the job", "monitor", True)
    if not facts.nodes:
        what = "use of GPUs, CPUs and memory" if facts.gpu_count else "use of CPUs and memory"
        kind = "gpu-unused" if facts.gpu_count else "cpus-unused"
        needs = "figures of its monitor" if facts.monitored else "`monitor: true`"
        yield Finding(
            kind, "unknown", what, changes=[] if facts.monitored else [monitor], needs=needs
        )
    elif facts.gpu_count:
        gpus = [one for node in facts.nodes for one in node.gpus]
        if not gpus:
            yield _needs("gpu-unused", "use of the GPUs", "a node whose NVML answers")
        elif all(one.sm_active_ratio is None for one in gpus):
            needs = "Hopper or newer GPUs, or DCGM"
            yield _needs("tensor-cores-idle", "use of SMs and tensor cores", needs)
    if facts.ranks and all(rank.bound_as_planned is None for rank in facts.ranks):
        if (facts.job.get("binding") or {}).get("policy") == "none":
            needs = "`binding.policy: gpu-local`"
        else:
            needs = "`binding.verify: warn`, and ranks that run for over 10 s"
        yield _needs("wrong-binding", "where the ranks ran", needs)


def _needs(kind: str, what: str, needs: str) -> Finding:
    return Finding(kind, "unknown", what, needs=needs)
