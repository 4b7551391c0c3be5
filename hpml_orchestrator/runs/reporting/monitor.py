"""What a run used, from its monitor: GPUs, CPUs, memory and I/O, per node and in total."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError, counted
from hpml_orchestrator.records.feed import read_recent
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.texts import first_few, human_bytes, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.feed import Event
    from hpml_orchestrator.records.run import Attempt

_SUFFIX = ".monitor.json"
_SHOWN_NODES = 8
_MISSING_SECONDS = 15.0
_SUMS = (
    "cpu_seconds mean_cpus cpus io_read_bytes io_write_bytes io_syscall_read_bytes "
    "io_syscall_write_bytes oom_events gpus_allocated gpus_used"
).split()
_PEAKS = ("memory_peak_bytes", "memory_with_cache_peak_bytes", "memory_limit_bytes")
JOULES_PER_KWH = 3.6e6
_HALF_GPU = 0.5


@dataclass(frozen=True)
class MonitoredGpu:
    """One GPU of a run on one node, or several taken together."""

    uuid: str = ""  # empty where several are meant, as is the name
    name: str = ""
    seconds: float = 0.0  # how long it was monitored
    # What the driver reports: `utilization_ratio` (share of the time in which a kernel was
    # resident), `busy_seconds`, `sm_active_ratio`, `tensor_active_ratio`, `dram_active_ratio`,
    # `power_watts` (all means), `energy_joules`, `memory_peak_bytes`, `temperature_peak_celsius`.
    figures: Mapping[str, float] = field(default_factory=dict)
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)  # by reason
    xid_errors: Mapping[str, float] = field(default_factory=dict)  # how many, by XID


@dataclass(frozen=True)
class Monitored:
    """What a run used on one node, or on all of them, as its monitor recorded it."""

    node: str = ""  # its name; empty where all nodes are meant
    nodes: int = 1  # number of monitored nodes
    seconds: float = 0.0  # how long, on the node that was monitored longest
    updated: float = 0.0  # when it was last recorded, seconds since the epoch
    # `memory_peak_bytes` is without the page cache, of all nodes that of the one that had most;
    # `memory_with_cache_peak_bytes` is the kernel's; `io_read_bytes` and `io_write_bytes` are of
    # storage, `io_syscall_…_bytes` everything that was read and written.
    figures: Mapping[str, float] = field(default_factory=dict)
    # What ranks reported: `samples`, `steps`, `data_wait_seconds`, `comm_seconds`.
    training: Mapping[str, float] = field(default_factory=dict)
    gpus: Sequence[MonitoredGpu] = ()


def numbers(record: object) -> dict[str, float]:
    """Return the finite numbers of a mapping; empty for anything else."""
    if not isinstance(record, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def monitored_nodes(attempt: Attempt) -> list[Monitored]:
    """Return what each node's monitor recorded, by node; damaged files are skipped."""
    nodes = []
    for path in sorted((attempt.directory / "nodes").glob(f"*{_SUFFIX}")):
        try:
            record = read_json(path)
        except (NotFoundError, RecordError):
            continue
        gpus = record.get("gpus")
        times = numbers(record)
        nodes.append(
            Monitored(
                node=path.name.removesuffix(_SUFFIX),
                seconds=times.get("seconds", 0.0),
                updated=times.get("updated", 0.0),
                figures=numbers(record.get("job")),
                training=numbers(record.get("training")),
                gpus=[
                    _gpu(gpu)
                    for gpu in (gpus if isinstance(gpus, list) else [])
                    if isinstance(gpu, dict)
                ],
            )
        )
    return nodes


def _gpu(record: Mapping[str, object]) -> MonitoredGpu:
    figures = numbers(record)
    return MonitoredGpu(
        uuid=str(record.get("uuid", "")),
        name=str(record.get("name", "")),
        seconds=figures.pop("seconds", 0.0),
        figures=figures,
        throttled_seconds=numbers(record.get("throttled_seconds")),
        xid_errors=numbers(record.get("xid_errors")),
    )


def _sums(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            total[name] = total.get(name, 0.0) + value
    return total


def aggregate_nodes(nodes: Sequence[Monitored]) -> Monitored | None:
    """Return the figures of all nodes; None if no node was monitored.

    CPU time, I/O, energy and counts are sums. Memory is that of the node that used most.
    """
    if not nodes:
        return None
    total = _sums(node.figures for node in nodes)
    figures = {name: value for name, value in total.items() if name in _SUMS}
    for name in filter(total.__contains__, _PEAKS):
        figures[name] = max(node.figures.get(name, 0.0) for node in nodes)
    training = _sums(node.training for node in nodes)
    return Monitored(
        nodes=len(nodes),
        seconds=max(node.seconds for node in nodes),
        updated=min(node.updated for node in nodes),
        figures=figures,
        training={
            name: value
            for name, value in training.items()
            if name in ("samples", "steps") or name.endswith("_seconds")
        },
        gpus=[gpu for node in nodes for gpu in node.gpus],
    )


def _joined(gpus: Sequence[MonitoredGpu]) -> MonitoredGpu:
    """Return several GPUs as one: means weighted by time, sums of energy, maxima of peaks."""
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for gpu in gpus for name in gpu.figures):
        having = [gpu for gpu in gpus if name in gpu.figures]
        values = [gpu.figures[name] for gpu in having]
        seconds = [gpu.seconds for gpu in having]
        if name in ("busy_seconds", "energy_joules"):
            figures[name] = sum(values)
        elif "_peak_" in name:
            figures[name] = max(values)
        else:
            # Means of GPUs that were monitored for different times are weighted by the time: a node
            # that joined late must not count as much as one that ran for hours.
            weights = seconds if any(seconds) else [1.0] * len(values)
            figures[name] = sum(map(mul, values, weights)) / sum(weights)
    return MonitoredGpu(
        seconds=max((gpu.seconds for gpu in gpus), default=0.0),
        figures=figures,
        throttled_seconds=_sums(gpu.throttled_seconds for gpu in gpus),
        xid_errors=_sums(gpu.xid_errors for gpu in gpus),
    )


def monitor_lines(
    nodes: Sequence[Monitored], *, ready: Sequence[str] = (), ended: float | None = None
) -> list[str]:
    """Return a line for all nodes, one per node if they are few, and what is missing.

    Args:
        nodes: what was recorded.
        ready: names of the nodes that the run had.
        ended: when it was over; None while it runs.
    """
    whole = aggregate_nodes(nodes)
    if whole is None:
        return []
    lines = [_line(whole)]
    if 1 < len(nodes) <= _SHOWN_NODES:
        lines += [f"{node.node}: {_line(node)}" for node in nodes]
    absent = sorted(set(ready) - {node.node for node in nodes})
    if absent:
        lines.append(f"no data of {first_few(absent, _SHOWN_NODES)}")
    # `updated` of the whole is the oldest of all nodes, so a single killed monitor shows.
    missing = 0.0 if ended is None else ended - whole.updated
    if missing > _MISSING_SECONDS:
        lines.append(f"the last {seconds_text(missing)} are missing: the monitor was killed")
    return lines


def _line(node: Monitored) -> str:
    gpu = _joined(node.gpus)
    figures = node.figures
    host = []
    if "mean_cpus" in figures:
        of = f" of {figures['cpus']:.0f}" if figures.get("cpus") else ""
        host.append(f"{figures['mean_cpus']:.1f}{of} CPUs busy")
    elif "cpu_seconds" in figures:
        host.append(f"{figures['cpu_seconds']:.1f} s of CPU time")
    if "memory_peak_bytes" in figures:
        where = " on one node" if node.nodes > 1 else ""
        host.append(f"{human_bytes(figures['memory_peak_bytes'])} of memory at most{where}")
    for name, what in (("io_read_bytes", "read"), ("io_write_bytes", "written")):
        if name in figures:
            host.append(f"{human_bytes(figures[name])} {what}")
    errors = []
    throttled = max(gpu.throttled_seconds.items(), key=lambda item: item[1], default=("", 0.0))
    if throttled[1] >= 1:
        errors.append(f"throttled {seconds_text(throttled[1])} ({throttled[0]})")
    errors += [f"XID {xid} ({count:.0f} x)" for xid, count in gpu.xid_errors.items() if count]
    if figures.get("oom_events"):
        errors.append(f"{figures['oom_events']:.0f} x out of memory")
    parts = [_gpu_text(node, gpu), ", ".join(host), ", ".join(errors)]
    return "; ".join(filter(None, parts)) or "no data"


def _gpu_text(node: Monitored, gpu: MonitoredGpu) -> str:
    """Return a text about the GPUs of a node; empty without GPUs."""
    if not node.gpus:
        return ""
    parts = [counted(len(node.gpus), "GPU")]
    if "utilization_ratio" in gpu.figures:
        parts[0] += f" {gpu.figures['utilization_ratio']:.0%} busy"
    for name, what in (("sm_active_ratio", "SMs"), ("tensor_active_ratio", "tensor cores")):
        if name in gpu.figures:
            parts.append(f"{what} {gpu.figures[name]:.0%}")
    if "memory_peak_bytes" in gpu.figures:
        most = human_bytes(gpu.figures["memory_peak_bytes"])
        each = " on one" if len(node.gpus) > 1 else ""
        parts.append(f"{most} of memory at most{each}")
    if gpu.figures.get("energy_joules"):
        parts.append(f"{gpu.figures['energy_joules'] / JOULES_PER_KWH:.3g} kWh")
    unused = node.figures.get("gpus_allocated", 0.0) - node.figures.get("gpus_used", 0.0)
    if "gpus_used" in node.figures and unused > _HALF_GPU:
        parts.append(f"{unused:.0f} of them never used")
    return ", ".join(parts)


# Figures of a running attempt from its records: its monitor's files and the ranks' counters.
#
# The monitor's are means and peaks since the start. Those of the training are about its last 30
# seconds, or its last two counters if they are further apart.

_QUIET_SECONDS = 60.0  # least time without a report of any rank after which a run may hang
_WINDOW_SECONDS = 30.0
_STALE_SECONDS = 1200.0  # twice the longest time between two counters of a rank


def recorded_figures(attempt: Attempt, now: float) -> dict[str, float]:
    """Return the figures of an attempt, by the names in docs/top.md; what is not known is left out.

    Args:
        attempt: that runs.
        now: seconds since the epoch.
    """
    recent = [*read_recent(attempt.directory / "events")]
    heard, due = last_report(recent) or (now, now)
    figures = {"silent_seconds": now - heard} if now > due else _trained(recent, now)
    whole = aggregate_nodes(monitored_nodes(attempt))
    if whole is None:
        return figures
    gpus, seconds = whole.gpus, max(whole.seconds, 1.0)
    known = whole.figures
    if gpus:
        figures["gpus"] = float(len(gpus))
        figures["gpus_busy"] = sum(gpu.figures.get("utilization_ratio", 0.0) for gpu in gpus)
        memory = [gpu.figures.get("memory_peak_bytes", 0.0) for gpu in gpus]
        figures["gpu_memory_used_bytes"] = sum(memory)
        figures["gpu_throttled_ratio"] = max(_hot(gpu.throttled_seconds) for gpu in gpus) / seconds
    names = {"mean_cpus": "cpus_busy", "memory_peak_bytes": "memory_bytes"}
    for name in ("gpus_allocated", "gpus_used", "cpus", *names):
        if name in known:
            figures[names.get(name, name)] = known[name]
    for name in ("read", "write"):
        if f"io_{name}_bytes" in known:
            figures[f"{name}_bytes_per_second"] = known[f"io_{name}_bytes"] / seconds
    if known.get("memory_limit_bytes") and "memory_bytes" in figures:
        figures["memory_ratio"] = figures["memory_bytes"] / known["memory_limit_bytes"]
    return figures


def last_report(events: Iterable[Event]) -> tuple[float, float] | None:
    """Return when a rank last reported anything, and by when another report is due at the latest.

    That is twice the longest time between two reports, since programs report at any interval, and
    records get them ever more rarely. None before the first step and after a rank's last report.
    """
    reports = sorted((one for one in events if one.rank is not None), key=lambda one: one.time)
    if not any(one.event == "step" for one in reports):
        return None
    last = reports[-1]
    if last.event == "stopping" or last.data.get("final"):
        return None
    longest = max((after.time - before.time for before, after in pairwise(reports)), default=0.0)
    return last.time, last.time + max(_QUIET_SECONDS, 2 * longest)


def _hot(throttled: Mapping[str, float]) -> float:
    """Return the seconds that clocks were held down by heat or a brake, not by the power cap."""
    hot = ("hw_", "sw_thermal", "power_brake")
    return sum(seconds for reason, seconds in throttled.items() if reason.startswith(hot))


def _trained(events: Iterable[Event], now: float) -> dict[str, float]:
    """Return the figures that the last counters of the ranks give."""
    steps: dict[int | None, list[Event]] = defaultdict(list)
    for event in events:
        # Old counters say nothing about now: a rank may be in an evaluation, or hang.
        if event.event == "step" and now - event.time < _STALE_SECONDS:
            steps[event.rank].append(event)
    rate, waited, stepped = 0.0, 0.0, 0.0
    waits, durations = dict[int | None, float](), []
    for rank, counters in steps.items():
        last = counters[-1]
        earlier = [step for step in counters if step.time <= last.time - _WINDOW_SECONDS]
        first = (earlier[-1:] or counters)[0]
        before, after = numbers(first.data), numbers(last.data)
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        count, seconds = grown.get("steps_total", 0.0), last.time - first.time
        if count <= 0 or seconds <= 0:
            continue
        rate += grown.get("samples_total", 0.0) / seconds
        if grown.get("step_seconds_total", 0.0) > 0:
            stepped += grown["step_seconds_total"]
            durations.append(grown["step_seconds_total"] / count)
            if "data_wait_seconds_total" in grown:
                waited += grown["data_wait_seconds_total"]
                waits[rank] = grown["data_wait_seconds_total"] / count
    figures = {"samples_per_second": rate} if rate else {}
    if durations:
        figures["step_spread_ratio"] = 1 - min(durations) / max(durations)
    if waits:
        figures["data_wait_ratio"] = waited / stepped
        spread = max(waits.values()) - min(waits.values())
        figures["wait_spread_ratio"] = spread / max(durations)
        if (slowest := max(waits, key=waits.__getitem__)) is not None:
            figures["longest_waiting_rank"] = float(slowest)
    return figures
