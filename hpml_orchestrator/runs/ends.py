"""The ends of attempts whose script was killed before it could record them, by what Slurm knows."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import create_json, read_json
from hpml_orchestrator.records.texts import ENDING_WORDS, memory_fault, signal_name
from hpml_orchestrator.scheduler.model import JobState, JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import EndRecord

_SIGNALLED = 128


def exit_status(status: JobStatus) -> int | None:
    """Return a job's exit status, 128 plus the signal that ended it; None if it is not known."""
    if status.signal and not status.exit_code:
        return _SIGNALLED + status.signal
    return None if status.state is JobState.FAILED and not status.exit_code else status.exit_code


def lost_end(attempt: Attempt, status: JobStatus) -> EndRecord | None:
    """Return how an attempt without a record of its end was ended; None if it was not.

    Args:
        attempt: whose script was killed.
        status: of its start, by the scheduler.
    """
    ended = status.state.over or status.state is JobState.REQUEUED
    if not ended or status.state is JobState.COMPLETED:
        return None
    fault, state = "", status.state.value
    if status.state in (JobState.FAILED, JobState.OUT_OF_MEMORY):
        fault = memory_fault(attempt.output_end(), attempt.job_id)
    words = fault or ENDING_WORDS.get(state, state.lower().replace("_", " "))
    if status.state is JobState.FAILED and status.signal and not fault:
        words = f"the job's script was ended by {signal_name(status.signal)}"
    if status.state is JobState.NODE_FAIL:
        with contextlib.suppress(NotFoundError, RecordError, KeyError):
            head = read_json(attempt.directory / "head.json")["node"]
            words += f", probably {head}: the job's script left no record of its end"
    return {
        "exit_code": exit_status(status) or 1,
        "state": JobState.OUT_OF_MEMORY.value if fault else state,
        "reason": words,
        "time": status.ended or attempt.last_written or time.time(),
    }


def record_lost_ends(attempts: Iterable[Attempt], starts: Callable[[str], list[JobStatus]]) -> None:
    """Record the ends of attempts that are over; `starts` asks the scheduler about a job."""
    for attempt in attempts:
        begun = attempt.started
        if begun is None or os.path.exists(attempt.directory / "ended.json"):
            continue
        known = [one for one in starts(attempt.job_id) if one.started is not None]
        if known:
            moment = begun.time
            nearest = min(known, key=lambda one: abs((one.started or 0.0) - moment))
            record_end(attempt, lost_end(attempt, nearest))


def record_end(attempt: Attempt, end: EndRecord | None) -> None:
    """Record an end, unless the script has; nothing happens if that is impossible."""
    # Exclusively: on NFS the script's own record may not be visible yet. Another user's records, or
    # a full disk: the next query tries again.
    with contextlib.suppress(RecordError, OSError):
        if end is not None:
            create_json(attempt.directory / "ended.json", {**end})
