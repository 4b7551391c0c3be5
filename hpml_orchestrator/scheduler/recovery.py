"""Find the job of a submission whose job id was not recorded, because hpml was killed.

`recover` submits nothing. Only `Absent` permits another sbatch. The caller guarantees that:

- the submission's directory is complete, and the marker `sbatch.started` durable in it, before
  sbatch is started;
- sbatch runs in that directory and writes its answer to `sbatch.out` and `sbatch.err` there;
- a job first writes its own id below its run's directory, and ends at once if another job has
  done so before. That is the last guard.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.files import read_text_or_nothing
from hpml_orchestrator.records.ids import parse_answer
from hpml_orchestrator.scheduler.slurm.messages import (
    final_refusal,
    hint_for,
    not_configured,
    on_other_cluster,
    transport_fault,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from hpml_orchestrator.scheduler.model import Scheduler

GRACE_SECONDS = 120.0
"""How long an invisible sbatch may still be running, on this machine or another."""

_POLL_SECONDS = 5.0
UNAVAILABLE_SECONDS = 30.0
"""Pause before the next query of a scheduler that does not answer."""


@dataclass(frozen=True)
class Found:
    """The job exists.

    Attributes:
        job_id: its id.
        how: by which source: sbatch's answer, the job's own record, or the queue.
    """

    job_id: str
    how: Literal["sbatch.out", "job", "queue"]


@dataclass(frozen=True)
class Absent:
    """No job exists, and none will appear: sbatch may be called.

    Attributes:
        reason: why that is certain.
        refused: sbatch's message if it refused the job; otherwise empty.
        hint: what to do about a refusal.
    """

    reason: str
    refused: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Undecided:
    """It is not known yet.

    Attributes:
        reason: why.
        retry_after: seconds after which asking again makes sense.
    """

    reason: str
    retry_after: float


Outcome: TypeAlias = Found | Absent | Undecided


def recover(
    scheduler: Scheduler,
    directory: Path,
    *,
    name: str,
    prepared_at: float,
    sbatch_started_at: float | None,
    attempt_job_ids: Sequence[str],
    now: float,
    grace_seconds: float = GRACE_SECONDS,
    answers: Path | None = None,
    known: Collection[str] = (),
) -> Outcome:
    """Decide whether a submission has a job.

    Args:
        scheduler: the one it was submitted to.
        directory: the submission's directory.
        name: the job's name.
        prepared_at: when the directory was written, seconds since the epoch; no job is older.
        sbatch_started_at: time of the marker `sbatch.started`; None without a marker.
        attempt_job_ids: ids that jobs of this submission have recorded themselves.
        now: seconds since the epoch.
        grace_seconds: how long after its start an sbatch may still be under way unseen; never
            shorter than `GRACE_SECONDS` if sbatch itself reported that its answer was lost.
        answers: directory of sbatch's answer; default: that of the submission.
        known: ids of earlier jobs of the submission, to ignore.
    """
    answers = answers or directory
    # The order matters. Evidence on disk comes first, since it is final and
    # needs no scheduler: sbatch's own answer, then the id that a job wrote when it started.
    answered = _answered(answers, scheduler)
    if answered and not (isinstance(answered, Found) and answered.job_id in known):
        return answered
    recorded = next((job_id.strip() for job_id in attempt_job_ids if job_id.strip()), "")
    if recorded:
        return Found(recorded, "job")
    # A live sbatch may still create the job, so neither queue nor accounting can rule it out yet.
    # This check must come before the query: an sbatch that ends in between has its job in the queue
    # by then.
    if scheduler.submitting(directory):
        return Undecided("sbatch still works on it", _POLL_SECONDS)
    try:
        found = scheduler.find(directory, name=name, since=prepared_at)
        job_ids = [job_id for job_id in found if job_id not in known]
    except SchedulerUnavailable as error:
        stderr = read_text_or_nothing(answers / "sbatch.err")
        if sbatch_started_at is not None and not_configured(stderr):
            # The queue cannot be read for the same reason, so nothing reached any controller.
            refused = final_refusal(stderr)
            if refused:
                return Absent("sbatch refused it", refused, hint_for(refused))
        return Undecided(f"the scheduler gives no answer: {error}", UNAVAILABLE_SECONDS)
    # Several jobs can exist after a double start. The oldest is the one that counts: each job
    # records its id first, and the others end as soon as they see it.
    if job_ids:
        return Found(job_ids[0], "queue")
    # The marker is durable before sbatch starts, so without it no request has ever left this
    # machine.
    if sbatch_started_at is None:
        return Absent("sbatch was never started")
    # A clock that was set back makes the wait longer, never shorter.
    outcome = _jobless(answers, scheduler, grace_seconds, max(now - sbatch_started_at, 0.0))
    if isinstance(outcome, Found) and outcome.job_id in known:
        return Absent("the answer of sbatch is that of an earlier job")
    return outcome


def _jobless(
    directory: Path, scheduler: Scheduler, grace_seconds: float, elapsed_seconds: float
) -> Outcome:
    stderr = read_text_or_nothing(directory / "sbatch.err")
    refused = final_refusal(stderr)
    if refused:
        return Absent("sbatch refused it", refused, hint_for(refused))
    if transport_fault(stderr):
        # The request may wait in a controller that hangs, although sbatch has ended.
        grace_seconds = max(grace_seconds, GRACE_SECONDS)
    left = grace_seconds - elapsed_seconds
    if left > 0:
        return Undecided("sbatch was started a moment ago and has not answered", left)
    # sbatch may have answered while the scheduler was being queried.
    return _answered(directory, scheduler) or Absent(
        f"sbatch has left neither answer nor job in {grace_seconds:g} s"
    )


def _answered(directory: Path, scheduler: Scheduler) -> Found | Absent | None:
    job_id, cluster = parse_answer(read_text_or_nothing(directory / "sbatch.out"))
    if cluster:
        with contextlib.suppress(SchedulerUnavailable):
            if cluster != (here := scheduler.cluster()):
                message, hint = on_other_cluster(job_id, cluster, here)
                return Absent("sbatch sent it to another cluster", message, hint)
    return Found(job_id, "sbatch.out") if job_id else None
