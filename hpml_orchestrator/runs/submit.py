"""Submit a job so that it runs once: never twice, never lost, whenever hpml is killed."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.records.provenance import collect
from hpml_orchestrator.records.run import Run
from hpml_orchestrator.records.targets import default_directory, sweep
from hpml_orchestrator.runs.backend import check_backend
from hpml_orchestrator.runs.measure import chosen_targets, measured
from hpml_orchestrator.runs.snapshot import Snapshot, find
from hpml_orchestrator.runs.stage_target import NodeRoom, room_of_site
from hpml_orchestrator.scheduler.local.resources import memory_mb
from hpml_orchestrator.scheduler.model import Dependency, SubmitRequest
from hpml_orchestrator.scheduler.recovery import (
    GRACE_SECONDS,
    Absent,
    Found,
    Outcome,
    Undecided,
    recover,
)
from hpml_orchestrator.script import Capabilities, archive, render
from hpml_orchestrator.script.render import CODE_DIRECTORY, directives
from hpml_orchestrator.script.site_rules import leaves_out
from hpml_orchestrator.site.environment import travelling
from hpml_orchestrator.site.profile import topologies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.spec import ResolvedJob
    from hpml_orchestrator.spec.site_load import ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = ["Rendered", "prepare", "render_job", "resume", "settle", "submit"]


_SHORT_GRACE_SECONDS = 30.0
"""How long a request to the controller may still be under way when hpml and its sbatch, both on
this machine, are seen to be gone."""

_STALE_SECONDS = 15.0
"""How old a start may be when sbatch is called: well below what others wait before theirs."""

_AGAIN_SECONDS = 1.0
"""How often a waiting hpml looks whether another one has put the job on record."""


@dataclass(frozen=True)
class Rendered:
    """A job and its script, ready to be submitted or printed.

    Attributes:
        resolved: the complete job.
        script: the text of its script.
        site: the site profile that it is for, if any.
        snapshot: the repository that the submission shall hold a copy of, if any.
        topologies: of the site profile's node types that it may land on, by the type's name.
        targets: why each `target: auto` became what it is, by the name of its entry.
    """

    resolved: ResolvedJob
    script: str
    site: ResolvedSite | None = None
    snapshot: Snapshot | None = None
    topologies: Mapping[str, Topology] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)


def render_job(
    resolved: ResolvedJob,
    capabilities: Capabilities | None = None,
    *,
    site: ResolvedSite | None = None,
    here: bool = False,
) -> Rendered:
    """Complete a job with what must be measured and render its script.

    Args:
        resolved: the job.
        capabilities: what was found out about this installation; looked for when left out.
        site: the site profile, if there is one.
        here: whether it is for this machine, of which the profile's topologies tell nothing.

    Raises:
        InputError: the job cannot be rendered, or its `environment.setup` or templates of the
            user's own make a script that cannot run.
    """
    room = (
        NodeRoom(memory_mb() or None)
        if here
        else room_of_site(resolved.job, site.site if site else None)
    )
    complete = measured(resolved, room)
    targets = chosen_targets(complete)
    setup = complete.job.environment.setup
    if setup:
        from hpml_orchestrator.script.user_template import check_setup  # noqa: PLC0415 - few have it

        check_setup(setup, complete.origins["environment.setup"])
    snapshot = find(complete.job) if complete.job.snapshot else None
    topologies = {} if here else topologies_of(complete.job, site)
    script = render(
        complete.job,
        capabilities or Capabilities(),
        site,
        snapshot=snapshot.paths if snapshot else None,
        topologies=topologies,
        targets=targets,
    )
    if site is not None and site.site.templates:
        from hpml_orchestrator.script.user_template import check_script  # noqa: PLC0415 - few have such

        check_script(script, directives(complete.job, site), site.site.templates)
    return Rendered(complete, script, site, snapshot, topologies, targets)


def prepare(
    store: Store,
    rendered: Rendered,
    *,
    backend: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    after: Sequence[Mapping[str, str]] = (),
    now: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> Submission:
    """Write the submission and its runs down completely; nothing is submitted yet.

    Args:
        store: where records live.
        rendered: the job and its script.
        backend: name of the scheduler that it is for.
        argv: the command line, for the record.
        environment: of the submitting process.
        after: the runs that it waits for, as `after.outstanding` gives them.
        now: seconds since the epoch; the clock when left out.
        notice: takes a line to show, when the snapshot of the code takes long.

    Raises:
        InputError: that scheduler cannot run such a job, or the snapshot that the job asks for
            cannot be taken.
        RecordError: the records cannot be written. Either way nothing is left behind.
    """
    job = rendered.resolved.job
    check_backend(job, backend, store)
    moment = time.time() if now is None else now
    provenance, diff = collect(job.workdir, argv=argv, environment=environment)
    sid = new_id(job.name, now=moment)
    resolved = job.model_dump(mode="json")
    plan: dict[str, Any] = {"name": job.name, "created": moment}
    if job.tasks is None:
        runs = {0: {**plan, "job": resolved, "provenance": provenance}}
    else:  # what all tasks share is kept once, in submit.json
        runs = dict.fromkeys(job.tasks.indices, plan)

    def take_snapshot(directory: Path) -> None:
        if rendered.snapshot is None:
            return
        taken = rendered.snapshot.take(
            directory / CODE_DIRECTORY, leave_out=store.places, notice=notice
        )
        dirty = (provenance["git"] or {"dirty": taken.files > 0})["dirty"]
        # before the records are written that have the provenance in them
        provenance["snapshot"] = {
            "top": rendered.snapshot.top,
            "dirty": dirty,
            **taken.to_json(),
        }

    submission = store.prepare(
        sid,
        script=rendered.script,
        archive=archive.build(),
        submit={
            "name": job.name,
            "created": moment,
            "backend": backend,
            "host": socket.gethostname(),
            "submitter": asdict(this_owner(sid)),
            "comment": _comment(sid, rendered.site),
            "output": str(store.runs_dir / sid / "output.log"),
            "environment_names": sorted(travelling(environment, job.environment.inherit)),
            "job_file": str(rendered.resolved.source),
            "after": list(after),
            "site": [str(path) for path in rendered.site.sources] if rendered.site else [],
            "job": resolved,
            "provenance": provenance,
        },
        runs=runs,
        array=job.tasks is not None,
        fill=take_snapshot,
    )
    if diff:
        write_text(submission.directory / "dirty.diff", diff)
    if job.monitor.enabled:
        sweep(Path(job.monitor.targets or default_directory(store.root)))
    return submission


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
    job_id = _start(submission, scheduler, 1, environment=environment, clock=clock)
    if job_id is None:
        raise SchedulerUnavailable(
            f"another hpml submits {submission.sid}, or its records were too slow to be written",
            hint=_hint(submission),
        )
    return job_id


def _start(
    submission: Submission,
    scheduler: Scheduler,
    number: int,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float],
    after: Sequence[Mapping[str, str]] | None = None,
) -> str | None:
    """Call sbatch as the start of that number; None where that must not be, or not any more."""
    request = _request(submission, environment, after)
    _write_arguments(submission, scheduler.arguments(request))
    before = clock()
    if not submission.mark_started(now=before, number=number):
        return None
    if clock() - before >= _STALE_SECONDS:
        # A file server that stood still: others may take this start for one that came to nothing.
        return None
    try:
        job_id = scheduler.submit(request)
    except SchedulerUnavailable as error:
        raise SchedulerUnavailable(str(error), hint=_hint(submission)) from error
    except SchedulerError as error:
        submission.record_refusal(str(error), now=clock())
        raise
    submission.record_job(job_id, how="sbatch", now=clock())
    return job_id


def settle(
    store: Store,
    submission: Submission,
    scheduler: Scheduler,
    *,
    now: float | None = None,
) -> Outcome:
    """Find out what became of a submission whose job is not recorded; never submits.

    Returns:
        `Found` (its job is recorded then), `Absent` (there is no job, and none will come of
        it), or `Undecided` with the reason and when to ask again.
    """
    moment = time.time() if now is None else now
    record = submission.record()
    if submission.is_array():  # a task that has not started has no directory
        runs = [Run(store.runs_dir / rid) for _, rid in submission.runs()]
    else:
        runs = [store.run(submission.sid)]
    claimed = [attempt.submitted_id for run in runs for attempt in run.attempts() if attempt.job_id]
    started = submission.started_at()
    outcome = recover(
        scheduler,
        submission.directory,
        name=record["name"],
        prepared_at=float(record["created"]),
        sbatch_started_at=started,
        attempt_job_ids=claimed,
        now=moment,
        grace_seconds=_SHORT_GRACE_SECONDS if submission.submitter_is_gone() else GRACE_SECONDS,
    )
    if isinstance(outcome, Absent) and started is None and _is_being_submitted(record, moment):
        return Undecided("hpml is about to call sbatch", _AGAIN_SECONDS)
    if isinstance(outcome, Absent) and outcome.refused:
        submission.record_refusal(outcome.refused, now=moment)
    if isinstance(outcome, Found):
        submission.record_job(outcome.job_id, how=outcome.how, now=moment)
    return outcome


def _is_being_submitted(record: Mapping[str, Any], now: float) -> bool:
    """Whether the hpml that prepared a submission a moment ago may still be about to submit it."""
    return (
        "submitter" in record
        and abs(now - float(record["created"])) < GRACE_SECONDS
        and owner_is_alive(Owner(**record["submitter"]))
    )


def resume(
    store: Store,
    submission: Submission,
    scheduler: Scheduler,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    notice: Callable[[str], None] = lambda _: None,
    after: Callable[[Sequence[str]], Sequence[Mapping[str, str]]] | None = None,
) -> str:
    """Complete a submission that was cut off, and return its job's id.

    The job is looked for first. Only when it is certain that there is none, and that no sbatch of
    an earlier hpml can still make one, is it submitted; of several hpml that find so at the same
    time, by one.

    Args:
        store: where records live.
        submission: which one.
        scheduler: the one that it is for.
        environment: of the submitting process.
        clock: seconds since the epoch.
        sleep: pauses for so many seconds.
        notice: takes a line to show while it waits.
        after: says which of the runs that it waits for are not over yet, as `after.outstanding`;
            those on record when left out.

    Raises:
        InputError: it was refused by the scheduler: a new submission is due, not this one.
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
        starts = submission.starts()  # before the look: it says nothing about later ones
        outcome = settle(store, submission, scheduler, now=clock())
        if isinstance(outcome, Found):
            return outcome.job_id
        if isinstance(outcome, Absent) and outcome.refused:
            raise _was_refused(submission, outcome.refused, outcome.hint)
        if isinstance(outcome, Absent):
            waits = submission.record().get("after", ())
            if after is not None and waits:
                waits = after([f"{one['end']}:{one['run']}" for one in waits])
            job_id = _start(
                submission,
                scheduler,
                starts + 1,
                environment=environment,
                clock=clock,
                after=waits,
            )
            if job_id is not None:
                return job_id
            outcome = Undecided("another hpml submits it at this moment", _AGAIN_SECONDS)
        notice(f"{outcome.reason}; asking again in {outcome.retry_after:.0f} s")
        _pause(submission, outcome.retry_after, sleep)


def _pause(submission: Submission, seconds: float, sleep: Callable[[float], None]) -> None:
    """Sleep, but no longer than until another hpml has put the answer on record."""
    left = seconds
    while left > 0 and submission.job() is None and submission.refused() is None:
        step = min(left, _AGAIN_SECONDS)
        sleep(step)
        left -= step


def _hint(submission: Submission) -> str:
    return (
        f"`hpml submit --resume {submission.sid}` finds out whether the job exists, "
        "and submits it only if it does not"
    )


def _was_refused(submission: Submission, reason: str, hint: str = "") -> InputError:
    return InputError(
        f"the scheduler refused it: {reason}",
        field="--resume",
        value=submission.sid,
        hint=hint or "mend the job file and submit it again",
    )


def _request(
    submission: Submission,
    environment: Mapping[str, str],
    after: Sequence[Mapping[str, str]] | None,
) -> SubmitRequest:
    record = submission.record()
    waits = record.get("after", ()) if after is None else after
    inherit = record["job"]["environment"]["inherit"]
    return SubmitRequest(
        directory=submission.directory,
        output=Path(record["output"]),
        name=record["name"],
        comment=record["comment"],
        environment=travelling(environment, inherit),
        array=record["job"].get("array") is not None,
        after=tuple(Dependency(one["job_id"], one["end"]) for one in waits),
    )


def _comment(sid: str, site: ResolvedSite | None) -> str:
    """Return the job's comment; empty where the site takes none."""
    rules = site.site.directives if site else {}
    return "" if leaves_out(rules, "comment") else f"hpml:{sid}"


def _write_arguments(submission: Submission, arguments: list[str]) -> None:
    """Keep the argument list beside `submit.json`, to the byte."""
    path = submission.directory / "arguments"
    write_text(path, b"".join(os.fsencode(argument) + b"\0" for argument in arguments))
