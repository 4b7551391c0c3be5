"""Cancel runs, in one call per scheduler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.runs.backend import GO_THERE, backends_of, elsewhere
from hpml_orchestrator.runs.status import UNREADABLE, states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends

NOT_CANCELLED = "not cancelled"
"""The first words of the outcome of a run that may still have a job."""

BEING_SUBMITTED = "it is being submitted"

_PATIENCE_SECONDS = 15.0
_AGAIN_SECONDS = 1.0


def cancel(
    store: Store,
    submissions: Sequence[Submission],
    *,
    notice: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    backends: Backends | None = None,
) -> list[dict[str, str]]:
    """Cancel runs that have not ended and return `id`, `job_id` and `outcome` of each run.

    Wait a few seconds for a run that is being submitted, with a `notice`. If it still has no job,
    it is not cancelled, and its outcome begins with `NOT_CANCELLED`. So does the outcome of a run
    of another cluster, and of a run whose job the scheduler does not know: the id may be another
    job's.

    Raises:
        SchedulerUnavailable: the scheduler does not answer.
        RecordError: a record cannot be read; the others are still cancelled.
    """
    backends = backends or backends_of(store)
    outcomes: dict[str, dict[str, str]] = {}
    unreadable: list[str] = []
    until = clock() + _PATIENCE_SECONDS
    waiting = _cancel(store, submissions, outcomes, unreadable, clock, backends)
    if waiting:
        names = ", ".join(submission.label for submission in waiting)
        are, jobs = ("is", "its job") if len(waiting) == 1 else ("are", "their jobs")
        notice(f"{names} {are} being submitted: waiting for {jobs}")
    while waiting and clock() < until:
        sleep(_AGAIN_SECONDS)
        waiting = _cancel(store, waiting, outcomes, unreadable, clock, backends)
    if unreadable:
        raise RecordError("\n".join(unreadable))
    return list(outcomes.values())


def _cancel(
    store: Store,
    submissions: Sequence[Submission],
    outcomes: dict[str, dict[str, str]],
    unreadable: list[str],
    clock: Callable[[], float],
    backends: Backends,
) -> list[Submission]:
    """Cancel submissions that have a job, add outcomes, and return those still being submitted."""
    pending = []
    arrays = []
    job_ids: dict[tuple[str, str], list[str]] = {}
    for state in states(store, dict.fromkeys(submissions), backends=backends, now=clock):
        submission = state.submission
        if state.state == UNREADABLE:
            unreadable.append(state.reason)
            continue
        if state.over:
            outcome = f"is over already ({state.state})"
        # Never cancel by an id that may have been given to another job: on another cluster, or
        # after the controller forgot ours.
        elif state.elsewhere or state.lost:
            outcome = f"{NOT_CANCELLED}: {state.reason}"
            if state.elsewhere:
                outcome += f"; {GO_THERE}"
        # sbatch may be under way. Saying that there is nothing to cancel would leave a job that
        # starts a moment later.
        elif not state.job_id:
            pending.append(submission)
            outcome = f"{NOT_CANCELLED}: {BEING_SUBMITTED} ({state.reason})"
        else:
            host = str(submission.record()["host"])
            # Raises if the controller does not say which cluster it is: better no cancellation than
            # that of another cluster's job.
            elsewhere(state.cluster, backends(state.backend, host))
            job_ids.setdefault((state.backend, host), []).append(state.job_id)
            outcome = f"cancelled job {state.job_id}"
            if state.state == "UNKNOWN":
                outcome = f"asked to cancel job {state.job_id}, which is unknown: {state.reason}"
            if state.tasks or submission.index is not None:
                arrays.append(submission)
        label = submission.label
        outcomes[label] = {"id": label, "job_id": state.job_id, "outcome": outcome}
    for scheduler, ids in job_ids.items():
        backends(*scheduler).cancel(ids)
    # A task that never started has no record. Query once more to record its end, before a scheduler
    # without accounting forgets it.
    states(store, arrays, backends=backends)
    return pending
