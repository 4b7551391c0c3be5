"""What jobs did with their GPUs over weeks: GPU-hours, activity, energy and findings.

The figures come from what the recording rules `hpml-usage` keep in a Prometheus, or from the
records of one's own runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.run import owner_name
from hpml_orchestrator.records.texts import printable
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import any_of
from hpml_orchestrator.runs.reporting.description import times_of
from hpml_orchestrator.runs.reporting.monitor import JOULES_PER_KWH, monitored_nodes
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.select import select
from hpml_orchestrator.runs.state import cluster_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.prometheus import Prometheus
    from hpml_orchestrator.runs.state import State

GROUPS: Mapping[str, Sequence[str]] = {
    "job": ("cluster", "jobid", "user", "account", "partition", "name"),
    "user": ("user",),
    "account": ("account",),
}
"""Labels that identify a row, by the kind of row."""

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class GpuHoursUsage:
    """What one job, or all jobs of a user or an account, did with GPUs.

    Attributes:
        labels: what the row is about, with the names in `GROUPS`.
        jobs: how many jobs it sums up.
        gpu_hours: number of GPUs times hours.
        measured_hours: GPU-hours of the jobs whose activity is known.
        busy_hours: of these, with a kernel on the GPU.
        energy_kwh: what the GPUs drew; None if it is unknown.
        finding: kind of the finding that lasted longest; empty without any.
        finding_hours: how long it lasted, summed over jobs; None if it is unknown.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    jobs: int = 0
    gpu_hours: float = 0.0
    measured_hours: float = 0.0
    busy_hours: float = 0.0
    energy_kwh: float | None = None
    finding: str = ""
    finding_hours: float | None = None

    @property
    def unused_hours(self) -> float | None:
        """GPU-hours without a kernel; None if the activity of no job is known."""
        return max(0.0, self.measured_hours - self.busy_hours) if self.measured_hours else None

    @property
    def active(self) -> float | None:
        """Share of the time with a kernel, from 0 to 1; None if it is unknown."""
        return min(1.0, self.busy_hours / self.measured_hours) if self.measured_hours else None


@dataclass(frozen=True)
class Selection:
    """Which jobs are asked for, and how they are summed up.

    Attributes:
        by: `job`, `user` or `account`.
        since, until: seconds since the epoch.
        users, accounts: only jobs of these; of all when empty. Records have one's own runs only,
            so `users` is for Prometheus.
        min_unused_hours: only rows with at least as many unused GPU-hours.
        number: how many rows, the largest waste first.
    """

    by: str
    since: float
    until: float
    users: Sequence[str] = ()
    accounts: Sequence[str] = ()
    min_unused_hours: float = 0.0
    number: int = 20


def stored_usage(
    server: Prometheus, selection: Selection
) -> tuple[list[GpuHoursUsage], GpuHoursUsage]:
    """Return rows, the largest waste first, and the sum of all jobs, as Prometheus stored them.

    Raises:
        PrometheusError: it gives no usable answer.
    """
    matchers = [
        f"{label}=~{any_of(values)}"
        for label, values in (("user", selection.users), ("account", selection.accounts))
        if values
    ]
    seconds = max(1, round(selection.until - selection.since))

    def stored(figure: str) -> str:
        name = f"hpml:job_{figure}:increase1h"
        return f"sum_over_time({name}{{{', '.join(matchers)}}}[{seconds}s])"

    gpus, busy = stored("gpu_seconds"), stored("gpu_busy_seconds")

    def figures(labels: Sequence[str], rows: str) -> dict[str, str]:
        by = f"by ({', '.join(labels)})"
        queries = {
            "jobs": f"count {by} (count by ({', '.join({*GROUPS['job'], *labels})}) ({gpus}))",
            "gpu": f"sum {by} ({gpus})",
            # Only hours of jobs whose activity is known: a MIG instance reports none, and must not
            # count as unused.
            "measured": f"sum {by} ({gpus} and on (cluster, jobid) {busy})",
            "busy": f"sum {by} ({busy})",
            "joules": f"sum {by} ({stored('gpu_energy_joules')})",
        }
        held = f"sum by ({', '.join([*labels, 'finding'])}) ({stored('holdback_seconds')})"
        queries["held"] = f"topk {by} (1, {held})"
        on = f" and on ({', '.join(labels)}) {rows}" if rows else ""
        return {name: f"({query}){on}" for name, query in queries.items()}

    labels = GROUPS[selection.by]
    by = f"by ({', '.join(labels)})"
    unused = f"(sum {by} ({gpus} and on (cluster, jobid) {busy}) - sum {by} ({busy}))"
    if selection.min_unused_hours:
        unused += f" >= {selection.min_unused_hours * _SECONDS_PER_HOUR:.0f}"
        rows = f"topk({selection.number}, {unused})"
    else:  # -1 puts jobs without known activity last
        rows = f"topk({selection.number}, {unused} or (sum {by} ({gpus}) * 0 - 1))"
    every = {f"row-{name}": query for name, query in figures(labels, rows).items()}
    every |= {f"sum-{name}": query for name, query in figures((), "").items()}
    found: dict[tuple[str, ...], dict[str, float]] = {}
    findings: dict[tuple[str, ...], str] = {}
    for answer, value in server.figures(every, at=selection.until):
        kind, _, name = answer["figure"].partition("-")
        key = (kind, *(answer.get(label, "") for label in labels if kind == "row"))
        found.setdefault(key, {})[name] = value
        if name == "held":
            findings[key] = answer.get("finding", "")
    usages = {
        key: _usage(key[1:], labels, values, findings.get(key, "")) for key, values in found.items()
    }
    total = usages.pop(("sum",), GpuHoursUsage())
    return _sorted(usages.values()), total


def _usage(
    key: Sequence[str], labels: Sequence[str], values: Mapping[str, float], finding: str
) -> GpuHoursUsage:
    hours = {name: value / _SECONDS_PER_HOUR for name, value in values.items()}
    return GpuHoursUsage(
        labels=dict(zip(labels, map(printable, key), strict=True)) if key else {},
        jobs=int(values.get("jobs", 0)),
        gpu_hours=hours.get("gpu", 0.0),
        measured_hours=hours.get("measured", 0.0),
        busy_hours=hours.get("busy", 0.0),
        energy_kwh=values["joules"] / JOULES_PER_KWH if "joules" in values else None,
        finding=finding,
        finding_hours=hours.get("held"),
    )


def recorded_usage(store: Store, selection: Selection) -> tuple[list[GpuHoursUsage], GpuHoursUsage]:
    """Return the same from the records, for runs submitted since `selection.since`.

    A run without records of its monitor has GPU-hours by what it asked for, and no activity.

    Raises:
        RecordError: the records cannot be read.
    """
    jobs = []
    for submitted in select(store, since=selection.since):
        for state in submitted.tasks or [submitted]:
            if (job := _of_run(state)) is None:
                continue
            if not selection.accounts or job.labels["account"] in selection.accounts:
                jobs.append(job)
    names = GROUPS[selection.by]
    grouped: dict[tuple[str, ...], list[GpuHoursUsage]] = {}
    for job in jobs:
        grouped.setdefault(tuple(job.labels[name] for name in names), []).append(job)
    rows = [_total(members, dict(zip(names, key, strict=True))) for key, members in grouped.items()]
    least = selection.min_unused_hours
    rows = [row for row in rows if not least or (row.unused_hours or 0.0) >= least]
    return _sorted(rows)[: selection.number], _total(jobs, {})


def _of_run(state: State) -> GpuHoursUsage | None:
    """Return the usage of a run over all of its attempts; None without GPUs, or if unreadable."""
    try:
        attempt, summary = state.run.newest(), summarise(state)
        if attempt is None or not (facts := gather(state, summary=summary)).gpu_count:
            return None
        seconds = measured = busy = joules = 0.0
        energy = False
        for one in state.run.attempts():
            started, ended = times_of(one, state, now=time.time())
            gpus = [gpu for node in monitored_nodes(one) for gpu in node.gpus]
            asked = facts.gpu_count * max(0.0, (ended or 0.0) - started) if started else 0.0
            known = sum(gpu.seconds for gpu in gpus)
            seconds += max(asked, known)
            for gpu in gpus:
                if "busy_seconds" in gpu.figures:
                    measured += gpu.seconds
                    busy += gpu.figures["busy_seconds"]
                if "energy_joules" in gpu.figures:
                    joules += gpu.figures["energy_joules"]
                    energy = True
        findings = diagnose(facts).findings
    except RecordError:  # another user's, or damaged: `hpml list` shows it
        return None
    cluster, job_id = cluster_job(attempt)
    asked_for = facts.job.resources
    return GpuHoursUsage(
        labels={
            "cluster": cluster,
            "jobid": job_id,
            "user": owner_name(state.submission.directory),
            "account": str(asked_for.account or ""),
            "partition": str(asked_for.partition or ""),
            "name": state.name,
        },
        jobs=1,
        gpu_hours=seconds / _SECONDS_PER_HOUR,
        measured_hours=measured / _SECONDS_PER_HOUR,
        busy_hours=busy / _SECONDS_PER_HOUR,
        energy_kwh=joules / JOULES_PER_KWH if energy else None,
        finding=findings[0].kind if findings else "",
    )


def _total(jobs: Sequence[GpuHoursUsage], labels: Mapping[str, str]) -> GpuHoursUsage:
    """Return several jobs as one: sums, and the finding with the most GPU-hours."""
    weight: dict[str, float] = {}
    for job in jobs:
        if job.finding:
            weight[job.finding] = weight.get(job.finding, 0.0) + job.gpu_hours
    energy = [job.energy_kwh for job in jobs if job.energy_kwh is not None]
    return GpuHoursUsage(
        labels=labels,
        jobs=sum(job.jobs for job in jobs),
        gpu_hours=sum(job.gpu_hours for job in jobs),
        measured_hours=sum(job.measured_hours for job in jobs),
        busy_hours=sum(job.busy_hours for job in jobs),
        energy_kwh=sum(energy) if energy else None,
        finding=max(weight, key=weight.__getitem__, default=""),
    )


def _sorted(rows: Iterable[GpuHoursUsage]) -> list[GpuHoursUsage]:
    """Return the largest waste first; rows of unknown activity last, by their GPU-hours."""
    return sorted(
        rows, key=lambda row: (row.unused_hours is None, -(row.unused_hours or 0.0), -row.gpu_hours)
    )
