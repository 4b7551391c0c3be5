"""Submit the job of a run that is over again, so that it continues from the run's checkpoints.

A directory of checkpoints has one writer. Whoever is about to call sbatch claims the directory
first, with a number, as `records.starts` explains.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.records.run import mark_start, newest_start
from hpml_orchestrator.runs.backend import refuse_elsewhere
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.runs.status import states

ACTIVE = ("RUNNING", "SUSPENDED", "STOPPED")
"""States of a job whose ranks can be asked to save."""

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State


def checkpoint_directory(submission: Submission) -> str:
    """Return the absolute directory of a run's checkpoints; empty if its job saves none.

    For an array it contains `{array.index}` if each task has its own directory.
    """
    own = submission.requested_job().checkpoint
    if not own.enabled:
        return ""
    whole = submission.index is None and submission.is_array()
    run = f"{submission.sid}.{{array.index}}" if whole else submission.label
    directory = own.directory.removeprefix("{run.dir}/").replace("{run.id}", run)
    return os.path.normpath(os.path.join(run_of(submission).directory.with_name(run), directory))


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
    """Refuse to start a run again while another run continues it, or (`also_ended`) has done so.

    Raises:
        InputError: names that run.
    """
    directory = checkpoint_directory(state.submission.at(None))
    others = _saving_to(store, directory, but=state.submission.sid)
    continuing = [other for other in others if other.record().get("continues")]
    for other_state in states(store, continuing, backends=backends):
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
    if own.enabled and own.is_shared and "{run.id}" not in own.directory:
        directory = os.path.normpath(own.directory)
        _refuse_shared(states(store, _saving_to(store, directory)), directory)


def claim_checkpoints(
    store: Store, submission: Submission, *, backends: Backends | None = None
) -> None:
    """Claim a submission's directory of checkpoints, just before sbatch is called for it.

    The submission, or the start of its continuation, must be on record. Of several submissions that
    claim one directory at the same time, one succeeds.

    Raises:
        InputError: names another run that saves there and is not over.
        RecordError: the records cannot be written.
    """
    directory = checkpoint_directory(submission.at(None))
    digest = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
    first = store.submissions_dir / f".{digest}.claimed"
    # Nobody else knows the directory of a run that has not started, unless its path was given.
    is_own = not submission.requested_job().checkpoint.is_shared
    taken = not directory or (is_own and submission.job() is None)
    while not taken:
        # Read before the search: whoever claims the directory later takes the number that would
        # have been ours.
        newest = newest_start(first)
        holder = newest.owner.job_key if newest and newest.owner else ""
        # A submission that is only prepared has to claim the directory, too.
        others = _saving_to(store, directory, but=submission.sid)
        sharers = [one for one in others if one.starts() or one.sid == holder]
        _refuse_shared(states(store, sharers, backends=backends), directory)
        number = newest.number + 1 if newest else 1
        taken = mark_start(first, number, now=time.time(), key=submission.sid)


def _refuse_shared(sharers: Iterable[State], directory: str) -> None:
    for state in sharers:
        if state.unfinished:
            raise InputError(
                f"{state.submission.sid}, which is {state.state}, saves its checkpoints there",
                field="checkpoint.directory",
                value=directory,
                hint="give another directory, or wait for that run",
            )


def _started_by_others(state: State) -> tuple[str, str] | None:
    """Return why this run must be restarted in another way, and a hint; None if not."""
    submission, record = state.submission, state.submission.record()
    if record.get("sweep"):
        of_sweep = f"belongs to the sweep {record['sweep']}, which submits its points itself"
        return of_sweep, f"hpml sweep resume {record['sweep']}"
    if submission.requested_job().has_submitit:
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
    hint = f"`hpml cancel {label}` first"
    if state.state in ACTIVE and state.submission.requested_job().checkpoint.enabled:
        hint = f"`hpml requeue {label}` restarts it in its own job; or {hint}"
    return f"has not ended: it is {state.state}", hint


def job_to_resubmit(state: State) -> Job:
    """Return the job of a run as its record has it, to submit it again.

    A relative directory of checkpoints becomes the absolute one of this run. Runs that the job
    waited for are left out once it has started.
    """
    job = state.submission.requested_job()
    directory = checkpoint_directory(state.submission) or job.checkpoint.directory
    checkpoint = replace(job.checkpoint, directory=directory)
    return replace(job, checkpoint=checkpoint, after=() if state.attempts else job.after)


def last_to_save(store: Store, directory: str, *, before: Submission) -> Submission | None:
    """Return the newest earlier submission that saves to a directory; None if there is none."""
    return next(_saving_to(store, directory, but=before.sid), None)


def _saving_to(store: Store, directory: str, *, but: str = "") -> Iterator[Submission]:
    """Yield the submissions, but for one, that save to a directory, newest first."""
    place = os.path.realpath(directory)  # /scratch may be a link to /lustre/scratch
    for submission in store.submissions() if directory else ():
        with contextlib.suppress(HpmlError):
            other = checkpoint_directory(submission)
            if submission.sid != but and other and os.path.realpath(other) == place:
                yield submission
