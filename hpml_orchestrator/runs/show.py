"""Text for people about runs and arrays, made from their records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.records.texts import clock_text, elapsed_text, exact_bytes, seconds_text
from hpml_orchestrator.runs.monitored import numbers
from hpml_orchestrator.runs.staged import staged_lines
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.runs.summary import Summary

__all__ = ["AttemptReport", "array_lines", "attempt_reports", "summary_lines", "task_rows"]

_SHORT_COMMIT = 7
_SHOWN = 10
_WAITING = [state.value for state in JobState if state.waiting]
_OVER = [state.value for state in JobState if state.over]


def summary_lines(state: State, summary: Summary) -> list[tuple[str, str]]:
    """Return name and text of each line of a run's summary."""
    staged = []
    if summary.nodes:
        size = f"{exact_bytes(summary.staged_bytes)} in {summary.staging_seconds:.2f} s"
        files = f"{counted(summary.staged_files, 'file')}, {size}"
        staged = [files if summary.staged_files else "nothing", *staged_lines(summary.stages)]
    phases = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in summary.phases)
    signals = [
        f"{name} {count}x, last {clock_text(last)}"
        for name, (count, last) in summary.signals.items()
    ]
    # a reason that is about one rank is left out where `binding` counts all
    reason = "" if summary.binding_failed else state.reason
    return _lines(
        {
            "run": [f"{state.submission.label}  {state.state}"],
            "job": [f"{state.job_id or '-'} ({_scheduler(state)}){_ran_on(state, summary)}"],
            "reason": [reason] if reason else [],
            "attempts": _attempts(attempt_reports(state), state),
            "code": _code(state),
            "staged": staged,
            "collected": summary.collected_lines,
            "binding": [summary.binding] if summary.binding else [],
            "phases": [phases] if phases else [],
            "training": _training(summary),
            "accuracy": _accuracy(summary.result),
            "signals": signals,
            "monitor": summary.monitor_lines,
            "record": [str(state.run.directory)],
        }
    )


def _lines(sections: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the lines of all sections; the first of each has its name."""
    return [
        ("" if number else name, line)
        for name, lines in sections.items()
        for number, line in enumerate(lines)
    ]


def _scheduler(state: State) -> str:
    return f"{state.backend}, cluster {state.cluster}" if state.cluster else state.backend


def _ran_on(state: State, summary: Summary) -> str:
    if not state.nodes:
        return ""
    if not summary.ranks:
        return f" on {state.nodes}"
    of_all = "" if summary.ranks >= summary.world_size else f" of {summary.world_size}"
    several = max(summary.ranks, summary.world_size) > 1
    return f" on {state.nodes}, {summary.ranks}{of_all} rank{'s' * several}"


def _code(state: State) -> list[str]:
    """Return the line about the snapshot of the code, if there is one."""
    try:
        snapshot = state.submission.record()["provenance"].get("snapshot")
    except (HpmlError, KeyError):
        return []
    if not snapshot:
        return []
    commit = snapshot["commit"][:_SHORT_COMMIT] or "no commit yet"
    return [f"{commit}{' + changes' * bool(snapshot['dirty'])} (snapshot)"]


def _training(summary: Summary) -> list[str]:
    if summary.samples_per_second is None:
        return []
    wait = ""
    if summary.data_wait_ratio is not None:
        wait = f", {summary.data_wait_ratio:.0%} of the step time spent waiting for data"
    return [f"{summary.samples_per_second:.0f} samples/s{wait}"]


def _accuracy(result: Mapping[str, object]) -> list[str]:
    figures = numbers(result)
    if "test_accuracy" not in figures:
        return []
    reached = ""
    if "target_accuracy" in figures:
        seconds = figures.get("seconds_to_accuracy")
        how = (
            "not reached" if seconds is None else f"reached after {seconds:.2f} s, warm-up included"
        )
        reached = f"; {figures['target_accuracy']:g} {how}"
    return [f"{figures['test_accuracy']:.4f} on the test set{reached}"]


def array_lines(state: State) -> list[tuple[str, str]]:
    """Return name and text of each line of an array's summary."""
    sid = state.submission.sid
    failed = [task for task in state.tasks if task.over and task.state != "COMPLETED"]
    tasks = {}
    for task in failed[:_SHOWN]:
        code = "" if task.exit_code is None else f", exit code {task.exit_code}"
        why = f": {task.reason}" if task.reason else ""
        tasks[f"task {task.submission.index}"] = [f"{task.state}{code}{why}"]
    more = len(failed) - _SHOWN
    return _lines(
        {
            "run": [f"{sid}  {state.state}"],
            "job": [f"{state.job_id or '-'} ({_scheduler(state)}), {len(state.tasks)} tasks"],
            "tasks": [state.reason],
            "code": _code(state),
            **tasks,
            "": [f"… and {more} more: hpml show {sid}"] if more > 0 else [],
            "record": [str(state.submission.directory)],
        }
    )


def task_rows(state: State) -> list[tuple[str, ...]]:
    """Return a row per task of an array: task, job, state, time, nodes, exit code, reason."""
    return [
        (
            task.submission.label,
            task.job_id,
            task.state,
            elapsed_text(task.started, task.ended),
            task.nodes or "-",
            "-" if task.exit_code is None else str(task.exit_code),
            task.reason or "-",
        )
        for task in state.tasks
    ]


@dataclass(frozen=True)
class AttemptReport:
    """How one attempt went; times are seconds since the epoch, None where not known."""

    number: int  # counted from 0
    over: bool = True
    # Why it ended, or the state of one that has not; empty where it left no record of its end, as
    # when its node failed: then `last_written` says when its newest event was written.
    reason: str = ""
    nodes: str = ""  # node list
    started: float | None = None
    ended: float | None = None
    last_written: float | None = None
    exit_code: int | None = None  # of its script
    error: RecordError | None = None  # why its records cannot be read

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


def _attempts(reports: list[AttemptReport], state: State) -> list[str]:
    """Return the lines about the attempts of a run that was or will be requeued."""
    if len(reports) <= 1 and state.state not in _WAITING:
        return []
    lines = [str(report) for report in reports[-_SHOWN:]]
    if len(reports) > _SHOWN:
        lines.insert(0, f"{len(reports)}, of which the last {_SHOWN}:")
    return lines


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
