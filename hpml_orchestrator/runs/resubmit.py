"""Submit the job of a run that is over again, so that it continues from the run's checkpoints."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.runs.backend import refuse_elsewhere
from hpml_orchestrator.runs.request import recorded_job
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.records.schema import JobFields
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.spec.job import Job


def checkpoint_directory(state: State) -> str:
    """Return the absolute directory of a run's checkpoints; empty if its job saves none.

    For an array it contains `{array.index}` if each task has its own directory.

    Args:
        state: of a run, or of an array.
    """
    own = recorded_job(state.submission).checkpoint
    if not own.enabled:
        return ""
    run = f"{state.submission.sid}.{{array.index}}" if state.tasks else state.submission.label
    directory = own.directory.removeprefix("{run.dir}/").replace("{run.id}", run)
    return os.path.normpath(os.path.join(state.run.directory.with_name(run), directory))


def refuse_to_resubmit(store: Store, state: State, *, backends: Backends | None = None) -> None:
    """Refuse a run that is not over, is restarted by something else, or is being continued.

    Raises:
        InputError: with the reason, and what to do instead.
    """
    label = state.submission.label
    refuse_elsewhere(state)
    message, hint = _started_by_others(state) or _not_over(state) or ("", "")
    if message:
        raise InputError(message, field="RUN", value=label, hint=hint)
    refuse_if_continued(store, state, backends=backends)


def refuse_if_continued(
    store: Store, state: State, *, also_ended: bool = False, backends: Backends | None = None
) -> None:
    """Refuse to start a run again while another run saves to its checkpoints.

    Args:
        store: where records live.
        state: of the run.
        also_ended: whether to refuse it also if the other run has ended.
        backends: open schedulers.

    Raises:
        InputError: names that run.
    """
    directory = checkpoint_directory(state)
    sharers = _with_directory(store, directory, state.submission) if directory else ()
    others = [other for other in sharers if other.record().get("continues")]
    for other_state in states(store, others, backends=backends):
        other = other_state.submission
        if other_state.unfinished or (also_ended and other_state.created > state.created):
            wait = f"wait for it, or `hpml cancel {other.sid}` first"
            raise InputError(
                f"is continued by {other.sid}, which is {other_state.state}",
                field="RUN",
                value=state.submission.label,
                hint=f"hpml requeue {other.sid}" if not other_state.unfinished else wait,
            )


def refuse_shared_checkpoints(store: Store, job: Job) -> None:
    """Refuse a job that would save to the directory of a run that is not over.

    Raises:
        InputError: names that run.
    """
    own = job.checkpoint
    if not own.enabled or not own.is_shared or "{" in own.directory:
        return
    for state in states(store, _with_directory(store, os.path.normpath(own.directory))):
        if state.unfinished:
            raise InputError(
                f"{state.submission.sid}, which is {state.state}, saves its checkpoints there",
                field="checkpoint.directory",
                value=own.directory,
                hint="give another directory, or wait for that run",
            )


def _started_by_others(state: State) -> tuple[str, str] | None:
    """Return why this run must be restarted in another way, and a hint; None if not."""
    submission, record = state.submission, state.submission.record()
    if record.get("sweep"):
        of_sweep = f"belongs to the sweep {record['sweep']}, which submits its points itself"
        return of_sweep, f"hpml sweep resume {record['sweep']}"
    if recorded_job(submission).has_submitit:
        return "runs a Python function that submitit submitted", "submit the function again"
    if submission.index is not None:
        one = "is one task of a job array; only a whole array can be submitted again"
        return one, f"hpml resubmit {submission.sid}"
    return None


def _not_over(state: State) -> tuple[str, str] | None:
    label = state.submission.label
    if state.state == "NOT SUBMITTED":
        return "was not submitted yet", f"hpml submit --resume {label}"
    if not state.unfinished:
        return None
    if state.state == "COMPLETING":
        return "is ending", "try again in a few seconds"
    restart = f"`hpml requeue {label}` restarts it in its own job"
    return f"has not ended: it is {state.state}", f"{restart}; or `hpml cancel {label}` first"


def fields_to_resubmit(state: State) -> JobFields:
    """Return the fields of a run's job as its record has them, to load and submit them again.

    A relative directory of checkpoints becomes the absolute one of this run. Runs that the job
    waited for are left out once it has started.
    """
    job = state.submission.record()["job"]
    directory = checkpoint_directory(state)
    if directory:
        job["checkpoint"] = {**job["checkpoint"], "directory": directory}
    if state.attempts:
        job["after"] = []
    return job


def last_to_save(store: Store, directory: str, *, before: Submission) -> Submission | None:
    """Return the newest earlier submission that saves to a directory; None if there is none."""
    others = _with_directory(store, directory)
    return next((one for one in others if one.sid != before.sid), None)


def _with_directory(
    store: Store, directory: str, of: Submission | None = None
) -> Iterator[Submission]:
    """Yield the submissions, other than a run's own, that save to a directory, newest first."""
    for submission in store.submissions():
        with contextlib.suppress(HpmlError):
            saves_to = recorded_job(submission).checkpoint.directory
            if of is not None and of.index is not None:
                saves_to = saves_to.replace("{array.index}", str(of.index))
            if saves_to == directory and (of is None or submission.sid != of.sid):
                yield submission
