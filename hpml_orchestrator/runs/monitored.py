"""What a run's monitor saw: GPUs, CPUs, memory and I/O, per node and of all nodes together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.runs.texts import seconds_text
from hpml_orchestrator.staging.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.store import Attempt

__all__ = ["Gpu", "Monitored", "joined", "monitor_lines", "monitored_nodes", "together"]

_ENDING = ".monitor.json"
_SHOWN_NODES = 8
_MISSING_SECONDS = 15.0
_IO = ("io_read_bytes", "io_write_bytes", "io_syscall_read_bytes", "io_syscall_write_bytes")
_SUMS = ("cpu_seconds", "mean_cpus", "cpus", *_IO, "oom_events")
_PEAKS = ("memory_peak_bytes", "memory_with_cache_peak_bytes", "memory_limit_bytes")
_GPU_SUMS = ("gpus_allocated", "gpus_used")
_WATT_SECONDS_PER_KWH = 3.6e6
_HALF_GPU = 0.5


@dataclass(frozen=True)
class Gpu:
    """One GPU of a run on one node, or several taken together.

    Attributes:
        uuid, name: of the GPU; empty where several are meant.
        seconds: how long it was watched.
        figures: those that the driver tells: `utilization_ratio` (share of the time in which a
            kernel was resident), `busy_seconds`, `sm_active_ratio`, `tensor_active_ratio`,
            `dram_active_ratio`, `power_watts` (all means), `energy_joules`, `memory_peak_bytes`,
            `temperature_peak_celsius`.
        throttled_seconds: by reason.
        xid_errors: how many, by XID.
    """

    uuid: str = ""
    name: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)
    xid_errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Monitored:
    """What a monitor saw of a run on one node, or on all of them.

    Attributes:
        node: its name; empty where all nodes are meant.
        nodes: how many were monitored.
        seconds: how long, on the node that was watched longest.
        updated: when it was last written down, seconds since the epoch.
        figures: `cpu_seconds`, `mean_cpus`, `cpus`, `memory_peak_bytes` (without the page cache; of
            all nodes: on the one that had most), `memory_with_cache_peak_bytes` (the kernel's),
            `memory_limit_bytes`, `io_read_bytes` and `io_write_bytes` (storage),
            `io_syscall_read_bytes` and `io_syscall_write_bytes` (all that was read and written),
            `oom_events`, `gpus_allocated`, `gpus_used`.
        training: what its ranks told: `samples`, `steps`, `data_wait_seconds`, `comm_seconds`.
        gpus: each GPU.
    """

    node: str = ""
    nodes: int = 1
    seconds: float = 0.0
    updated: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    training: Mapping[str, float] = field(default_factory=dict)
    gpus: Sequence[Gpu] = ()


def monitored_nodes(attempt: Attempt) -> list[Monitored]:
    """Return what each node's monitor wrote down, by node; what is damaged is passed over."""
    found = []
    for path in sorted((attempt.directory / "nodes").glob(f"*{_ENDING}")):
        try:
            record = read_json(path)
        except (NotFoundError, RecordError):
            continue
        gpus = record.get("gpus")
        found.append(
            Monitored(
                node=path.name[: -len(_ENDING)],
                seconds=_figures(record).get("seconds", 0.0),
                updated=_figures(record).get("updated", 0.0),
                figures=_figures(record.get("job")),
                training=_figures(record.get("training")),
                gpus=[_gpu(one) for one in gpus if isinstance(one, dict)]
                if isinstance(gpus, list)
                else [],
            )
        )
    return found


def together(nodes: Sequence[Monitored]) -> Monitored | None:
    """Return the figures of all nodes; None where no node was monitored.

    CPU time, I/O, energy and counts are added up. Memory is that of the node that had most.
    """
    if not nodes:
        return None
    sums = {
        name: sum(one.figures[name] for one in nodes if name in one.figures)
        for name in (*_SUMS, *_GPU_SUMS)
        if any(name in one.figures for one in nodes)
    }
    peaks = {
        name: max(one.figures[name] for one in nodes if name in one.figures)
        for name in _PEAKS
        if any(name in one.figures for one in nodes)
    }
    training: dict[str, float] = {}
    for one in nodes:
        for name, value in one.training.items():
            if name in ("samples", "steps") or name.endswith("_seconds"):
                training[name] = training.get(name, 0.0) + value
    return Monitored(
        nodes=len(nodes),
        seconds=max(one.seconds for one in nodes),
        updated=min(one.updated for one in nodes),
        figures={**sums, **peaks},
        training=training,
        gpus=[gpu for one in nodes for gpu in one.gpus],
    )


def monitor_lines(
    nodes: Sequence[Monitored], *, ready: Sequence[str] = (), ended: float | None = None
) -> list[str]:
    """Return what to tell: a line of all nodes, one per node where they are few, and what is odd.

    Args:
        nodes: what was seen.
        ready: names of the nodes that the run had.
        ended: when it was over; None while it runs.
    """
    whole = together(nodes)
    if whole is None:
        return []
    lines = [_line(whole)]
    if 1 < len(nodes) <= _SHOWN_NODES:
        lines += [f"{one.node}: {_line(one)}" for one in nodes]
    left = sorted(set(ready) - {one.node for one in nodes})
    if left:
        shown = ", ".join(left[:_SHOWN_NODES]) + " …" * (len(left) > _SHOWN_NODES)
        lines.append(f"nothing is known of {shown}")
    missing = 0.0 if ended is None else ended - whole.updated
    if missing > _MISSING_SECONDS:
        lines.append(f"the last {seconds_text(missing)} are missing: the monitor did not end well")
    return lines


def joined(gpus: Sequence[Gpu]) -> Gpu:
    """Return several GPUs as one: means over their time, sums of energy, the largest peaks."""
    figures: dict[str, float] = {}
    for name in {name for one in gpus for name in one.figures}:
        told = [(one.figures[name], one.seconds) for one in gpus if name in one.figures]
        if name in ("busy_seconds", "energy_joules"):
            figures[name] = sum(value for value, _ in told)
        elif "_peak_" in name:
            figures[name] = max(value for value, _ in told)
        else:
            weight = sum(seconds for _, seconds in told)
            weighed = sum(value * seconds for value, seconds in told)
            figures[name] = weighed / weight if weight else sum(v for v, _ in told) / len(told)
    return Gpu(
        seconds=max((one.seconds for one in gpus), default=0.0),
        figures=figures,
        throttled_seconds=_added(one.throttled_seconds for one in gpus),
        xid_errors=_added(one.xid_errors for one in gpus),
    )


def _line(one: Monitored) -> str:
    words = filter(None, (_gpu_words(one), _host_words(one), _trouble(one)))
    return "; ".join(words) or "it saw nothing"


def _gpu_words(one: Monitored) -> str:
    if not one.gpus:
        return ""
    told = joined(one.gpus).figures
    words = [f"{len(one.gpus)} GPU{'s' * (len(one.gpus) > 1)}"]
    if "utilization_ratio" in told:
        words[0] += f" {told['utilization_ratio']:.0%} busy"
    for name, what in (("sm_active_ratio", "SMs"), ("tensor_active_ratio", "tensor cores")):
        if name in told:
            words.append(f"{what} {told[name]:.0%}")
    if "memory_peak_bytes" in told:
        each = " on one" if len(one.gpus) > 1 else ""
        words.append(f"{human_bytes(told['memory_peak_bytes'])} of memory at most{each}")
    if told.get("energy_joules"):
        words.append(f"{told['energy_joules'] / _WATT_SECONDS_PER_KWH:.3g} kWh")
    unused = one.figures.get("gpus_allocated", 0.0) - one.figures.get("gpus_used", 0.0)
    if "gpus_used" in one.figures and unused > _HALF_GPU:
        words.append(f"{unused:.0f} of them never used")
    return ", ".join(words)


def _host_words(one: Monitored) -> str:
    told = one.figures
    words = []
    if "mean_cpus" in told:
        of = f" of {told['cpus']:.0f}" if told.get("cpus") else ""
        words.append(f"{told['mean_cpus']:.1f}{of} CPUs busy")
    elif "cpu_seconds" in told:
        words.append(f"{told['cpu_seconds']:.1f} s of CPU time")
    if "memory_peak_bytes" in told:
        where = " on one node" if one.nodes > 1 else ""
        words.append(f"{human_bytes(told['memory_peak_bytes'])} of memory at most{where}")
    if "io_read_bytes" in told:
        words.append(f"{human_bytes(told['io_read_bytes'])} read")
    if "io_write_bytes" in told:
        words.append(f"{human_bytes(told['io_write_bytes'])} written")
    return ", ".join(words)


def _trouble(one: Monitored) -> str:
    gpu = joined(one.gpus)
    words = []
    reasons = {name: seconds for name, seconds in gpu.throttled_seconds.items() if seconds >= 1}
    if reasons:
        worst = max(reasons, key=lambda name: reasons[name])
        words.append(f"throttled {seconds_text(reasons[worst])} ({worst})")
    words += [f"XID {xid} ({count:.0f} x)" for xid, count in gpu.xid_errors.items() if count]
    kills = one.figures.get("oom_events", 0.0)
    if kills:
        words.append(f"{kills:.0f} x out of memory")
    return ", ".join(words)


def _gpu(record: Mapping[str, Any]) -> Gpu:
    figures = _figures(record)
    seconds = figures.pop("seconds", 0.0)
    return Gpu(
        uuid=str(record.get("uuid", "")),
        name=str(record.get("name", "")),
        seconds=seconds,
        figures=figures,
        throttled_seconds=_figures(record.get("throttled_seconds")),
        xid_errors=_figures(record.get("xid_errors")),
    )


def _added(all_told: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for told in all_told:
        for name, value in told.items():
            found[name] = found.get(name, 0.0) + value
    return found


def _figures(record: Any) -> dict[str, float]:
    """Return the numbers of a mapping."""
    if not isinstance(record, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
