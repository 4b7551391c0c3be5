"""Text for people about runs and arrays, made from their records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.texts import clock_text, exact_bytes, seconds_text
from hpml_orchestrator.runs.attempts import attempt_lines, attempt_reports
from hpml_orchestrator.runs.staged import staged_lines

if TYPE_CHECKING:
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.runs.summary import Summary

__all__ = ["array_lines", "summary_lines", "task_rows", "time_text"]

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
