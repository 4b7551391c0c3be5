"""`after`: which other jobs a job has to wait for, when it is submitted."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.runs.status import UNREADABLE, states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.scheduler.model import Scheduler

__all__ = ["outstanding"]

_WANTED = {"ok": "completed", "notok": "failed"}


def outstanding(
    store: Store,
    words: Sequence[str],
    *,
    backend: str,
    backends: Callable[[str, str], Scheduler] | None = None,
) -> list[dict[str, str]]:
    """Return the runs that are still to be waited for: `run`, `end` and `job_id` of each.

    A run that is over is judged here, by its record, and needs no waiting: Slurm takes the id of a
    job that it has forgotten for one that ended as it was wanted to.

    Args:
        store: where records live.
        words: `RUN`, or one behind `ok:`, `any:` or `notok:`.
        backend: name of the scheduler that the job is for.
        backends: `(name, host) -> Scheduler`; the real ones when left out.

    Raises:
        InputError: there is no such run, it is another scheduler's, has no job, or did not end as
            wanted.
    """
    if not words:
        return []
    runs = [_resolved(store, word, backend) for word in words]
    found = []
    for word, state in zip(words, states(store, runs, backends=backends), strict=True):
        end = word.rpartition(":")[0] or "ok"
        if state.state == UNREADABLE or not state.job_id:
            raise _wrong(word, f"{state.submission.label} has no job to wait for: {state.reason}")
        if not (state.over or state.lost):
            one = {"run": state.submission.label, "end": end, "job_id": state.job_id}
            found.append(one)
        elif end != "any" and not _ended(state, end):
            how = f"ended {state.state}" if state.over else "ended in a way that nobody knows"
            raise _wrong(
                word,
                f"{state.submission.label} {how}, and the job is to start only after it "
                f"{_WANTED[end]}",
            )
    return found


def _ended(state: State, end: str) -> bool:
    return state.over and (state.state == "COMPLETED") == (end == "ok")


def _resolved(store: Store, word: str, backend: str) -> Submission:
    try:
        submission = store.resolve(word.rpartition(":")[2])
        record = submission.record()
    except (InputError, NotFoundError) as error:
        raise _wrong(word, error.message, error.hint) from error
    other = str(record["backend"])
    if other == "local" and record["host"] != socket.gethostname():
        other = f"local backend of {record['host']}"
    if other != backend:
        raise _wrong(word, f"{submission.label} is a run of the {other}, this job is for {backend}")
    return submission


def _wrong(word: str, message: str, hint: str = "") -> InputError:
    return InputError(message, field="after", value=word, hint=hint or "`hpml list` shows the runs")
