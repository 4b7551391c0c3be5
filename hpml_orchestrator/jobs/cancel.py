"""Cancel runs, in one call per scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.jobs.backend import open_backend
from hpml_orchestrator.jobs.status import UNREADABLE, states

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["cancel"]


def cancel(store: Store, submissions: list[Submission]) -> list[dict[str, str]]:
    """Cancel what is not over and return `id`, `job_id` and `outcome` of each.

    Raises:
        SchedulerUnavailable: the scheduler gives no answer.
        RecordError: a record cannot be read; the others are cancelled all the same.
    """
    unreadable = []
    done = []
    arrays = []
    todo: dict[tuple[str, str], list[str]] = {}
    for state in states(store, submissions):
        if state.over:
            outcome = f"is over already ({state.state})"
        elif state.state == UNREADABLE:
            unreadable.append(state.reason)
            continue
        elif not state.job_id:
            outcome = f"has no job to cancel yet ({state.state}); try again in a moment"
        else:
            host = str(state.submission.record()["host"])
            todo.setdefault((state.backend, host), []).append(state.job_id)
            outcome = f"cancelled job {state.job_id}"
            if state.tasks or state.submission.index is not None:
                arrays.append(state.submission)
        done.append({"id": state.submission.label, "job_id": state.job_id, "outcome": outcome})
    for (name, host), job_ids in todo.items():
        open_backend(name, store, host=host).cancel(job_ids)
    # A task that never started leaves no word of its own: its end is written down now, before a
    # scheduler without accounting forgets it.
    states(store, arrays)
    if unreadable:
        raise RecordError("\n".join(unreadable))
    return done
