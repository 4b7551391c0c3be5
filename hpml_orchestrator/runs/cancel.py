"""Cancel runs, in one call per scheduler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.status import UNREADABLE, states

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.state import State

__all__ = ["NOT_CANCELLED", "cancel"]

NOT_CANCELLED = "not cancelled"
"""How the outcome begins of a run whose job may appear yet."""

_PATIENCE_SECONDS = 15.0
_AGAIN_SECONDS = 1.0


def cancel(
    store: Store,
    submissions: list[Submission],
    *,
    notice: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, str]]:
    """Cancel what is not over and return `id`, `job_id` and `outcome` of each.

    A run that is being submitted is waited for, some seconds. What has no job then is not
    cancelled, and its outcome begins with `NOT_CANCELLED`.

    Args:
        store: where records live.
        submissions: what to cancel.
        notice: takes a line to show, when a job is waited for.
        clock: seconds since the epoch.
        sleep: pauses for so many seconds.

    Raises:
        SchedulerUnavailable: the scheduler gives no answer.
        RecordError: a record cannot be read; the others are cancelled all the same.
    """
    unreadable: list[str] = []
    found = _cancel(store, states(store, submissions, now=clock), unreadable)
    until = clock() + _PATIENCE_SECONDS
    told = False
    while waiting := [one for one in submissions if found.get(one.label, {}).get("job_id") == "?"]:
        if clock() >= until:
            break
        if not told:
            names = ", ".join(dict.fromkeys(one.label for one in waiting))
            notice(f"{names} is being submitted: waiting for its job")
            told = True
        sleep(_AGAIN_SECONDS)
        found |= _cancel(store, states(store, waiting, now=clock), unreadable)
    if unreadable:
        raise RecordError("\n".join(unreadable))
    for one in found.values():
        one["job_id"] = one["job_id"].removesuffix("?")
    return list(found.values())


def _cancel(store: Store, seen: list[State], unreadable: list[str]) -> dict[str, dict[str, str]]:
    """Cancel what has a job, and return what became of each; `?` for the id that is not known."""
    done = {}
    arrays = []
    todo: dict[tuple[str, str], list[str]] = {}
    for state in seen:
        job_id = state.job_id
        if state.over:
            outcome = f"is over already ({state.state})"
        elif state.state == UNREADABLE:
            unreadable.append(state.reason)
            continue
        elif not job_id:
            job_id = "?"
            outcome = f"{NOT_CANCELLED}: it is being submitted ({state.reason})"
        else:
            host = str(state.submission.record()["host"])
            todo.setdefault((state.backend, host), []).append(job_id)
            outcome = f"cancelled job {job_id}"
            if state.tasks or state.submission.index is not None:
                arrays.append(state.submission)
        label = state.submission.label
        done[label] = {"id": label, "job_id": job_id, "outcome": outcome}
    for (name, host), job_ids in todo.items():
        open_backend(name, store, host=host).cancel(job_ids)
    # A task that never started leaves no word of its own: its end is written down now, before a
    # scheduler without accounting forgets it.
    states(store, arrays)
    return done
