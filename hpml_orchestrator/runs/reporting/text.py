"""Text for people about runs and arrays, made from their records."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.document.templates import sentences
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.texts import (
    elapsed_text,
    printable,
    zoned_text,
)
from hpml_orchestrator.runs.history import RunHistory, next_step, read_history
from hpml_orchestrator.runs.reporting.description import (
    command_text,
    describe,
    figures,
    read_software,
    script_change,
    software_line,
    torch_lines,
)
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.runs.reporting.summary import Summary, read_links, staged_lines, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.runs.reporting.description import Description
    from hpml_orchestrator.runs.state import State

_SHOWN = 10
_SHOWN_FIGURES = 100
_LINE_CHARS = 88
_COMMAND_CHARS = 4000


def summary_lines(
    state: State, summary: Summary, life: RunHistory | None = None
) -> list[tuple[str, str]]:
    """Return the lines of a run's summary as pairs of name and text.

    Args:
        state: of the run.
        summary: of its last attempt.
        life: the run over all of its attempts; None before the first.
    """
    staged = [_say("staged", summary), *staged_lines(summary.stages)] if summary.nodes else []
    signals = [_say("signal", name, *seen) for name, seen in summary.signals.items()]
    # The reason names one rank; leave it out if `binding` counts all of them.
    reason = "" if summary.binding_failed else state.why
    described = describe(state, summary)
    number = 0 if life is None or len(life.attempts) == 1 else len(life.attempts)
    software = read_software(state)
    is_measured = summary.samples_per_second is not None
    return _lines(
        {
            "run": [f"{state.submission.label}  {state.state}"],
            "job": [_say("place", state, summary.ranks, summary.world_size)],
            "reason": [reason] if reason else [],
            **_what(described),
            **_when(state, life),
            "attempts": _attempts(state, life),
            "stacks": _stacks(state),
            **_life(state, life),
            **_hours(described),
            **_code(described),
            "attempt": [_say("attempt", number)] if number else [],
            "changed": [*filter(None, [script_change(state, software) if software else ""])],
            "software": [software_line(software)] if software else [],
            "PyTorch": torch_lines(software) if software else [],
            "staged": staged,
            "collected": summary.collected_lines,
            "binding": [summary.binding] if summary.binding else [],
            "phases": [_say("phases", summary.phases)] if summary.phases else [],
            "training": [_say("training", summary)] if is_measured else [],
            "accuracy": _on_test_set(summary.result, "accuracy"),
            "loss": _on_test_set(summary.result, "loss"),
            "result": _result(described, summary),
            "links": [f"{name}: {url}" for name, url in read_links(state, summary).items()],
            "signals": signals,
            "monitor": summary.monitor_lines,
            "record": [str(state.run.directory)],
        }
    )


def summary_html(state: State) -> str:
    """Return a run's summary as an HTML table that needs no style sheet, for a notebook.

    Raises:
        RecordError: its records may not be read, or are damaged.
    """
    if state.tasks:
        lines = array_lines(state)
    else:
        summary = summarise(state)
        lines = summary_lines(state, summary, read_history(state, summary))
    return _say("table", lines)


def _say(sentence: str, *figures: object) -> str:
    return sentences("summary.j2")(sentence, *figures)


def _lines(sections: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [
        ("" if number else name, printable(line))
        for name, lines in sections.items()
        for number, line in enumerate(lines)
    ]


def _what(described: Description) -> dict[str, list[str]]:
    lines = {}
    if described.sweep:
        lines["point"] = [_say("point", described, figures(described.values))]
    if described.command:
        text = command_text(described.command)
        lines["command"] = [_say("command", described.launcher, text, _COMMAND_CHARS)]
    return lines


def _when(state: State, life: RunHistory | None = None) -> dict[str, list[str]]:
    """Return the lines about the start of the run and of its last attempt, and about the end."""
    if not state.started:
        lines = {"submitted": [zoned_text(state.created)]} if state.created else {}
        return lines | ({"ended": [zoned_text(state.ended)]} if state.ended else {})
    number = len(life.attempts) if life else 1
    first = life.attempts[0].started if life else None
    lines = {"started": [_say("started", state, first, number)]}
    if state.over and state.ended:
        lines["ended"] = [_say("ended", state, number)]
    return lines


def _code(described: Description) -> dict[str, list[str]]:
    is_known = described.code is not None or described.command
    return {"code": [_say("code", described.code)]} if is_known else {}


def _result(described: Description, summary: Summary) -> list[str]:
    texts: list[str] = []
    other: dict[str, str] = {}
    if described.result_attempt == described.result_file_attempt:
        other = dict(figures(described.result_file or {}))
    for name, value in figures(described.result):
        differs = other.get(name, value) != value
        texts.append(f"{name} {value}{f' (result.json: {other[name]})' if differs else ''}")
    more = len(texts) - _SHOWN_FIGURES
    lines: list[str] = []
    for text in texts[:_SHOWN_FIGURES]:
        if lines and len(lines[-1]) + len(text) <= _LINE_CHARS:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
    if more > 0:
        lines.append(f"… and {more} more: hpml show --json")
    if described.result and described.result_attempt != summary.attempt:
        lines.insert(0, f"of attempt {(described.result_attempt or 0) + 1}, from its result.json:")
    return [*lines, *([described.result_error] if described.result_error else [])]


def _hours(described: Description) -> dict[str, list[str]]:
    """Return the GPU-hours and core-hours under the name of their basis."""
    hours = described.hours
    return {hours.basis: [_say("hours", hours)]} if hours else {}


def _on_test_set(result: Mapping[str, object], name: str) -> list[str]:
    figures = numbers(result)
    return [_say("quality", figures, name)] if f"test_{name}" in figures else []


def array_lines(state: State) -> list[tuple[str, str]]:
    """Return the lines of an array's summary as pairs of name and text."""
    sid = state.submission.sid
    failed = [task for task in state.tasks if task.over and task.state != "COMPLETED"]
    described = describe(state, Summary())
    tasks = {f"task {task.submission.index}": [_say("task", task)] for task in failed[:_SHOWN]}
    more = len(failed) - _SHOWN
    return _lines(
        {
            "run": [f"{sid}  {state.state}"],
            "job": [_say("tasks", state)],
            "tasks": [state.reason],
            **tasks,
            "": [_say("more", more, f"hpml show {sid}")] if more > 0 else [],
            **_what(described),
            **_when(replace(state, exit_code=None, started=_first_start(state))),
            **_code(described),
            **_hours(described),
            "record": [str(state.submission.directory)],
        }
    )


def _first_start(state: State) -> float | None:
    """Return the start of an array's first attempt; a state has that of the last attempt."""
    with contextlib.suppress(HpmlError):  # another user's
        again = [task.run.attempts()[:1] for task in state.tasks if task.attempts > 1]
        times = [one.started.time for first in again for one in first if one.started]
        return min([*times, *filter(None, [state.started])], default=None)
    return state.started


def task_rows(state: State) -> list[tuple[str, ...]]:
    """Return a row per task of an array: task, job, state, time, nodes, exit code, reason."""
    return [
        (
            task.submission.label,
            task.job_id,
            task.state,
            elapsed_text(task.started, task.ended)
            + (f" (attempt {task.attempts})" if task.attempts > 1 else ""),
            task.nodes or "-",
            "-" if task.exit_code is None else str(task.exit_code),
            task.why or "-",
        )
        for task in state.tasks
    ]


def _attempts(state: State, life: RunHistory | None) -> list[str]:
    if life is None:
        return []
    reports, stays = life.attempts, life.attempts[-1].stays
    if len(reports) <= 1 and not state.waits and not stays:
        return []
    lines = [str(report) for report in reports[-_SHOWN:]]
    if stays not in reports[-1].reason:
        lines[-1] += f"; does not continue: {stays}"
    if len(reports) > _SHOWN:
        lines.insert(0, f"{len(reports)}, of which the last {_SHOWN}:")
    return lines


def _life(state: State, life: RunHistory | None) -> dict[str, list[str]]:
    if life is None:
        return {}
    continues = []
    with contextlib.suppress(HpmlError):
        continues = [str(run) for run in [state.submission.record().get("continues")] if run]
    following = next_step(state, life)
    ignored = next((one.ignored for one in reversed(life.attempts) if one.ignored), "")
    cost = "restarts" if len(life.attempts) > 1 else "saving"
    lines = {
        "continues": continues,
        "now": [life.line] if life.left_seconds is not None and life.line else [],
        cost: [life.restarts] if life.restarts else [],
        "progress": [life.progress] if life.progress and not state.over else [],
        "advice": [life.advice] if life.advice else [],
        "stop": [ignored] if ignored else [],
        "next": [following] if following else [],
    }
    return {name: text for name, text in lines.items() if text}


def _stacks(state: State) -> list[str]:
    found = [attempt.directory.glob("stacks/*.txt") for attempt in state.run.attempts()]
    return [str(path) for files in found for path in sorted(files)]
