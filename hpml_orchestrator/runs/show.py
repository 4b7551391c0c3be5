"""Tell people about jobs and runs: lines of text made from records."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.runs.attempts import attempt_lines, attempt_reports
from hpml_orchestrator.runs.staged import staged_lines
from hpml_orchestrator.runs.texts import clock_text, seconds_text
from hpml_orchestrator.site.output_directory import output_directory
from hpml_orchestrator.staging.capacity import exact_bytes

if TYPE_CHECKING:
    from hpml_orchestrator.runs.snapshot import Snapshot
    from hpml_orchestrator.runs.status import State
    from hpml_orchestrator.runs.submit import Rendered
    from hpml_orchestrator.runs.summary import Summary
    from hpml_orchestrator.spec import ResolvedJob

__all__ = [
    "array_lines",
    "explained",
    "summary_lines",
    "task_rows",
    "time_text",
    "write_rendered",
]

_SHORT_COMMIT = 7
_SHOWN_TASKS = 10


def explained(resolved: ResolvedJob) -> list[tuple[str, Any, str]]:
    """Return field, value and origin of every value of a job, in the order of the model."""
    rows = []
    for field, origin in resolved.origins.items():
        here: Any = resolved.job.model_dump()
        for part in field.split("."):
            here = here[int(part)] if isinstance(here, list) else here[part]
        rows.append((field, here, origin))
    return rows


def write_rendered(rendered: Rendered, directory: str, *, force: bool = False) -> Path:
    """Write `job.sh`, `hpml-node.pyz` and a snapshot into a directory; return the script's path.

    Raises:
        InputError: the directory cannot be made or written, or holds a `job.sh` with another text,
            which may be somebody's work, and `force` is not given; the snapshot cannot be taken, or
            there is one already. A directory that was made is gone again.
    """
    from hpml_orchestrator.script import archive  # noqa: PLC0415 - summaries do without the renderer

    target = Path(os.path.abspath(os.path.expanduser(directory)))
    if rendered.snapshot is not None and rendered.snapshot.holds(target):
        raise InputError(
            f"lies inside the repository {rendered.snapshot.top!r}, which the snapshot is of",
            field="--output",
            value=directory,
            hint="name a directory outside of it",
        )
    script = target / "job.sh"
    with output_directory(target, value=directory):
        if not force and script.exists() and script.read_bytes() != rendered.script.encode("utf-8"):
            raise InputError(
                "holds a job.sh that differs, perhaps edited by hand",
                field="--output",
                value=directory,
                hint="name another directory, or replace it with --force",
            )
        if rendered.snapshot is not None:
            _write_snapshot(rendered.snapshot, target)
        write_text(target / "hpml-node.pyz", archive.build())
        write_text(script, rendered.script, mode=0o755)
    return script


def _write_snapshot(snapshot: Snapshot, directory: Path) -> None:
    """Put the code beside the script; what is there already is never replaced."""
    from hpml_orchestrator.script.render import CODE_DIRECTORY  # noqa: PLC0415

    code = directory / CODE_DIRECTORY
    if os.path.lexists(code):
        raise InputError(
            f"holds a {CODE_DIRECTORY} already",
            field="--output",
            value=str(directory),
            hint=f"name another directory, or remove {code}",
        )
    temporary = Path(tempfile.mkdtemp(prefix=f".{CODE_DIRECTORY}.", dir=directory))
    try:
        snapshot.take(temporary / CODE_DIRECTORY)
        os.rename(temporary / CODE_DIRECTORY, code)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", field="--output", value=str(directory)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def summary_lines(state: State, summary: Summary) -> list[tuple[str, str]]:
    """Return name and text of each line of a run's summary."""
    lines = [
        ("run", f"{state.submission.label}  {state.state}"),
        ("job", f"{state.job_id or '-'} ({state.backend})" + _ran(state, summary)),
    ]
    if state.reason and not summary.binding_failed:  # it is one rank's; below stands how many
        lines.append(("reason", state.reason))
    lines += attempt_lines(attempt_reports(state), state)
    lines += _code(state)
    if summary.nodes:
        files = f"{summary.staged_files} file{'s' * (summary.staged_files != 1)}"
        staged = (
            f"{files}, {exact_bytes(summary.staged_bytes)} in {summary.staging_seconds:.2f} s"
            if summary.staged_files
            else "nothing"
        )
        lines.append(("staged", staged))
        lines += [("", line) for line in staged_lines(summary.stages)]
    if summary.binding:
        lines.append(("binding", summary.binding))
    if summary.phases:
        lines.append(
            ("phases", ", ".join(f"{one.name} {one.seconds:.2f} s" for one in summary.phases))
        )
    lines += _training(summary)
    lines += [
        ("" if number else "signals", f"{name} {count}x, last {clock_text(last)}")
        for number, (name, (count, last)) in enumerate(summary.signals.items())
    ]
    lines += [
        ("" if number else "monitor", line) for number, line in enumerate(summary.monitor_lines)
    ]
    lines.append(("record", str(state.run.directory)))
    return lines


def _code(state: State) -> list[tuple[str, str]]:
    """Return the line about the snapshot of the code, where there is one."""
    try:
        snapshot = state.submission.record()["provenance"].get("snapshot")
    except (HpmlError, KeyError):
        return []
    if not snapshot:
        return []
    commit = snapshot["commit"][:_SHORT_COMMIT] or "no commit yet"
    return [("code", f"{commit}{' + changes' * bool(snapshot['dirty'])} (snapshot)")]


def array_lines(state: State) -> list[tuple[str, str]]:
    """Return name and text of each line of an array's summary."""
    lines = [
        ("run", f"{state.submission.sid}  {state.state}"),
        ("job", f"{state.job_id or '-'} ({state.backend}), {len(state.tasks)} tasks"),
        ("tasks", state.reason),
        *_code(state),
    ]
    bad = [task for task in state.tasks if task.over and task.state != "COMPLETED"]
    for task in bad[:_SHOWN_TASKS]:
        code = "" if task.exit_code is None else f", exit code {task.exit_code}"
        why = f": {task.reason}" if task.reason else ""
        lines.append((f"task {task.submission.index}", f"{task.state}{code}{why}"))
    if len(bad) > _SHOWN_TASKS:
        lines.append(
            ("", f"… and {len(bad) - _SHOWN_TASKS} more: hpml show {state.submission.sid}")
        )
    lines.append(("record", str(state.submission.directory)))
    return lines


def task_rows(state: State) -> list[tuple[str, ...]]:
    """Return a row per task of an array: task, job, state, time, nodes, exit status, reason."""
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
    """Return how long a run has run, or ran; `-` before it has started."""
    if not state.started:
        return "-"
    return seconds_text(max(0, (state.ended or time.time()) - state.started))


def _ran(state: State, summary: Summary) -> str:
    if not state.nodes:
        return ""
    ranks = ""
    if summary.ranks:
        some = "" if summary.ranks >= summary.world_size else f" of {summary.world_size}"
        ranks = f", {summary.ranks}{some} rank{'s' * (max(summary.ranks, summary.world_size) > 1)}"
    return f" on {state.nodes}{ranks}"


def _training(summary: Summary) -> list[tuple[str, str]]:
    result = summary.result
    lines = []
    rate = summary.samples_per_second
    if rate is not None:
        wait = (
            f", {summary.data_wait_ratio:.0%} of the step time spent waiting for data"
            if summary.data_wait_ratio is not None
            else ""
        )
        lines.append(("training", f"{rate:.0f} samples/s{wait}"))
    accuracy = result.get("test_accuracy")
    if isinstance(accuracy, (int, float)):
        target, took = result.get("target_accuracy"), result.get("seconds_to_accuracy")
        reached = ""
        if isinstance(target, (int, float)):
            reached = (
                f"; {target:g} reached after {took:.2f} s, warm-up included"
                if isinstance(took, (int, float))
                else f"; {target:g} not reached"
            )
        lines.append(("accuracy", f"{accuracy:.4f} on the test set{reached}"))
    return lines
