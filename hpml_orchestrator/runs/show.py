"""Text for people about runs and arrays, made from their records."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, RecordError
from hpml_orchestrator.records.texts import clock_text, exact_bytes, seconds_text
from hpml_orchestrator.runs.staged import staged_lines
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.runs.summary import Summary

__all__ = [
    "AttemptReport",
    "array_lines",
    "attempt_lines",
    "attempt_reports",
    "summary_lines",
    "task_rows",
    "time_text",
]

_SHORT_COMMIT = 7
_SHOWN_TASKS = 10


def summary_lines(state: State, summary: Summary) -> list[tuple[str, str]]:
    """Return name and text of each line of a run's summary."""
    lines = [
        ("run", f"{state.submission.label}  {state.state}"),
        ("job", f"{state.job_id or '-'} ({state.backend}){_ran_on(state, summary)}"),
    ]
    if state.reason and not summary.binding_failed:  # it is about one rank; `binding` counts all
        lines.append(("reason", state.reason))
    lines += attempt_lines(attempt_reports(state), state)
    lines += _code(state)
    if summary.nodes:
        files = f"{summary.staged_files} file{'s' * (summary.staged_files != 1)}"
        size = f"{exact_bytes(summary.staged_bytes)} in {summary.staging_seconds:.2f} s"
        lines.append(("staged", f"{files}, {size}" if summary.staged_files else "nothing"))
        lines += [("", line) for line in staged_lines(summary.stages)]
    if summary.binding:
        lines.append(("binding", summary.binding))
    if summary.phases:
        phases = [f"{phase.name} {phase.seconds:.2f} s" for phase in summary.phases]
        lines.append(("phases", ", ".join(phases)))
    lines += _training(summary)
    signals = [
        f"{name} {count}x, last {clock_text(last)}"
        for name, (count, last) in summary.signals.items()
    ]
    lines += [("" if number else "signals", line) for number, line in enumerate(signals)]
    lines += [
        ("" if number else "monitor", line) for number, line in enumerate(summary.monitor_lines)
    ]
    lines.append(("record", str(state.run.directory)))
    return lines


def _ran_on(state: State, summary: Summary) -> str:
    if not state.nodes:
        return ""
    if not summary.ranks:
        return f" on {state.nodes}"
    of_all = "" if summary.ranks >= summary.world_size else f" of {summary.world_size}"
    several = max(summary.ranks, summary.world_size) > 1
    return f" on {state.nodes}, {summary.ranks}{of_all} rank{'s' * several}"


def _code(state: State) -> list[tuple[str, str]]:
    """Return the line about the snapshot of the code, if there is one."""
    try:
        snapshot = state.submission.record()["provenance"].get("snapshot")
    except (HpmlError, KeyError):
        return []
    if not snapshot:
        return []
    commit = snapshot["commit"][:_SHORT_COMMIT] or "no commit yet"
    return [("code", f"{commit}{' + changes' * bool(snapshot['dirty'])} (snapshot)")]


def _training(summary: Summary) -> list[tuple[str, str]]:
    lines = []
    if summary.samples_per_second is not None:
        wait = ""
        if summary.data_wait_ratio is not None:
            wait = f", {summary.data_wait_ratio:.0%} of the step time spent waiting for data"
        lines.append(("training", f"{summary.samples_per_second:.0f} samples/s{wait}"))
    result = summary.result
    accuracy, target = result.get("test_accuracy"), result.get("target_accuracy")
    if isinstance(accuracy, (int, float)):
        reached = ""
        if isinstance(target, (int, float)):
            seconds = result.get("seconds_to_accuracy")
            reached = f"; {target:g} not reached"
            if isinstance(seconds, (int, float)):
                reached = f"; {target:g} reached after {seconds:.2f} s, warm-up included"
        lines.append(("accuracy", f"{accuracy:.4f} on the test set{reached}"))
    return lines


def array_lines(state: State) -> list[tuple[str, str]]:
    """Return name and text of each line of an array's summary."""
    sid = state.submission.sid
    lines = [
        ("run", f"{sid}  {state.state}"),
        ("job", f"{state.job_id or '-'} ({state.backend}), {len(state.tasks)} tasks"),
        ("tasks", state.reason),
        *_code(state),
    ]
    failed = [task for task in state.tasks if task.over and task.state != "COMPLETED"]
    for task in failed[:_SHOWN_TASKS]:
        code = "" if task.exit_code is None else f", exit code {task.exit_code}"
        why = f": {task.reason}" if task.reason else ""
        lines.append((f"task {task.submission.index}", f"{task.state}{code}{why}"))
    if len(failed) > _SHOWN_TASKS:
        lines.append(("", f"… and {len(failed) - _SHOWN_TASKS} more: hpml show {sid}"))
    lines.append(("record", str(state.submission.directory)))
    return lines


def task_rows(state: State) -> list[tuple[str, ...]]:
    """Return a row per task of an array: task, job, state, time, nodes, exit code, reason."""
    return [
        (
            task.submission.label,
            task.job_id,
            task.state,
            time_text(task),
            task.nodes or "-",
            "-" if task.exit_code is None else str(task.exit_code),
            task.reason or "-",
        )
        for task in state.tasks
    ]


def time_text(state: State) -> str:
    """Return how long a run has been running, or ran; `-` before it has started."""
    if not state.started:
        return "-"
    return seconds_text(max(0, (state.ended or time.time()) - state.started))


_SHOWN = 10
_WAITING = [state.value for state in JobState if state.waiting]
_OVER = [state.value for state in JobState if state.over]


@dataclass(frozen=True)
class AttemptReport:
    """How one attempt went.

    Attributes:
        number: counted from 0.
        over: whether it has ended.
        reason: why it ended, or the state of one that has not; empty where it left no record of
            its end, as when its node failed.
        nodes: node list; may be empty.
        started, ended: seconds since the epoch, None where not known.
        last_written: when its newest event was written, where it left no record of its end.
        exit_code: exit status of its script, None where not known.
        error: why its records cannot be read; then nothing else is known.
    """

    number: int
    over: bool = True
    reason: str = ""
    nodes: str = ""
    started: float | None = None
    ended: float | None = None
    last_written: float | None = None
    exit_code: int | None = None
    error: RecordError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "error": str(self.error) if self.error else None}

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.number}: cannot be read"
        where = f" on {self.nodes}" if self.nodes else ""
        if not self.over:
            since = f" since {clock_text(self.started)}" if self.started else ""
            return f"{self.number}: {self.reason}{since}{where}"
        text = self.reason or "left no record of its end; last event"
        if self.reason == "failed" and self.exit_code is not None:
            text += f" with exit code {self.exit_code}"
        end = self.ended or self.last_written
        after = f" after {seconds_text(max(0, end - self.started))}" if end and self.started else ""
        return f"{self.number}: {text}{after}{where}{f', {clock_text(end)}' if end else ''}"


def attempt_reports(state: State) -> list[AttemptReport]:
    """Return how each attempt of a run went, in order.

    Raises:
        RecordError: the run's directory may not be read.
    """
    attempts = state.run.attempts()
    return [_report(attempt, state, last=attempt is attempts[-1]) for attempt in attempts]


def attempt_lines(reports: list[AttemptReport], state: State) -> list[tuple[str, str]]:
    """Return the summary's lines, name and text, of a run that was or will be requeued."""
    if len(reports) <= 1 and state.state not in _WAITING:
        return []
    lines = [str(report) for report in reports[-_SHOWN:]]
    if len(reports) > _SHOWN:
        lines.insert(0, f"{len(reports)}, of which the last {_SHOWN}:")
    return [("" if number else "attempts", line) for number, line in enumerate(lines)]


def _report(attempt: Attempt, state: State, *, last: bool) -> AttemptReport:
    try:
        attempt.check_readable()
    except RecordError as error:
        return AttemptReport(attempt.number, error=error)
    end, begun = attempt.ended, attempt.started
    known: dict[str, Any] = {}
    if begun is not None:
        known = {"started": begun.time, "nodes": str(begun.data.get("nodes", ""))}
    if end is not None:
        known["reason"] = str(end.get("reason", ""))
        known |= {"ended": float(end["time"]), "exit_code": int(end["exit_code"])}
    elif not last or state.state in _WAITING:
        known["last_written"] = attempt.last_written
    else:
        known["over"] = state.state in _OVER
        known["reason"] = state.state.lower().replace("_", " ")
        known |= {"ended": state.ended, "exit_code": state.exit_code}
    return AttemptReport(attempt.number, **known)
