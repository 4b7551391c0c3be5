"""Continue a run: ask a running one to save and be requeued, or submit one that has ended again.

A continuation is another sbatch in the directory of the run's submission. It follows the same rules
as a submission: never two jobs, never a lost one, whenever hpml is killed. A directory of
checkpoints has one writer: whoever is about to call sbatch claims the directory first, with a
number, as `records.run` explains.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    HpmlError,
    InputError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.records.run import mark_start, newest_start, nodes_to_avoid
from hpml_orchestrator.runs.backend import backends_of, elsewhere, not_here, refuse_elsewhere
from hpml_orchestrator.runs.history import silence_of
from hpml_orchestrator.runs.state import reopen, run_of
from hpml_orchestrator.runs.status import state_of, states
from hpml_orchestrator.runs.submit import AGAIN_SECONDS, STALE_SECONDS, next_outcome, request_of
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask
from hpml_orchestrator.scheduler.slurm.messages import Found, Undecided

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.scheduler.model import Scheduler

ACTIVE = ("RUNNING", "SUSPENDED", "STOPPED")
"""States of a job whose ranks can be asked to save."""


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


def requeue(
    store: Store,
    submission: Submission,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    notice: Callable[[str], None] = lambda _: None,
    backends: Backends | None = None,
) -> dict[str, str]:
    """Continue a run or one task of an array; return `id`, `job_id` and `outcome`.

    Raises:
        InputError: there is nothing to continue, it belongs to another cluster, or another run
            saves to its directory of checkpoints.
        SchedulerError: the scheduler refused the continuation; no job exists.
        SchedulerUnavailable: the scheduler gives no answer; the same call looks for the job.
    """
    backends = backends or backends_of(store)
    # Read before the state: a job id that appears later is another hpml's continuation.
    known = submission.job_ids()
    state = state_of(store, submission, backends=backends, now=clock)
    label = submission.label
    refuse_elsewhere(state)
    if state.tasks:
        hint = f"hpml requeue {label}.{state.tasks[0].submission.index}"
        raise _wrong(label, "is a job array: tasks continue one by one", hint)
    record = submission.record()
    scheduler = backends(state.backend, str(record["host"]))
    if where := elsewhere(state.cluster, scheduler):
        raise not_here(where, field="RUN", value=label)
    newest = run_of(submission).newest()
    # A running job is never submitted again. It is asked to save, and its own script continues it.
    if state.unfinished and state.job_id:
        return _ask_to_stop(state, newest, clock())
    if state.state == "COMPLETED":
        raise _wrong(label, "has completed: there is nothing to continue")
    if newest is None or not newest.job_id:
        hint = f"hpml submit --resume {submission.sid}" if not state.job_id else "submit it again"
        raise _wrong(label, "has never started: there is nothing to continue", hint)
    refuse_if_continued(store, state, also_ended=True, backends=backends)
    known.add(state.job_id.partition("_")[0])  # this one is over, too
    claim = partial(claim_checkpoints, store, submission, backends=backends)
    start = partial(_start, submission, newest, scheduler, claim, environment, clock, notice)
    job_id = _continue(store, submission, newest, scheduler, known, start, clock, sleep, notice)
    return {"id": label, "job_id": job_id, "outcome": f"continues in job {job_id}"}


def _ask_to_stop(state: State, newest: Attempt | None, now: float) -> dict[str, str]:
    label = state.submission.label
    if state.state not in ACTIVE:
        raise _wrong(label, f"is {state.state}, job {state.job_id}: it needs no requeue")
    if not state.submission.requested_job().checkpoint.enabled:
        raise _wrong(
            label,
            "runs without `checkpoint`: its ranks cannot be asked to save",
            f"hpml cancel {label}, then hpml requeue {label}: the program begins anew",
        )
    if newest is None or newest.ended is not None:
        raise _wrong(label, "is just starting or ending", "try again in a moment")
    if newest.stop_request() is None:
        newest.request_stop("requested", by="hpml requeue", now=now)
    reason = str((newest.stop_request() or {}).get("reason", "requested"))
    outcome = f"job {state.job_id} was asked to save and continue ({reason})"
    _, silence = silence_of(state, now)
    if silence:
        outcome += (
            f", but seems not to react: {silence}. If that stays so, its ranks are ended "
            "after `checkpoint.lead`, and it continues from its last checkpoint. To end it now: "
            f"`hpml cancel {label}`, and `hpml requeue {label}` once it is over"
        )
    else:
        outcome += "; it does so when its program reacts to the request"
    return {"id": label, "job_id": state.job_id, "outcome": outcome}


def _continue(
    store: Store,
    submission: Submission,
    newest: Attempt,
    scheduler: Scheduler,
    known: Collection[str],
    start: Callable[[int], str | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    notice: Callable[[str], None],
) -> str:
    """Submit the continuation of a run that is over, exactly once, and return its job's id.

    The `known` jobs have all ended.
    """
    while True:
        # Another hpml, or the script's own continuation, may win this race at any point. Its job is
        # the answer then; a second one would train into the same checkpoints.
        later = run_of(submission).newest()
        if later is not None and later.number > newest.number:
            return later.submitted_id
        job_id = str((submission.job() or {}).get("job_id", ""))
        if job_id not in known:
            return job_id
        # Read before the query, whose answer says nothing about later starts.
        last = newest.newest_start()
        outcome = next_outcome(store, submission, newest, scheduler, known=known, now=clock())
        if isinstance(outcome, Found):
            return outcome.job_id
        if not isinstance(outcome, Undecided):
            if made := start((last.number if last else 0) + 1):
                return made
            outcome = Undecided("another hpml is submitting its continuation", AGAIN_SECONDS)
        notice(f"{outcome.reason}; asking again in {outcome.retry_after:.0f} s")
        sleep(min(outcome.retry_after, 5.0))


def _start(
    submission: Submission,
    newest: Attempt,
    scheduler: Scheduler,
    claim: Callable[[], None],
    environment: Mapping[str, str],
    clock: Callable[[], float],
    notice: Callable[[str], None],
    number: int,
) -> str | None:
    """Call sbatch for a continuation and return the job's id; None if another hpml does so."""
    checkpoint = submission.requested_job().checkpoint
    avoid: list[str] = []
    if checkpoint.avoid_failed_nodes and scheduler.name == "slurm":
        avoid = nodes_to_avoid(newest, lambda argv: ask(SubprocessRunner(), argv).stdout, notice)
    request = replace(
        request_of(submission, environment),
        only=submission.index,
        exclude=tuple(avoid),
        answers=newest.directory,
    )
    arguments = scheduler.arguments(request)
    before = clock()
    if not newest.mark_start(number, now=before) or clock() - before >= STALE_SECONDS:
        return None
    # The record of the end is withdrawn before sbatch runs: once a job exists, nobody may read from
    # the records that the run is over.
    closed = (submission.directory / "final.json").exists()
    reopen(submission)
    try:
        claim()
        job_id = scheduler.submit(request, arguments)
    except SchedulerUnavailable as error:
        hint = f"`hpml requeue {submission.label}` looks for the job and makes one if there is none"
        raise SchedulerUnavailable(str(error), hint=hint) from error
    except (InputError, SchedulerError):
        # Refused, so the recorded end is valid again. The refusal is recorded as the outcome of
        # this start: the next call need not wait for a job that will never appear.
        newest.record_next("refused", "", now=clock())
        if closed:
            reopen(submission, undo=True)
        raise
    submission.record_continuation(job_id, now=clock())
    newest.record_next("continuation", job_id, exclude=avoid, now=clock())
    return job_id


def _wrong(label: str, message: str, hint: str = "") -> InputError:
    return InputError(message, field="RUN", value=label, hint=hint)
