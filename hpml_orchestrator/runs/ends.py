"""How jobs and tasks ended, written down so that nobody has to be asked again.

`final.json` has the last state of a submission that is over, of an array with all of its tasks.
While tasks of an array still go on, `ends.json` has those that are over: a scheduler forgets them
long before the last one ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError
from hpml_orchestrator.records import targets
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.store import Run
from hpml_orchestrator.runs.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["keep_final", "keep_tasks", "read_final", "read_tasks", "run_of"]

_FINAL = "final.json"
_ENDS = "ends.json"


def run_of(store: Store, submission: Submission) -> Run:
    """Return a submission's run, or that of the task that is meant; it need not be there any more.

    An array as a whole has none: what it gets is a directory that never was.
    """
    return Run(store.runs_dir / submission.label)


def keep_final(state: State) -> None:
    """Write a submission's end down, so that it is never asked for again."""
    tasks = {"tasks": _ends_of(state.tasks)} if state.tasks else {}
    directory = state.submission.directory
    with contextlib.suppress(RecordError):  # somebody else's records, or a full disk: asked again
        write_json(directory / _FINAL, {"job_id": state.job_id, **_end_of(state), **tasks})
        with contextlib.suppress(OSError):
            (directory / _ENDS).unlink()
    _withdraw_targets(state)


def _withdraw_targets(state: State) -> None:
    """Remove what Prometheus found the run by, should its agents have died without a word."""
    try:
        asked = state.submission.record()["job"]["monitor"]
        if asked["enabled"]:
            root = state.submission.directory.parents[1]
            directory = asked["targets"] or targets.default_directory(root)
            targets.withdraw_run(Path(directory), state.submission.label)
    except (HpmlError, KeyError, TypeError):
        return


def keep_tasks(submission: Submission, tasks: list[State]) -> None:
    """Write down how tasks ended while others go on: their scheduler will forget them."""
    with contextlib.suppress(RecordError):
        write_json(submission.directory / _ENDS, {"tasks": _ends_of(tasks)})


def _ends_of(tasks: Iterable[State]) -> dict[str, dict[str, Any]]:
    return {str(task.submission.index): _end_of(task) for task in tasks}


def _end_of(state: State) -> dict[str, Any]:
    return {
        "state": state.state,
        "raw_state": state.raw_state,
        "reason": state.reason,
        "nodes": state.nodes,
        "started": state.started,
        "ended": state.ended,
        "exit_code": state.exit_code,
        "attempts": state.attempts,
    }


def read_final(store: Store, submission: Submission, record: dict[str, Any]) -> State | None:
    """Return the last state of a submission that is known to be over, else None."""
    try:
        final = read_json(submission.directory / _FINAL)
    except (NotFoundError, RecordError):
        return None
    whole = _ended(store, submission, record, str(final["job_id"]), final)
    ends = final.get("tasks")
    if not ends:
        return whole
    tasks = _tasks_of(store, submission, record, whole.job_id, ends)
    return replace(whole, tasks=tuple(tasks))


def read_tasks(
    store: Store, submission: Submission, record: dict[str, Any], job_id: str
) -> list[State]:
    """Return the tasks of an array that are known to be over while others are not."""
    try:
        ends: dict[str, dict[str, Any]] = read_json(submission.directory / _ENDS)["tasks"]
    except (NotFoundError, RecordError, KeyError):
        return []
    return _tasks_of(store, submission, record, job_id, ends)


def _tasks_of(
    store: Store,
    submission: Submission,
    record: dict[str, Any],
    job_id: str,
    ends: dict[str, dict[str, Any]],
) -> list[State]:
    """Return the states of an array's tasks that were written down, by index."""
    return [
        _ended(
            store, replace(submission, index=index), record, f"{job_id}_{index}", ends[str(index)]
        )
        for index in sorted(int(key) for key in ends)
    ]


def _ended(
    store: Store, submission: Submission, record: dict[str, Any], job_id: str, end: dict[str, Any]
) -> State:
    return State(
        submission,
        run_of(store, submission),
        name=str(record["name"]),
        backend=str(record["backend"]),
        job_id=job_id,
        state=str(end["state"]),
        reason=str(end["reason"]),
        nodes=str(end["nodes"]),
        created=float(record["created"]),
        started=end["started"],
        ended=end["ended"],
        exit_code=end["exit_code"],
        attempts=int(end["attempts"]),
        over=True,
        raw_state=str(end.get("raw_state", "")),
    )
