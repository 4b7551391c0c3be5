"""Figures of a running attempt from its records: its monitor's files and the ranks' counters.

The monitor's are means and peaks since the start. Those of the training are about its last 30
seconds, or its last two counters if they are further apart.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from hpml_orchestrator.records.feed import read_recent
from hpml_orchestrator.runs.reporting.monitor import aggregate_nodes, monitored_nodes, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpml_orchestrator.records.feed import Event
    from hpml_orchestrator.records.run import Attempt

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
