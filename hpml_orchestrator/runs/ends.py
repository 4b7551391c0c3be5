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
    """Return how Slurm ended an attempt whose script left no record; None if it did not."""
    state, fault = status.state, ""
    if state is JobState.COMPLETED or not (state.over or state is JobState.REQUEUED):
        return None
    if state in (JobState.FAILED, JobState.OUT_OF_MEMORY):
        fault = memory_fault(attempt.output_end(), attempt.job_id)
    words = fault or ENDING_WORDS.get(state, state.lower().replace("_", " "))
    if state is JobState.FAILED and status.signal and not fault:
        words = f"the job's script was ended by {signal_name(status.signal)}"
    if state is JobState.NODE_FAIL:
        with contextlib.suppress(NotFoundError, RecordError, KeyError):
            head = read_json(attempt.directory / "head.json")["node"]
            words += f", probably {head}: the job's script left no record of its end"
    return {
        "exit_code": exit_status(status) or 1,
        "state": (JobState.OUT_OF_MEMORY if fault else state).value,
        "reason": words,
        "time": status.ended or attempt.last_written or time.time(),
    }


def record_lost_ends(attempts: Iterable[Attempt], starts: Callable[[str], list[JobStatus]]) -> None:
    """Record the ends of attempts that are over; `starts` asks the scheduler about a job."""
    for attempt in attempts:
        if os.path.exists(attempt.directory / "ended.json") or (begun := attempt.started) is None:
            continue
        rows = (one for one in starts(attempt.job_id) if one.started)
        far = {abs((one.started or 0.0) - begun.time): one for one in rows}
        if far:
            record_end(attempt, lost_end(attempt, far[min(far)]))


def record_end(attempt: Attempt, end: EndRecord | None) -> None:
    """Record an end, unless the script has, or that is impossible: the next query tries again."""
    # Exclusively: on NFS the script's own record may not be visible yet.
    with contextlib.suppress(RecordError, OSError):
        if end is not None:
            create_json(attempt.directory / "ended.json", {**end})
