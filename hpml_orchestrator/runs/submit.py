"""Submit a job so that it runs once: never twice, never lost, whenever hpml is killed."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    InputError,
    RecordError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.records.files import read_text_or_nothing, write_text
from hpml_orchestrator.records.owner import Owner, owner_is_alive
from hpml_orchestrator.records.run import Run
from hpml_orchestrator.runs.backend import elsewhere, not_here
from hpml_orchestrator.scheduler.command import job_environment
from hpml_orchestrator.scheduler.model import Dependency, SubmitRequest
from hpml_orchestrator.scheduler.slurm.messages import (
    GRACE_SECONDS,
    UNAVAILABLE_SECONDS,
    Absent,
    Found,
    Outcome,
    Undecided,
    recover,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import WaitedRun
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.scheduler.model import Scheduler

_SHORT_GRACE_SECONDS = 30.0
"""How long a request may still be on its way to the controller after hpml and its sbatch, both on
this machine, have ended."""

STALE_SECONDS = 15.0
"""Maximum age of a start marker when sbatch is called: well below the grace period of others."""

AGAIN_SECONDS = 1.0
"""How often a waiting hpml checks whether another process has recorded the job."""


def submit(
    submission: Submission,
    scheduler: Scheduler,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float] = time.time,
) -> str:
    """Submit a prepared submission and return the job's id.

    Raises:
        SchedulerError: refused; the refusal is written down and no job exists.
        SchedulerUnavailable: not known; `resume` finds out.
    """
    after = submission.record().get("after", [])
    job_id = _start(submission, scheduler, 1, after, environment, clock)
    if job_id is None:
        raise SchedulerUnavailable(
            f"another hpml is submitting {submission.sid}, or writing its records was too slow",
            hint=_hint(submission),
        )
    return job_id


def request_of(submission: Submission, environment: Mapping[str, str]) -> SubmitRequest:
    """Return the call of sbatch that a submission's record describes, without dependencies.

    Args:
        submission: prepared.
        environment: of this process.
    """
    record = submission.record()
    job = submission.requested_job()
    return SubmitRequest(
        directory=submission.directory,
        output=Path(record["output"]),
        name=record["name"],
        comment=record["comment"],
        job_name=record.get("job_name", ""),
        environment=job_environment(environment, job.environment.inherit),
        array=job.array is not None,
    )


def _start(
    submission: Submission,
    scheduler: Scheduler,
    number: int,
    after: Sequence[WaitedRun],
    environment: Mapping[str, str],
    clock: Callable[[], float],
) -> str | None:
    """Call sbatch as the start of that number and return the job's id.

    None if another hpml has made that start, or may regard ours as failed.
    """
    waits_for = tuple(Dependency(run["job_id"], run["end"]) for run in after)
    request = replace(request_of(submission, environment), after=waits_for)
    arguments = scheduler.arguments(request)
    encoded = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    # Before the marker, so that every start on record has its exact call of sbatch. NUL-separated,
    # because an argument may hold any other character.
    write_text(submission.directory / "arguments", encoded)
    before = clock()
    # The marker is created exclusively. Of several processes that start the same number, one
    # succeeds, and it is on disk before sbatch exists: from here on nobody may conclude that no job
    # was made.
    if not submission.mark_started(now=before, number=number):
        return None
    if clock() - before >= STALE_SECONDS:
        # The file server hung while the marker was written. Others measure their grace period from
        # the marker's time and may already treat this start as failed.
        return None
    try:
        job_id = scheduler.submit(request, arguments)
    except SchedulerUnavailable as error:
        raise SchedulerUnavailable(str(error), hint=_hint(submission)) from error
    except SchedulerError as error:
        # Recorded, because a refusal is final: `--resume` must report it rather than submit again.
        submission.record_refusal(str(error), now=clock())
        raise
    submission.record_job(job_id, how="sbatch", now=clock())
    return job_id


def determine_outcome(
    store: Store, submission: Submission, scheduler: Scheduler, *, now: float
) -> Outcome:
    """Determine whether a submission without a recorded job has one; never submits.

    Returns:
        `Found` (the job is recorded), `Absent` (no job exists or ever will), or `Undecided` with
        the reason and when to ask again.

    Raises:
        InputError: it belongs to another cluster.
    """
    record = submission.record()
    try:
        # On another cluster neither queue nor accounting knows the job. Without this check that
        # would count as proof that there is none, and a second one would be submitted here.
        where = elsewhere(str(record.get("cluster", "")), scheduler)
    except SchedulerUnavailable as error:
        return Undecided(f"the scheduler gives no answer: {error}", UNAVAILABLE_SECONDS)
    if where:
        raise not_here(where, field="RUN", value=submission.sid)
    # Read before the query, because the query's answer says nothing about later starts.
    starts = submission.starts()
    started, created = submission.started_at(), float(record["created"])
    outcome = recover(
        scheduler,
        submission.directory,
        name=record["name"],
        prepared_at=created,
        sbatch_started_at=started,
        attempt_job_ids=_claimed_ids(store, submission),
        now=now,
        # The full grace period covers an sbatch on another login node, which nobody here can see.
        # If hpml and its sbatch were on this machine and are gone, only a request in flight
        # remains.
        grace_seconds=_SHORT_GRACE_SECONDS if submission.submitter_is_gone() else GRACE_SECONDS,
    )
    if isinstance(outcome, Absent) and started is None:
        # No marker, but the hpml that prepared this submission may be just about to write it.
        recent = abs(now - created) < GRACE_SECONDS
        submitter = Owner.parse(record.get("submitter", {}))
        if recent and submitter and owner_is_alive(submitter):
            return Undecided("hpml is about to call sbatch", AGAIN_SECONDS)
    if isinstance(outcome, Absent) and outcome.refused:
        submission.record_refusal(outcome.refused, now=now)
    # Remembered together with the number of starts, so that a listing need not query Slurm for it
    # again. Another start makes it void.
    elif isinstance(outcome, Absent):
        with contextlib.suppress(RecordError):  # another user's
            submission.record_absence(starts)
    if isinstance(outcome, Found):
        submission.record_job(outcome.job_id, how=outcome.how, now=now)
    return outcome


def next_outcome(
    store: Store,
    submission: Submission,
    attempt: Attempt,
    scheduler: Scheduler,
    *,
    known: Collection[str],
    now: float,
) -> Outcome:
    """Determine whether a run has a continuation after an attempt, and record it.

    Args:
        store: where records live.
        submission: the run's; of one task if it is one of an array.
        attempt: the run's newest.
        scheduler: the submission's.
        known: ids of earlier jobs.
        now: seconds since the epoch.
    """
    start, following = attempt.newest_start(), attempt.next
    # A start whose job is on record has nothing left to appear.
    answered = start is None or bool(following and following["time"] >= start.time)
    gone = start is not None and bool(start.owner and not owner_is_alive(start.owner))
    outcome = recover(
        scheduler,
        submission.directory,
        name=submission.record()["name"],
        prepared_at=attempt.ended["time"] if attempt.ended else submission.started_at() or 0.0,
        sbatch_started_at=None if answered or start is None else start.time,
        attempt_job_ids=[one for one in _claimed_ids(store, submission) if one not in known],
        now=now,
        grace_seconds=_SHORT_GRACE_SECONDS if gone else GRACE_SECONDS,
        answers=attempt.directory,
        known=known,
    )
    if isinstance(outcome, Found):
        submission.record_continuation(outcome.job_id, now=now)
        attempt.record_next("continuation", outcome.job_id, now=now)
    return outcome


def known_absent(store: Store, submission: Submission) -> Absent | None:
    """Return `Absent` if `determine_outcome` has found before that there is no job, else None.

    This queries no scheduler. It holds until sbatch is called again or a job shows up in the
    records.
    """
    answered = read_text_or_nothing(submission.directory / "sbatch.out").strip()
    if answered or not submission.is_absent(submission.starts()):
        return None
    return None if _claimed_ids(store, submission) else Absent("not submitted")


def _claimed_ids(store: Store, submission: Submission) -> list[str]:
    if submission.is_array():  # a task that has not started has no directory
        runs = [Run(store.runs_dir / rid) for _, rid in submission.runs()]
    else:
        runs = [store.run(submission.sid)]
    return [attempt.submitted_id for run in runs for attempt in run.attempts() if attempt.job_id]


def resume(
    store: Store,
    submission: Submission,
    scheduler: Scheduler,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    notice: Callable[[str], None] = lambda _: None,
    after: Callable[[Sequence[str]], list[WaitedRun]] | None = None,
    claim: Callable[[], None] = lambda: None,
) -> str:
    """Complete a submission that was interrupted, and return its job's id.

    The job is searched for first. It is submitted only once it is certain that there is none and
    that no sbatch of an earlier hpml can still create one; if several hpml find so at the same
    time, one of them submits it. `after` returns which of the runs that it waits for are not over
    yet, as `pending_dependencies` does; by default the recorded ones count. `claim` claims the
    directory of checkpoints, just before sbatch is called.

    Raises:
        InputError: it was refused by the scheduler: a new submission is due, not this one. Or it
            belongs to another cluster, or another run saves to its directory of checkpoints.
        SchedulerError: as `submit`.
        SchedulerUnavailable: the scheduler gives no answer.
    """
    while True:
        known = submission.job()
        if known is not None:
            return str(known["job_id"])
        refused = submission.refused()
        if refused is not None:
            raise _was_refused(submission, str(refused["reason"]))
        # Read before the query. If another hpml starts sbatch meanwhile, the number of our start is
        # taken, and `_start` returns None instead of making a second job.
        starts = submission.starts()
        outcome = determine_outcome(store, submission, scheduler, now=clock())
        if isinstance(outcome, Found):
            return outcome.job_id
        if isinstance(outcome, Absent) and outcome.refused:
            raise _was_refused(submission, outcome.refused, outcome.hint)
        if isinstance(outcome, Absent):
            # The runs that it waits for may have ended since. Slurm treats a job id that it has
            # forgotten as a dependency that is fulfilled, so they are judged again by their
            # records.
            runs = submission.record().get("after", [])
            if after is not None and runs:
                runs = after([f"{run['end']}:{run['run']}" for run in runs])
            claim()
            job_id = _start(submission, scheduler, starts + 1, runs, environment, clock)
            if job_id is not None:
                return job_id
            outcome = Undecided("another hpml is submitting it", AGAIN_SECONDS)
        notice(f"{outcome.reason}; asking again in {outcome.retry_after:.0f} s")
        left = outcome.retry_after
        while left > 0 and submission.job() is None and submission.refused() is None:
            # Short naps: another hpml may record the answer meanwhile.
            sleep(min(left, AGAIN_SECONDS))
            left -= AGAIN_SECONDS


def _hint(submission: Submission) -> str:
    return (
        f"`hpml submit --resume {submission.sid}` looks for the job "
        "and submits it only if there is none"
    )


def _was_refused(submission: Submission, reason: str, hint: str = "") -> InputError:
    return InputError(
        f"the scheduler refused it: {reason}",
        field="--resume",
        value=submission.sid,
        hint=hint or "correct the job file and submit it again",
    )
