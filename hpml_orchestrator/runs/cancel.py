"""Cancel runs, in one call per scheduler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.status import UNREADABLE, states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["NOT_CANCELLED", "cancel"]

NOT_CANCELLED = "not cancelled"
"""Begins the outcome of a run whose job may still appear."""

_PATIENCE_SECONDS = 15.0
_AGAIN_SECONDS = 1.0


def cancel(
    store: Store,
    submissions: Sequence[Submission],
    *,
    notice: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, str]]:
    """Cancel what is not over and return `id`, `job_id` and `outcome` of each.

    A run that is being submitted is waited for, some seconds; if it still has no job, it is not
    cancelled and its outcome begins with `NOT_CANCELLED`.

    Args:
        store: where records live.
        submissions: what to cancel.
        notice: takes a line to show while a job is waited for.
        clock: seconds since the epoch.
        sleep: pauses for so many seconds.

    Raises:
        SchedulerUnavailable: the scheduler gives no answer.
        RecordError: a record cannot be read; the others are cancelled all the same.
    """
    outcomes: dict[str, dict[str, str]] = {}
    unreadable: list[str] = []
    waiting = submissions
    until = None
    while waiting:
        if until is None:
            until = clock() + _PATIENCE_SECONDS
        elif clock() >= until:
            break
        else:
            sleep(_AGAIN_SECONDS)
        pending = _cancel(store, waiting, outcomes, unreadable, clock)
        if pending and waiting is submissions:
            names = ", ".join(submission.label for submission in pending)
            notice(f"{names} is being submitted: waiting for its job")
        waiting = pending
    if unreadable:
        raise RecordError("\n".join(unreadable))
    return list(outcomes.values())


def _cancel(
    store: Store,
    submissions: Sequence[Submission],
    outcomes: dict[str, dict[str, str]],
    unreadable: list[str],
    clock: Callable[[], float],
) -> list[Submission]:
    """Cancel what has a job, add to the outcomes, and return what is still being submitted."""
    pending = []
    arrays = []
    job_ids: dict[tuple[str, str], list[str]] = {}
    for state in states(store, dict.fromkeys(submissions), now=clock):
        submission = state.submission
        if state.state == UNREADABLE:
            unreadable.append(state.reason)
            continue
        if state.over:
            outcome = f"is over already ({state.state})"
        elif not state.job_id:
            pending.append(submission)
            outcome = f"{NOT_CANCELLED}: it is being submitted ({state.reason})"
        else:
            host = str(submission.record()["host"])
            job_ids.setdefault((state.backend, host), []).append(state.job_id)
            outcome = f"cancelled job {state.job_id}"
            if state.tasks or submission.index is not None:
                arrays.append(submission)
        label = submission.label
        outcomes[label] = {"id": label, "job_id": state.job_id, "outcome": outcome}
    for (name, host), ids in job_ids.items():
        open_backend(name, store, host=host).cancel(ids)
    # A task that never started leaves no record of its own: its end is recorded now, before a
    # scheduler without accounting forgets it.
    states(store, arrays)
    return pending
