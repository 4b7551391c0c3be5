"""What became of the tasks that are out: their own records first, then one question for all.

A task whose record says COMPLETED is over without asking. For the rest the scheduler is asked at
most every 30 seconds.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.records.files import read_text_or_nothing, write_text
from hpml_orchestrator.runs.state import State, run_of
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.sweeps.batches import Batch

__all__ = [
    "ask_to_stop",
    "completed",
    "evaluations",
    "may_ask",
    "pause_seconds",
    "query",
    "stop_asked_at",
]

_QUERY_SECONDS = {"slurm": 30.0, "local": 1.0}
_JITTER_SECONDS = {"slurm": 5.0, "local": 0.0}
_LOOK_SECONDS = {"slurm": 5.0, "local": 1.0}
_LOOKS_PER_SECOND = 100
_LOST_SECONDS = 600.0


def may_ask(backend: str, asked: float, now: float) -> bool:
    """Return whether the scheduler, asked at some time, may be asked again, with some jitter."""
    jitter = random.random() * _JITTER_SECONDS[backend]
    return not 0 <= now - asked < _QUERY_SECONDS[backend] + jitter


def pause_seconds(backend: str, out: int) -> float:
    """Return how long to wait until so many tasks are looked at again: 5 to 30 s on a cluster."""
    return max(_LOOK_SECONDS[backend], min(out / _LOOKS_PER_SECOND, _QUERY_SECONDS["slurm"]))


def completed(store: Store, batch: Batch, indices: Collection[int]) -> Iterator[tuple[int, State]]:
    """Yield index and state of the tasks whose own record says that they completed."""
    record = batch.submission(store).record()
    for index in indices:
        task = batch.submission(store, index)
        attempt = run_of(task).newest()
        end = attempt.ended if attempt else None
        if attempt is None or end is None or end.get("state") != JobState.COMPLETED:
            continue
        begun = attempt.started
        yield (
            index,
            State.of(
                task,
                record,
                job_id=f"{batch.job_id}_{index}",
                state=JobState.COMPLETED.value,
                nodes=attempt.nodes,
                started=begun.time if begun else None,
                ended=float(end["time"]),
                over=True,
            ),
        )


def query(
    store: Store, batches: Collection[Batch], *, backends: Backends, now: Callable[[], float]
) -> Iterator[tuple[Batch, int, State]]:
    """Ask the scheduler once and yield the state of every task of the batches.

    A task that nobody has known for ten minutes is over.
    """
    submissions = [batch.submission(store) for batch in batches]
    arrays = states(store, submissions, backends=backends, now=now)
    for batch, array in zip(batches, arrays, strict=True):
        for state in array.tasks:
            index = state.submission.index
            if index is None or state.state == UNREADABLE:
                continue
            over = state.over
            if state.lost:
                attempt = state.run.newest()
                seen = max(batch.created, (attempt.last_written if attempt else None) or 0.0)
                over = now() - seen > _LOST_SECONDS
            yield batch, index, replace(state, over=over)


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


def ask_to_stop(task: Submission, now: float) -> None:
    """Ask a run to stop at its next step, by a file that says since when."""
    attempt = run_of(task).newest()
    if attempt is not None and stop_asked_at(task) is None:
        write_text(attempt.directory / "stop", f"{now}\n")


def stop_asked_at(task: Submission) -> float | None:
    """Return when the search asked a run to stop; None where it did not, even if a user did."""
    attempt = run_of(task).newest()
    with contextlib.suppress(ValueError):
        return float(read_text_or_nothing(attempt.directory / "stop") if attempt else "")
    return None
