"""Jobs while they run: their figures, from Prometheus or else from records, and bottlenecks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.errors import HpmlError, NotFoundError
from hpml_orchestrator.records.run import owner_name
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.history import seconds_left
from hpml_orchestrator.runs.prometheus import PrometheusError
from hpml_orchestrator.runs.reporting.monitor import recorded_figures
from hpml_orchestrator.runs.state import cluster_job, job_dashboard
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.prometheus import MeasuredJob, Prometheus
    from hpml_orchestrator.runs.state import State

SCHEDULER_SECONDS = 30.0
"""Least time between two questions to a scheduler."""

RATE_SECONDS = 300.0
"""What rates in Prometheus' recording rules are taken over."""

_RATES = {"cpus_busy", "read_bytes_per_second", "write_bytes_per_second", "samples_per_second"}
_RETRY_SECONDS = 30.0
_SCRAPED_SECONDS = 120.0  # after this time Prometheus has scraped a job
_NO_JOBS = "no running jobs: are hpml's exporters scraped, its recording rules loaded?"


class Rule(NamedTuple):
    """A figure that shows a bottleneck when it passes a limit."""

    figure: str
    limit: float
    text: str  # `{}` is the figure, `{time}` the same as a duration
    below: bool = False  # whether figures below the limit are the bad ones
    after_seconds: float = 0.0  # since the job's start: before, jobs load and copy

    def holds(self, figures: Mapping[str, float], age: float) -> bool:
        """Return whether a job with these figures, `age` seconds old, has this bottleneck."""
        value = figures.get(self.figure)
        if value is None or age < self.after_seconds:
            return False
        return value < self.limit if self.below else value > self.limit


# Live figures are of minutes, or of 30 s from records: they scatter more than those of a whole run.
# So what a report warns of is a flag only from the limit on at which the report calls it critical.
_DATA = THRESHOLDS["waits-for-data"].critical or 1.0
_SPREAD = THRESHOLDS["slow-rank"].critical or 1.0
_IDLE = THRESHOLDS["launch-bound"].critical or 0.0
_MEMORY, _HOT, _CPUS = (
    THRESHOLDS[kind].warn for kind in ("memory-pressure", "throttled", "cpu-bound")
)

RULES = (
    Rule("gpus_unused", 0.5, "GPU unused: {:.0f} without a process", after_seconds=RATE_SECONDS),
    Rule("samples_per_second", 1e-9, "stalled: no samples in 5 min", True, RATE_SECONDS),
    Rule("silent_seconds", 0.0, "stalled: no step for {time}"),
    Rule("memory_ratio", _MEMORY, "memory: {:.0%} of the limit"),
    Rule("gpu_throttled_ratio", _HOT, "throttled: {:.0%} of the time", after_seconds=RATE_SECONDS),
    Rule("data_wait_ratio", _DATA, "input-bound: {:.0%} waiting for data"),
    Rule("wait_spread_ratio", _SPREAD, "slow rank{rank}: waits {:.0%} of a step longer"),
    Rule("step_spread_ratio", _SPREAD, "slow rank: the fastest takes {:.0%} less time"),
    Rule("gpu_busy_ratio", _IDLE, "GPU idle: {:.0%} busy", below=True, after_seconds=RATE_SECONDS),
    Rule("cpu_busy_ratio", _CPUS, "CPU-bound: {:.0%} of the CPUs busy"),
)
"""What is reported as a bottleneck, the worst first."""


@dataclass
class LiveJob:
    """A job that has not ended; times are in seconds."""

    job_id: str
    name: str
    user: str
    state: str
    run: str  # `<id>.<index>` of an array's task; empty if not started by hpml
    cluster: str = ""  # empty where not known
    reason: str = ""  # why it waits
    started: float | None = None  # since the epoch
    elapsed_seconds: float | None = None
    left_seconds: float | None = None  # of its time limit
    source: str = ""  # of its figures: `prometheus` or `records`
    figures: dict[str, float] = field(default_factory=dict)  # by the names in docs/top.md
    bottlenecks: list[str] = field(default_factory=list)  # the worst first
    dashboard: str | None = None

    def add(self, figures: Mapping[str, float], source: str, now: float) -> LiveJob:
        """Add its figures, what follows from them, and its bottlenecks; returns the job."""
        self.source = source if figures else ""
        every = self.figures = dict(figures)
        started, busy_now = every.pop("started", None), every.pop("gpus_busy_now", None)
        ends = every.pop("ends", None)
        if self.left_seconds is None and ends is not None:
            self.left_seconds = max(0.0, ends - now)
        self.started = self.started or started
        if self.started is not None and self.elapsed_seconds is None:
            self.elapsed_seconds = max(0.0, now - self.started)
        if source == "prometheus" and 0 < (age := self.elapsed_seconds or 0.0) < RATE_SECONDS:
            # Rates of five minutes: most of that time the job did not exist.
            for name in _RATES & every.keys():
                every[name] *= RATE_SECONDS / age
            if busy_now is not None:  # the counters of GPUs continue from job to job
                every["gpus_busy"] = busy_now
        if every.get("gpus") and "gpus_busy" in every:
            every["gpu_busy_ratio"] = every["gpus_busy"] / every["gpus"]
        if every.get("cpus") and "cpus_busy" in every:
            every["cpu_busy_ratio"] = every["cpus_busy"] / every["cpus"]
        if "gpus_allocated" in every and "gpus_used" in every:
            # A node without Slurm's prolog may not know what it gave to the job.
            every["gpus_allocated"] = max(every["gpus_allocated"], every.get("gpus", 0.0))
            every["gpus_unused"] = max(0.0, every["gpus_allocated"] - every["gpus_used"])
        age = math.inf if self.elapsed_seconds is None else self.elapsed_seconds
        found = [rule for rule in RULES if rule.holds(every, age)]
        slowest = every.get("longest_waiting_rank")
        rank = "" if slowest is None else f" {slowest:.0f}"
        self.bottlenecks = [
            rule.text.format(value := every[rule.figure], rank=rank, time=seconds_text(value))
            for rule in found
        ]
        return self


@dataclass
class LiveJobs:
    """Reads jobs repeatedly, and queries no scheduler more often than every 30 seconds.

    Raises:
        HpmlError: a word names no run, and cannot be a job that Prometheus knows.
    """

    store: Store
    words: Sequence[str] = ()  # name the runs, or jobs in Prometheus; else all that have not ended
    prometheus: Prometheus | None = None  # where figures come from; records alone without one
    user: str = ""  # whose jobs Prometheus is asked for; those of everybody when empty
    site: str = ""  # the value of `--site` or `HPML_SITE`
    backends: Backends | None = None
    now: Callable[[], float] = time.time  # seconds since the epoch
    problem: str = field(default="", init=False)  # why Prometheus, if asked, returns no figures

    def __post_init__(self) -> None:
        self._states: list[State] = []
        self._over: set[str] = set()  # ids of submissions
        self._ask_at = self._retry_at = 0.0
        self._job_ids = {word for word in self.words if self.prometheus and word.isdecimal()}
        self._runs: list[Submission] = []
        self._words: dict[str, str] = {}  # that name runs, by the submission's id
        self._unknown: set[str] = set()  # job ids that Prometheus has not returned yet
        for word in self.words:
            try:
                self._runs.append(run := self.store.resolve(word, newest=True))
                self._words[run.sid] = word
            except NotFoundError:
                if word not in self._job_ids:
                    raise
                self._unknown.add(word)

    def look(self) -> list[LiveJob]:
        """Return the jobs as they are now.

        Raises:
            NotFoundError: neither records nor Prometheus know a job that was asked for.
        """
        now = self.now()
        if now >= self._ask_at:
            self._states, self._ask_at = self._ask(), now + SCHEDULER_SECONDS
        measured = self._measure(now)
        by_key = {_key(job.cluster, job.job_id): job for job in measured}
        by_run = {job.run: job for job in measured if job.run}
        running = self._job_ids & {job.job_id for job in measured}
        self._unknown -= running
        if self._unknown and self.prometheus:
            others = "; --all-users asks for everybody's jobs" if self.user else ""
            raise NotFoundError(
                f"no run or running job {min(self._unknown)!r} under {self.store.root}",
                hint=self.problem or f"{self.prometheus.url} does not know it either{others}",
            )
        jobs = []
        for state in self._states:
            if state.over and self._words.get(state.submission.sid) in running:
                continue  # an old run: a job that continues has its number now
            attempt = _attempt(state)
            job = self._job(state, attempt, now)
            key = ("", "") if attempt is None else cluster_job(attempt)
            known = None if state.over else by_run.get(job.run) or by_key.get(key)
            job.cluster = key[0] if known is None else known.cluster
            if known is not None:
                by_key.pop(_key(known.cluster, known.job_id), None)
                job.add(known.figures, "prometheus", now)
            elif attempt is not None and state.state == "RUNNING":
                job.add(recorded_figures(attempt, now), "records", now)
            jobs.append(job)
        for known in by_key.values():
            if self.words and known.job_id not in running:
                continue
            if not {known.run, known.run.rpartition(".")[0]} & self._over:
                job = LiveJob(known.job_id, known.name, known.user, "RUNNING", known.run)
                job.cluster = known.cluster
                jobs.append(job.add(known.figures, "prometheus", now))
        return jobs

    def _ask(self) -> list[State]:
        """Return the runs and running tasks to show; an array without running tasks is one row."""
        chosen = (
            self._runs
            if self.words
            else [run for run in self.store.submissions() if run.sid not in self._over]
        )
        every = states(self.store, chosen, backends=self.backends, now=self.now)
        if not self.words:
            self._over |= {state.submission.sid for state in every if state.over}
        shown: list[State] = []
        for state in every:
            running = [task for task in state.tasks if task.state == "RUNNING"]
            shown += running or ([state] if self.words or not state.over else [])
        return shown

    def _measure(self, now: float) -> list[MeasuredJob]:
        if self.prometheus is None or now < self._retry_at:
            return []
        try:
            measured, self.problem = self.prometheus.jobs(self.user), ""
        except PrometheusError as error:
            # Each failure may cost the full timeout. Retrying at every refresh would freeze the
            # display.
            self.problem, self._retry_at = str(error), now + _RETRY_SECONDS
            return []
        old = [state for state in self._states if now - (state.started or now) > _SCRAPED_SECONDS]
        if not measured and any(state.state == "RUNNING" for state in old):
            self.problem = f"{self.prometheus.url}: {_NO_JOBS}"
        return measured

    def _job(self, state: State, attempt: Attempt | None, now: float) -> LiveJob:
        age = left = None
        if attempt is not None and state.started:
            age = max(0.0, (state.ended or now) - state.started)
            left = seconds_left(state, now)
        return LiveJob(
            job_id=state.job_id,
            name=state.name,
            user=owner_name(state.submission.directory),
            state=state.state,
            run=state.submission.label,
            reason=state.reason,
            started=state.started if age is not None else None,
            elapsed_seconds=age,
            left_seconds=left,
            dashboard=job_dashboard(state, chosen=self.site),
        )


def _key(cluster: str, job_id: str) -> tuple[str, str]:
    return ("" if job_id.startswith("local-") else cluster), job_id


def _attempt(state: State) -> Attempt | None:
    try:
        return None if state.tasks else state.run.newest()
    except HpmlError:  # another user's
        return None
