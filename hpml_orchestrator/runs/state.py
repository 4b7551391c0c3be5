"""The state of a submission, of a task of an array, and of an array made of its tasks' states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.store import Run, Submission

__all__ = ["State", "joined"]

# An array that is over is as its worst task: first what a program did wrong.
_WORST_FIRST = (
    "FAILED",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "NODE_FAIL",
    "BOOT_FAIL",
    "PREEMPTED",
    "CANCELLED",
    "COMPLETED",
)
_WORDS = {
    "COMPLETED": "done",
    "RUNNING": "running",
    "COMPLETING": "running",
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "TIMEOUT": "over their time limit",
    "OUT_OF_MEMORY": "out of memory",
}
_WORD_ORDER = ("running", "waiting", "unknown", "failed")


@dataclass(frozen=True)
class State:
    """One submission and its job, or one task of an array, as far as known.

    Attributes:
        submission: the submission; its index is the task's where this is one of an array.
        run: its run; an array as a whole has none, and this directory is not there.
        name, backend: from its record.
        job_id: the scheduler's id; empty while it is not known.
        state: a scheduler's state, or `NOT SUBMITTED`, `REFUSED`, `SUBMITTING`.
        reason: why, in words; of an array how many tasks are in which state; may be empty.
        nodes: node list; may be empty.
        created, started, ended: seconds since the epoch, None where not known.
        exit_code: exit status of the script, None where not known; of an array its worst task's.
        attempts: how many starts there were.
        over: whether nothing more will happen by itself.
        lost: whether the scheduler answers but knows no such job any more, and the job did not
            write down its end: it is not running, and how it ended will not be known.
        raw_state: the scheduler's own word, where it is over.
        tasks: of an array, one state per task, by index.
    """

    submission: Submission
    run: Run
    name: str
    backend: str
    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    attempts: int = 0
    over: bool = False
    lost: bool = False
    raw_state: str = ""
    tasks: tuple[State, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the state for programs; `tasks` is empty for what is no array."""
        return {
            "id": self.submission.label,
            "name": self.name,
            "backend": self.backend,
            "job_id": self.job_id,
            "state": self.state,
            "reason": self.reason,
            "nodes": self.nodes,
            "created": self.created,
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.exit_code,
            "attempts": self.attempts,
            "over": self.over,
            "directory": None if self.tasks else str(self.run.directory),
            "submission": str(self.submission.directory),
            "output": None if self.tasks else str(self.run.output),
            "tasks": [task.task_json() for task in self.tasks],
        }

    def task_json(self) -> dict[str, Any]:
        """Return one task of an array for programs."""
        return {
            "index": self.submission.index,
            "run": self.run.rid,
            "job_id": self.job_id,
            "state": self.state,
            "reason": self.reason,
            "nodes": self.nodes,
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.exit_code,
            "attempts": self.attempts,
            "over": self.over,
            "directory": str(self.run.directory),
            "output": str(self.run.output),
        }


def joined(whole: State, tasks: Sequence[State]) -> State:
    """Return the state of an array.

    It is over when every task is, and then as good as its worst task. Before that it is RUNNING as
    soon as one task runs or some are over while others wait, else PENDING, else UNKNOWN.

    Args:
        whole: what is known of the submission; what its tasks tell is laid over it.
        tasks: one state per task, by index; at least one.
    """
    over = all(task.over for task in tasks)
    worst = min(tasks, key=_badness)
    state = worst.state if over else _unfinished(tasks)
    starts = [task.started for task in tasks if task.started is not None]
    ends = [task.ended for task in tasks if task.ended is not None]
    return replace(
        whole,
        state=state,
        reason=_counted(tasks, state),
        started=min(starts, default=None),
        ended=max(ends, default=None) if over else None,
        exit_code=worst.exit_code if over else None,
        attempts=sum(task.attempts for task in tasks),
        over=over,
        lost=not over and all(task.over or task.lost for task in tasks),
        raw_state=worst.raw_state if over else "",
        tasks=tuple(tasks),
    )


def _badness(task: State) -> int:
    return _WORST_FIRST.index(task.state) if task.state in _WORST_FIRST else len(_WORST_FIRST)


def _unfinished(tasks: Sequence[State]) -> str:
    open_words = {_word(task) for task in tasks if not task.over}
    begun = any(task.over and task.started is not None for task in tasks)
    if open_words == {"unknown"}:
        return JobState.UNKNOWN.value
    if open_words <= {"waiting", "unknown"} and not begun:
        return JobState.PENDING.value
    return JobState.RUNNING.value


def _word(task: State) -> str:
    """Return in one word how a task is; what may be requeued waits."""
    if not task.over and task.state in _WORST_FIRST:
        return "waiting"
    return _WORDS.get(task.state, task.state.lower().replace("_", " "))


def _counted(tasks: Sequence[State], state: str) -> str:
    """Return `3 of 10 done, 2 running, 1 failed`, and why tasks wait where none runs."""
    counts = Counter(_word(task) for task in tasks)
    done = counts.pop("done", 0)
    order = sorted(
        counts,
        key=lambda word: _WORD_ORDER.index(word) if word in _WORD_ORDER else len(_WORD_ORDER),
    )
    text = ", ".join(
        [f"{done} of {len(tasks)} done", *(f"{counts[word]} {word}" for word in order)]
    )
    if state in ("PENDING", "UNKNOWN"):
        why = next((task.reason for task in tasks if not task.over and task.reason), "")
        return f"{text}: {why}" if why else text
    return text
