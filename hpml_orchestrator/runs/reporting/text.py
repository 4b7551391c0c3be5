"""Text for people about runs and arrays, made from their records."""

from __future__ import annotations

import contextlib
import html
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.records.texts import (
    clock_text,
    elapsed_text,
    exact_bytes,
    printable,
    seconds_text,
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

_SHORT_COMMIT = 7
_SHOWN = 10
_SHOWN_FIGURES = 100
_LINE_CHARS = 88
_COMMAND_CHARS = 4000
_SHORT_SECONDS = 10


def summary_lines(
    state: State, summary: Summary, life: RunHistory | None = None
) -> list[tuple[str, str]]:
    """Return name and text of each line of a run's summary.

    Args:
        state: of the run.
        summary: of its last attempt.
        life: the run over all of its attempts; None before the first.
    """
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
    # The reason names one rank; leave it out where `binding` counts all of them.
    reason = "" if summary.binding_failed else state.why
    described = describe(state, summary)
    number = 0 if life is None or len(life.attempts) == 1 else len(life.attempts)
    one_of_several = f"{number} of {number}: the figures below are of this attempt"
    software = read_software(state)
    return _lines(
        {
            "run": [f"{state.submission.label}  {state.state}"],
            "job": [f"{state.job_id or '-'} ({_scheduler(state)}){_ran_on(state, summary)}"],
            "reason": [reason] if reason else [],
            **_what(described),
            **_when(state, life),
            "attempts": _attempts(state, life),
            "stacks": _stacks(state),
            **_life(state, life),
            **_hours(described),
            **_code(described),
            "attempt": [one_of_several] if number else [],
            "changed": [*filter(None, [script_change(state, software) if software else ""])],
            "software": [software_line(software)] if software else [],
            "PyTorch": torch_lines(software) if software else [],
            "staged": staged,
            "collected": summary.collected_lines,
            "binding": [summary.binding] if summary.binding else [],
            "phases": [phases] if phases else [],
            "training": _training(summary),
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
    rows = []
    for name, text in lines:
        # every second part is an address
        parts = [html.escape(part) for part in re.split(r"(https?://[^\s\"'<>,]+)", text)]
        parts[1::2] = [f'<a href="{address}">{address}</a>' for address in parts[1::2]]
        shown = "".join(parts)
        cells = f'<th style="text-align:left">{name}</th><td style="text-align:left">{shown}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _lines(sections: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [
        ("" if number else name, printable(line))
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
    ranks = counted(max(summary.ranks, summary.world_size), "rank").partition(" ")[2]
    return f" on {state.nodes}, {summary.ranks}{of_all} {ranks}"


def _what(described: Description) -> dict[str, list[str]]:
    lines = {}
    if described.sweep:
        number = "" if described.point is None else f"{described.point} of "
        values = ", ".join(
            f"{name.lstrip('-')} {value}" for name, value in figures(described.values)
        )
        lines["point"] = [f"{number}{described.sweep}{f': {values}' if values else ''}"]
    if described.command:
        text = f"{described.launcher}: {command_text(described.command)}"
        lines["command"] = [text if len(text) <= _COMMAND_CHARS else f"{text[:_COMMAND_CHARS]}…"]
    return lines


def _when(state: State, life: RunHistory | None = None) -> dict[str, list[str]]:
    """Return the lines about the start of the run and of its last attempt, and about the end."""
    if not state.started:
        lines = {"submitted": [zoned_text(state.created)]} if state.created else {}
        return lines | ({"ended": [zoned_text(state.ended)]} if state.ended else {})
    began, within = zoned_text(state.started), ""
    if life is not None and len(life.attempts) > 1:
        number = len(life.attempts)
        within = f" of attempt {number}"
        if first := life.attempts[0].started:
            began = f"{zoned_text(first)}; attempt {number} {began}"
    if not state.over or not state.ended:
        runs = "" if state.over else f", {elapsed_text(state.started, None)} ago"
        return {"started": [f"{began}{runs}"]}
    took = max(0.0, state.ended - state.started)
    after = f"{took:.1f} s" if took < _SHORT_SECONDS else seconds_text(took)
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    return {
        "started": [began],
        "ended": [f"{zoned_text(state.ended)}, after {after}{within}{code}"],
    }


def _code(described: Description) -> dict[str, list[str]]:
    code = described.code
    if code is None:
        return {"code": ["no git commit is known"]} if described.command else {}
    commit = code["commit"][:_SHORT_COMMIT] or "no commit yet"
    changes = {True: " + changes", None: ", changes are not known"}.get(code["dirty"], "")
    where = f" (branch {code['branch']})" if code["branch"] not in ("", "HEAD") else ""
    return {"code": [f"{commit}{changes}{' (snapshot)' if code['snapshot'] else where}"]}


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
    """Return the line about GPU-hours and core-hours; its name is what they are of."""
    hours = described.hours
    if hours is None:
        return {}
    gpus = f"{hours.gpu:.3g} GPU-hours, " if hours.gpu else ""
    attempts = f" in {counted(hours.attempts, 'attempt')}" if hours.attempts > 1 else ""
    return {hours.basis: [f"{gpus}{hours.core:.3g} core-hours{attempts}"]}


def _training(summary: Summary) -> list[str]:
    if summary.samples_per_second is None:
        return []
    wait = ""
    if summary.data_wait_ratio is not None:
        wait = f", {summary.data_wait_ratio:.0%} of the step time spent waiting for data"
    return [f"{summary.samples_per_second:.0f} samples/s{wait}"]


def _on_test_set(result: Mapping[str, object], name: str) -> list[str]:
    figures = numbers(result)
    if f"test_{name}" not in figures:
        return []
    reached = ""
    if f"target_{name}" in figures:
        seconds = figures.get(f"seconds_to_{name}")
        how = (
            "not reached" if seconds is None else f"reached after {seconds:.2f} s, warm-up included"
        )
        where = " on the validation part" if f"validation_{name}" in figures else ""
        reached = f"; {figures[f'target_{name}']:g}{where} {how}"
    return [f"{figures[f'test_{name}']:.4f} on the test set{reached}"]


def array_lines(state: State) -> list[tuple[str, str]]:
    """Return name and text of each line of an array's summary."""
    sid = state.submission.sid
    failed = [task for task in state.tasks if task.over and task.state != "COMPLETED"]
    described = describe(state, Summary())
    tasks = {}
    for task in failed[:_SHOWN]:
        code = "" if task.exit_code is None else f", exit code {task.exit_code}"
        why = f": {task.reason}" if task.reason else ""
        tasks[f"task {task.submission.index}"] = [f"{task.state}{code}{why}"]
    more = len(failed) - _SHOWN
    return _lines(
        {
            "run": [f"{sid}  {state.state}"],
            "job": [
                f"{state.job_id or '-'} ({_scheduler(state)}), {counted(len(state.tasks), 'task')}"
            ],
            "tasks": [state.reason],
            **tasks,
            "": [f"… and {more} more: hpml show {sid}"] if more > 0 else [],
            **_what(described),
            **_when(replace(state, exit_code=None, started=_first_start(state))),
            **_code(described),
            **_hours(described),
            "record": [str(state.submission.directory)],
        }
    )


def _first_start(state: State) -> float | None:
    """Return when the first attempt of an array's tasks started; states have that of the last."""
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
