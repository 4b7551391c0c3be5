"""What became of the tasks that are out: their own records first, then one question for all.

A task whose record says COMPLETED is over without asking. For the rest the scheduler is asked at
most every 30 seconds, by all processes of the user together: the time of the last question stands
in `tasks.json`, with what was answered.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.records.files import SCHEMA_VERSION, read_json, write_json, write_text
from hpml_orchestrator.runs.state import State, run_of
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.sweeps.batches import Batch

__all__ = [
    "TaskState",
    "TaskStates",
    "ask_to_stop",
    "completed",
    "evaluations",
    "pause_seconds",
    "query",
    "stopped_points",
]

_QUERY_SECONDS = {"slurm": 30.0, "local": 1.0}
_JITTER_SECONDS = {"slurm": 5.0, "local": 0.0}
_LOOK_SECONDS = {"slurm": 5.0, "local": 1.0}
_LOOKS_PER_SECOND = 100
_LOST_SECONDS = 600.0
_STOPS = "stops.json"
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class TaskState:
    """A task that is not over, as of the last question."""

    run: str
    job_id: str
    state: str
    reason: str = ""
    queued: float | None = None
    started: float | None = None
    nodes: str = ""


@dataclass
class TaskStates:
    """The tasks that are out, in `tasks.json`.

    Attributes:
        asked: when the scheduler was last asked, seconds since the epoch.
        tasks: by point and start.
    """

    asked: float = 0.0
    tasks: dict[tuple[int, int], TaskState] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TaskStates:
        """Read the file; without one nothing is out."""
        try:
            record: dict[str, Any] = read_json(path)
        except NotFoundError:
            return cls()
        tasks = {}
        for name, state in record["tasks"].items():
            point, _, start = name.partition(".")
            tasks[int(point), int(start)] = TaskState(**state)
        return cls(record["asked"], tasks)

    def write(self, path: Path) -> None:
        """Keep the states."""
        tasks = {f"{point}.{start}": vars(state) for (point, start), state in self.tasks.items()}
        record = {"schema_version": SCHEMA_VERSION, "asked": self.asked, "tasks": tasks}
        write_text(path, json.dumps(record))  # on one line: there may be ten thousand

    def due(self, backend: str, now: float) -> bool:
        """Return whether the scheduler may be asked again, with some jitter."""
        jitter = random.random() * _JITTER_SECONDS[backend]
        return not 0 <= now - self.asked < _QUERY_SECONDS[backend] + jitter


def pause_seconds(backend: str, out: int) -> float:
    """Return how long to wait until so many tasks are looked at again: 5 to 30 s on a cluster."""
    return max(_LOOK_SECONDS[backend], min(out / _LOOKS_PER_SECOND, _QUERY_SECONDS["slurm"]))


def completed(
    store: Store, batch: Batch, indices: Collection[int], job_id: str
) -> Iterator[tuple[int, State]]:
    """Yield index and state of the tasks whose own record says that they completed."""
    submission = batch.submission(store)
    record: Mapping[str, Any] | None = None
    for index in sorted(indices):
        task = replace(submission, index=index)
        attempts = run_of(task).attempts()
        end = attempts[-1].ended if attempts else None
        if end is None or end.get("state") != JobState.COMPLETED:
            continue
        record = record or submission.record()
        begun = attempts[-1].started
        yield (
            index,
            State.of(
                task,
                record,
                job_id=f"{job_id}_{index}",
                state=JobState.COMPLETED.value,
                nodes=str(begun.data.get("nodes", "")) if begun else "",
                started=begun.time if begun else None,
                ended=float(end["time"]),
                exit_code=int(end["exit_code"]),
                attempts=len(attempts),
                over=True,
            ),
        )


def query(
    store: Store, batches: Collection[Batch], *, backends: Backends, now: Callable[[], float]
) -> Iterator[tuple[Batch, int, State]]:
    """Ask the scheduler once and yield the state of every task of the batches."""
    submissions = [batch.submission(store) for batch in batches]
    for batch, whole in zip(
        batches, states(store, submissions, backends=backends, now=now), strict=True
    ):
        for state in whole.tasks:
            index = state.submission.index
            if index is not None and state.state != UNREADABLE:
                yield batch, index, _without_lost(state, batch.created, now())


def _without_lost(state: State, created: float, now: float) -> State:
    """Return the state; a task that nobody has known for minutes is over."""
    if not state.lost:
        return state
    attempt = state.run.newest()
    seen = max(created, (attempt.last_written if attempt else None) or 0.0)
    return replace(state, over=now - seen > _LOST_SECONDS)


def evaluations(task: Submission, metric: str) -> list[tuple[int, float]]:
    """Return step (the epoch, where it is told) and value of a run's evaluations so far.

    Args:
        task: one task of an array.
        metric: a figure of the result; evaluations may call `test_accuracy` just `accuracy`.
    """
    attempt = run_of(task).newest()
    values: dict[int, float] = {}
    for event in attempt.milestones() if attempt else ():
        data = event.data
        value = data.get(metric, data.get(metric.removeprefix("test_")))
        if event.event == "evaluation" and not data.get("final") and value is not None:
            step = data.get("epoch", data.get("step", len(values) + 1))
            values[int(step)] = float(value)
    return sorted(values.items())


def stopped_points(directory: Path) -> dict[int, float]:
    """Return when each point of a sweep was first asked to stop, seconds since the epoch."""
    try:
        record = read_json(directory / _STOPS)
    except NotFoundError:
        return {}
    return {int(number): moment for number, moment in record["points"].items()}


def ask_to_stop(directory: Path, tasks: Mapping[int, Submission], *, now: float) -> set[int]:
    """Ask runs to stop at their next step, and return the points that have not for a minute.

    Args:
        directory: the sweep's.
        tasks: the run of each point, by its number.
        now: seconds since the epoch.
    """
    asked = stopped_points(directory)
    for number, task in tasks.items():
        attempt = run_of(task).newest()
        if attempt is not None:
            write_text(attempt.directory / "stop", "")
            asked.setdefault(number, now)
    write_json(directory / _STOPS, {"points": asked})
    return {number for number in tasks if now - asked.get(number, now) > _STOP_SECONDS}
