"""The table of a sweep: a row for each start of each point, and the progress of the sweep.

Finished rows are in `rows.jsonl`; each is collected once and never changes. Active rows are in
`state.json` with the scheduler's last answer. Waiting ones follow from the plan.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, SchedulerUnavailable
from hpml_orchestrator.jobfile.sweep import MetricPattern
from hpml_orchestrator.records.files import SCHEMA_VERSION, append_line, read_json, write_text
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask
from hpml_orchestrator.scheduler.slurm.records import limits_from, parse_config
from hpml_orchestrator.sweeps.plan import directory_of
from hpml_orchestrator.sweeps.rows import DEFAULT_METRICS, PointRow, is_time_to_target, objective

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.plan import SweepPlan

# How many tasks the scheduler accepts.
#
# Slurm reports the largest size of an array, but not how many jobs a user may have submitted. So a
# refused array is halved until it fits, and the rest of the room is filled in the same way; after
# five minutes one more task is tried.

MAX_TASKS = 1000
"""Most tasks of one batch."""

_RETRY_SECONDS = 300.0
_FIRST_WAIT_SECONDS = 30.0  # for room that was there before; twice as long after each refusal
_ARRAY_LIMIT = re.compile(r"invalid job array specification", re.IGNORECASE)
# Slurm names the limit in a separate line; old versions do not name it.
_SUBMIT_LIMIT = re.compile(
    r"\b(?:QOS|Assoc)\w*Submit\w*Limit|^Batch job submission failed: Job violates accounting"
)


def max_array_size(backend: str, environment: Mapping[str, str]) -> int:
    """Return the largest array for a batch, from the cluster's configuration."""
    if backend != "slurm":
        return MAX_TASKS
    try:
        answer = ask(SubprocessRunner(), ["scontrol", "show", "config"], env=environment)
    except SchedulerUnavailable:
        return MAX_TASKS
    # MaxArraySize bounds the array's index rather than its number of tasks. Every batch counts
    # from 0, so here the two agree.
    return min(MAX_TASKS, limits_from(parse_config(answer.stdout)).max_array_size)


@dataclass
class SweepLimits:
    """What is known of the scheduler's limits."""

    array: int = 0  # most tasks of one array; 0 while not known
    ceiling: int | None = None  # most tasks of this sweep that may be out; None for no limit
    fits: int = 0  # most of them that were out at once since the first refusal
    wait: float = _FIRST_WAIT_SECONDS  # before the next attempt above the ceiling
    retry_at: float = 0.0  # when that is due, seconds since the epoch
    reason: str = ""  # the scheduler's, of the last refusal

    def room(self, out: int, now: float) -> int:
        """Return how many tasks may be submitted now, if `out` tasks of the sweep are active."""
        if self.ceiling is None:
            return self.array
        if out >= self.ceiling:
            return 1 if now >= self.retry_at else 0
        # Between what was accepted before and what was refused, the limit is found by halving.
        known = min(self.fits, self.ceiling) - out
        return min(self.array, known if known > 0 else (self.ceiling - out + 1) // 2)

    def refused(self, tasks: int, reason: str, *, out: int, now: float) -> None:
        """Learn from a batch that was refused while `out` other tasks were active."""
        self.reason = reason.partition(";")[0]
        if tasks > 1 and _ARRAY_LIMIT.search(reason):
            self.array = tasks // 2
        elif _SUBMIT_LIMIT.search(reason):
            # The limit counts all jobs of the user or account, so it leaves more or less room as
            # other jobs come and go. That is why a ceiling is tried again and not kept. A number
            # that fitted before will soon fit again: Slurm may still count a task that has ended.
            self.ceiling = out + tasks - 1
            self.retry_at = now + (self.wait if self.ceiling < self.fits else _RETRY_SECONDS)
            self.wait = min(2 * self.wait, _RETRY_SECONDS)

    def accepted(self, tasks: int, *, out: int) -> None:
        """Learn that a batch was accepted while `out` tasks were active."""
        if self.ceiling is None:
            return
        if out + tasks > self.ceiling:
            self.ceiling = self.fits if out + tasks <= self.fits else None
        self.fits, self.wait = max(self.fits, out + tasks), _FIRST_WAIT_SECONDS


def is_limit(reason: str, tasks: int) -> bool:
    """Return whether a batch of this size was refused for a limit, so that fewer may fit."""
    return bool((tasks > 1 and _ARRAY_LIMIT.search(reason)) or _SUBMIT_LIMIT.search(reason))


SUCCESS_STATES = ("COMPLETED", "PRUNED")
"""The states of points that ended well."""

TOP_UP = "top-up.json"
"""The mark with the `starts` that `run --top-up` wants: the numbers of point and start."""

_EMPTY = vars(PointRow(-1))


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep."""

    counts: Mapping[str, int] = field(default_factory=dict)  # points by state of their last start
    done: int = 0  # points that are over
    total: int = 0  # points without the excluded ones
    gpu_hours: float = 0.0  # spent so far, by finished starts
    core_hours: float = 0.0
    # Until all points are over, at the rate so far; None if unknown.
    eta_seconds: float | None = None
    waits_for: str = ""  # a sentence; empty if the sweep waits for nothing
    missing_metric: str = ""  # a sentence, if no complete run has the figure to be judged by
    finished: bool = False  # whether further ticks would do nothing
    next_tick_seconds: float = 0.0  # until the next tick is useful

    @property
    def failed(self) -> int:
        """Points that are over, or never will be, and did not end well."""
        return self.total - sum(self.counts.get(state, 0) for state in SUCCESS_STATES)


class Table:
    """The rows of a sweep, and the scheduler's last answer.

    Attributes:
        directory: of the sweep's records.
        finished: the starts that are over, by point and start.
        active: those that are submitted, or about to be, and not over.
        limits: what the scheduler accepts at once.
        asked: when it was last queried for the state of jobs, seconds since the epoch.
    """

    def __init__(self, store: Store, plan: SweepPlan) -> None:
        self.directory = directory_of(store, plan.id)
        self.finished: dict[tuple[int, int], PointRow] = {}
        self.active: dict[tuple[int, int], PointRow] = {}
        self.limits, self.asked = SweepLimits(), 0.0
        self._plan, self._saved = plan, self._state()
        self._offset, self._torn = 0, False
        self.read()

    def read(self) -> None:
        """Read what was written since the last time."""
        self._read_rows()
        state = read_mark(self.directory / "state.json")
        if state:
            self.limits, self.asked = SweepLimits(**state["limits"]), state["asked"]
            rows = [_row(**row) for row in state["active"]]
            self.active = {(row.point, row.start): row for row in rows}
            self._saved = state

    def _read_rows(self) -> None:
        """Read the lines after those that are known; a torn one is collected again."""
        try:
            with (self.directory / "rows.jsonl").open("rb") as stream:
                stream.seek(self._offset)
                text = stream.read()
        except FileNotFoundError:
            return
        end = text.rfind(b"\n") + 1
        self._offset += end
        # A process that was killed while appending leaves a line without its end. The next row
        # then begins on a new line, so only the torn row is lost, and collected again.
        self._torn = end < len(text)
        for line in text[:end].splitlines():
            with contextlib.suppress(ValueError):
                row = _row(**json.loads(line))
                self.finished[row.point, row.start] = row

    def _state(self) -> Mapping[str, object]:
        active = [
            {name: value for name, value in vars(row).items() if value != _EMPTY[name]}
            for row in self.active.values()
        ]
        known = {"asked": self.asked, "limits": asdict(self.limits), "active": active}
        return {"schema_version": SCHEMA_VERSION, **known}

    def save(self) -> None:
        """Write `state.json` if it has changed: on one line, there may be ten thousand rows."""
        state = self._state()
        if state != self._saved:
            write_text(self.directory / "state.json", json.dumps(state))
            self._saved = state

    def end(self, row: PointRow) -> None:
        """Add the row of a start that is over."""
        line = json.dumps(vars(row), separators=(",", ":"), default=str)
        append_line(self.directory / "rows.jsonl", f"\n{line}" if self._torn else line)
        self._torn = False
        self.finished[row.point, row.start] = row
        self.active.pop((row.point, row.start), None)

    def stopped(self) -> str:
        """Return why nothing more is submitted; empty if the sweep continues."""
        return str(read_mark(self.directory / "stopped.json").get("reason", ""))

    def resumed(self) -> float:
        """Return when the sweep was resumed after a stop, seconds since the epoch; 0: never."""
        return float(read_mark(self.directory / "resumed.json").get("time", 0.0))

    def incomplete(self) -> dict[int, int]:
        """Return the points that have started, and completed in no start: the number of the last.

        Excluded points and those that a search stopped early are not among them.
        """
        ended = {point for (point, _), row in self.finished.items() if row.state in SUCCESS_STATES}
        return {point: start for point, start in sorted(self.finished) if point not in ended}

    def retries(self) -> list[tuple[int, int]]:
        """Return the retries that are due: numbers of point and start."""
        retry = {str(state): times for state, times in self._plan.spec.retry.items()}
        resumed = self.resumed()
        again = set(map(tuple, read_mark(self.directory / TOP_UP).get("starts", [])))
        counts = Counter((row.point, row.state) for row in self.finished.values())
        last = {point: row for (point, _), row in sorted(self.finished.items())}
        due = []
        for point, row in last.items():
            # Retries are counted by state: a node failure does not use up the retries after a
            # timeout.
            allowed = counts[point, row.state] <= retry.get(row.state, 0)
            with_sweep = row.state == "CANCELLED" and (row.queued or 0.0) < resumed
            following = (point, row.start + 1)
            wanted = allowed or with_sweep or following in again
            if wanted and following not in self.active:
                due.append(following)
        return due

    def rows(self) -> list[PointRow]:
        """Return the rows of all starts, finished, active or waiting, by point and start."""
        stopped = self.stopped()
        found = {key: row for key, row in self.active.items() if row.job_id or not stopped}
        found |= self.finished
        if not stopped:
            found |= {key: PointRow(*key) for key in self.retries()}
        for point in self._plan.points:
            key, reason = (point.number, 0), point.excluded or stopped
            if key not in found:
                state = "EXCLUDED" if reason else "WAITING"
                found[key] = PointRow(*key, state=state, reason=reason, over=bool(reason))
        return [found[key] for key in sorted(found)]

    def missing_metric(self) -> str:
        """Return that no complete run reports what it was to be judged by; empty if one does."""
        spec, search = self._plan.spec, self._plan.spec.search
        named = spec.mode == "grid" and search.metric is not None and not self._plan.trial
        complete = [row for row in self.finished.values() if row.state == "COMPLETED"]
        others = [*search.objectives][1:]
        first = search.metric_name or " or ".join(DEFAULT_METRICS)
        lacking = (one for one in others if all(objective(row, one) is None for row in complete))
        name = next(lacking, first)
        # A figure that is null or NaN is in the result; a missed target may not be.
        timed = is_time_to_target(name)
        known = name == first and any(
            row.metric is not None
            or name in row.result
            or (timed and row.target_accuracy is not None)
            for row in complete
        )
        if known or not complete or not (spec.searches or named):
            return ""
        one = len(complete) == 1
        first = "the first run reports" if one else f"the first {len(complete)} runs report"
        figures = first_few(sorted(complete[0].result), none="nothing")
        what = f"{'it reports' if one else 'they report'} {figures}"
        if isinstance(search.metric, MetricPattern):
            what = f"nothing in {'its' if one else 'their'} output matches {search.metric.pattern}"
        return f"{first} no {name}: {what}"

    def progress(self, waits_for: str = "") -> SweepProgress:
        """Return the progress as of the last tick; `waits_for` as in `SweepProgress`."""
        rows, stopped = self.rows(), self.stopped()
        last = {row.point: row for row in rows}
        planned = [row for row in last.values() if row.state != "EXCLUDED"]
        out = any(row.job_id and not row.over for row in rows)
        spec = self._plan.spec
        trials = spec.search.trials * spec.count if spec.searches else 0
        done, total = sum(row.over for row in planned), max(trials, len(planned))
        ran = [(row.started, row.ended) for row in planned if row.started and row.ended]
        took = max(end for _, end in ran) - min(start for start, _ in ran) if ran else None
        return SweepProgress(
            counts=dict(Counter(row.state for row in last.values())),
            done=done,
            total=total,
            gpu_hours=sum(row.gpu_hours for row in rows),
            core_hours=sum(row.core_hours for row in rows),
            eta_seconds=None if took is None else took / len(ran) * (total - done),
            waits_for=stopped or waits_for,
            missing_metric="" if stopped else self.missing_metric(),
            finished=done == total or bool(stopped and not out),
        )


def _row(*, evaluations: Sequence[Sequence[float]] = (), **fields: Any) -> PointRow:
    """Return a row as it was before it became JSON, which has no tuples."""
    pairs = tuple((seconds, accuracy) for seconds, accuracy in evaluations)
    return PointRow(evaluations=pairs, **fields)


def read_mark(path: Path) -> Mapping[str, Any]:
    """Read a record that may not exist; empty if it does not."""
    try:
        return dict(read_json(path))
    except NotFoundError:
        return {}
