"""What state submissions are in: own records first, then one batched question per scheduler."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, SchedulerUnavailable
from hpml_orchestrator.jobs.backend import open_backend
from hpml_orchestrator.jobs.submit import settle
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.store import Run
from hpml_orchestrator.scheduler.model import JobState, JobStatus
from hpml_orchestrator.scheduler.recovery import Absent, Found
from hpml_orchestrator.scheduler.slurm import PollSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.records.store import Attempt, Store, Submission
    from hpml_orchestrator.scheduler.model import Scheduler

__all__ = ["State", "states", "wait_until_over"]

_FINAL = "final.json"
_FORGOTTEN_SECONDS = 60.0
_LOST_ANSWERS = 3
UNREADABLE = "UNREADABLE"
_BEFORE_REQUEUE = (JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL)
_REQUEUE_SECONDS = 180.0
_LOOK_SECONDS = 0.2
_RARE_LOOK_SECONDS = 1.0
_OFTEN_SECONDS = 10.0
_LOCAL_END_SECONDS = 0.5


@dataclass(frozen=True)
class State:
    """One submission and its job, as far as known.

    Attributes:
        submission: the submission.
        run: its run.
        name, backend: from its record.
        job_id: the scheduler's id; empty while it is not known.
        state: a scheduler's state, or `NOT SUBMITTED`, `REFUSED`, `SUBMITTING`.
        reason: why, in words; may be empty.
        nodes: node list; may be empty.
        created, started, ended: seconds since the epoch, None where not known.
        exit_code: exit status of the script, None where not known.
        attempts: how many starts there were.
        over: whether nothing more will happen by itself.
        lost: whether the scheduler answers but knows no such job any more, and the job did not
            write down its end: it is not running, and how it ended will not be known.
    """

    submission: Submission
    run: Run
    name: str
    backend: str
    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    attempts: int = 0
    over: bool = False
    lost: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the state for programs."""
        return {
            "id": self.submission.sid,
            "name": self.name,
            "backend": self.backend,
            "job_id": self.job_id,
            "state": self.state,
            "reason": self.reason,
            "nodes": self.nodes,
            "created": self.created,
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.exit_code,
            "attempts": self.attempts,
            "over": self.over,
            "directory": str(self.run.directory),
            "submission": str(self.submission.directory),
            "output": str(self.run.output),
        }


def states(
    store: Store,
    submissions: Iterable[Submission],
    *,
    backends: Callable[[str, str], Scheduler] | None = None,
    now: Callable[[], float] = time.time,
) -> list[State]:
    """Return the state of each submission, in the order given.

    What is over stands in the submission's own record and costs no question; everything else of a
    scheduler goes into one.

    Args:
        store: where records live.
        submissions: which ones.
        backends: `(name, host) -> Scheduler`; the real ones when left out.
        now: the clock, in seconds since the epoch.
    """
    backend = _opened_once(backends or _opener(store))
    known: dict[str, State] = {}
    asked: dict[tuple[str, str], list[tuple[Submission, dict[str, Any], str]]] = {}
    order = []
    for submission in submissions:
        order.append(submission.sid)
        try:
            record = submission.record()
        except (NotFoundError, RecordError) as error:
            known[submission.sid] = _broken(store, submission, str(error))
            continue
        final = _final_of(store, submission, record)
        if final is not None:
            known[submission.sid] = final
            continue
        try:
            job_id, unsettled = _job_id(store, submission, record, backend, now())
        except (NotFoundError, RecordError) as error:
            job_id, unsettled = "", _broken(store, submission, str(error))
        if unsettled is not None:
            known[submission.sid] = unsettled
            continue
        key = _scheduler_key(str(record["backend"]), str(record["host"]))
        asked.setdefault(key, []).append((submission, record, job_id))
    for (name, host), items in asked.items():
        answer, trouble = _ask(backend(name, host), [job_id for _, _, job_id in items])
        for submission, record, job_id in items:
            known[submission.sid] = _state(
                store, submission, record, job_id, answer.get(job_id), trouble, now()
            )
    return [known[sid] for sid in order]


def wait_until_over(
    store: Store,
    submission: Submission,
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
    each: Callable[[State], None] = lambda _: None,
    pauses: PollSchedule | None = None,
) -> State:
    """Return the submission's last state, once it is over.

    The scheduler is asked 1 s after the start and then ever more rarely, up to 30 s apart and never
    in step with others; the end that the job itself writes down makes the next question come at
    once. Its directory is looked at five times a second, but of a job of Slurm, whose records may
    lie on a shared file system, once a second when 10 s are over. A job that its scheduler does not
    know any more, three answers in a row, is waited for no longer.

    Raises:
        RecordError: its record cannot be read.
    """
    pauses = pauses or PollSchedule()
    began = now()
    lost = 0
    backends = _opened_once(_opener(store))
    while True:
        state = states(store, [submission], backends=backends, now=now)[0]
        each(state)
        if state.state == UNREADABLE:
            raise RecordError(state.reason)
        lost = lost + 1 if state.lost else 0
        if state.over or lost >= _LOST_ANSWERS:
            return state
        seen_end, here = _said_end(state.run), state.backend == "local"
        pause = next(pauses)
        deadline = now() + (min(pause, _LOCAL_END_SECONDS) if seen_end and here else pause)
        while now() < deadline:
            each(state)
            often = here or now() - began < _OFTEN_SECONDS
            look = _LOOK_SECONDS if often else _RARE_LOOK_SECONDS
            sleep(min(look, max(0.0, deadline - now())))
            if not seen_end and _said_end(state.run):
                pauses.reset()
                break


def _said_end(run: Run) -> bool:
    attempts = run.attempts()
    return bool(attempts) and os.path.exists(attempts[-1].directory / "ended.json")


def _ask(scheduler: Scheduler, job_ids: list[str]) -> tuple[dict[str, JobStatus], str]:
    try:
        return scheduler.query(job_ids), ""
    except SchedulerUnavailable as error:
        return {}, str(error)


def _opener(store: Store) -> Callable[[str, str], Scheduler]:
    """Return `(name, host) -> Scheduler` for the real schedulers."""
    return lambda name, host: open_backend(name, store, host=host)


def _opened_once(opener: Callable[[str, str], Scheduler]) -> Callable[[str, str], Scheduler]:
    """Return an opener that opens each scheduler when it is first asked for, and only then."""
    opened: dict[tuple[str, str], Scheduler] = {}

    def backend(name: str, host: str) -> Scheduler:
        key = _scheduler_key(name, host)
        if key not in opened:
            opened[key] = opener(name, host)
        return opened[key]

    return backend


def _scheduler_key(name: str, host: str) -> tuple[str, str]:
    """Return what tells schedulers apart: every machine has its own local one."""
    return (name, host if name == "local" else "")


def _run_of(store: Store, submission: Submission) -> Run:
    """Return the submission's run, whose directory may have been removed by hand."""
    try:
        rid = submission.runs()[0][1]
    except (NotFoundError, RecordError, IndexError, ValueError):
        rid = submission.sid
    return Run(store.runs_dir / rid)


def _broken(store: Store, submission: Submission, reason: str) -> State:
    """Return the state of what cannot be read, which says nothing about its job."""
    return State(
        submission,
        _run_of(store, submission),
        name="?",
        backend="?",
        job_id="",
        state=UNREADABLE,
        reason=reason,
    )


def _job_id(
    store: Store,
    submission: Submission,
    record: dict[str, Any],
    backend: Callable[[str, str], Scheduler],
    now: float,
) -> tuple[str, State | None]:
    """Return the job's id, or the state of a submission that has none."""

    def without_job(state: str, reason: str, *, over: bool) -> State:
        return State(
            submission,
            _run_of(store, submission),
            name=str(record["name"]),
            backend=str(record["backend"]),
            job_id="",
            state=state,
            reason=reason,
            created=float(record["created"]),
            over=over,
        )

    job = submission.job()
    if job is not None:
        return str(job["job_id"]), None
    refused = submission.refused()
    if refused is not None:
        return "", without_job("REFUSED", str(refused["reason"]), over=True)
    outcome = settle(
        store, submission, backend(str(record["backend"]), str(record["host"])), now=now
    )
    if isinstance(outcome, Found):
        return outcome.job_id, None
    if isinstance(outcome, Absent) and outcome.refused:
        return "", without_job("REFUSED", outcome.refused, over=True)
    if isinstance(outcome, Absent):
        hint = f"hpml was interrupted; `hpml submit --resume {submission.sid}` submits it"
        return "", without_job("NOT SUBMITTED", hint, over=True)
    return "", without_job("SUBMITTING", outcome.reason, over=False)


def _state(
    store: Store,
    submission: Submission,
    record: dict[str, Any],
    job_id: str,
    status: JobStatus | None,
    trouble: str,
    now: float,
) -> State:
    """Join what the scheduler says with what the job wrote down itself."""
    run = _run_of(store, submission)
    attempts = run.attempts()
    own = attempts[-1] if attempts else None
    lost = False
    said_end = own is not None and own.ended is not None
    if status is None or (status.state is JobState.UNKNOWN and said_end):
        status, lost = _own_status(job_id, own, trouble, submission, now)
    ended = own.ended if own is not None and status.state.over else None
    exit_code = status.exit_code
    if ended is not None and (exit_code is None or status.state is JobState.FAILED):
        exit_code = int(ended["exit_code"])
    reason = _reason(status, own)
    over = status.state.over
    if over and status.state is JobState.CANCELLED and status.started is None and own is None:
        exit_code = None
    if over and _may_come_back(str(record["backend"]), status, now):
        over, reason = False, "it may be requeued"
    state = State(
        submission,
        run,
        name=str(record["name"]),
        backend=str(record["backend"]),
        job_id=job_id,
        state=status.state.value,
        reason=reason,
        nodes=status.nodes,
        created=float(record["created"]),
        started=status.started or _started_of(own),
        ended=status.ended or (float(ended["time"]) if ended else None),
        exit_code=exit_code,
        attempts=len(attempts),
        over=over,
        lost=lost,
    )
    if state.over:
        _keep_final(state, raw=status.raw_state)
    return state


def _reason(status: JobStatus, own: Attempt | None) -> str:
    """Return why a job waits or ended: what hpml knows better before the scheduler's word."""
    if status.state is JobState.FAILED and own is not None:
        failed = own.markers("failed")
        if failed:
            return f"{failed[0].get('node')} was not made ready: {failed[0].get('message')}"
    if status.state is JobState.CANCELLED and status.started is None and own is None:
        return "cancelled before it started"  # Slurm keeps the reason why it waited
    return "" if status.reason == "None" else status.reason


def _may_come_back(backend: str, status: JobStatus, now: float) -> bool:
    """Whether Slurm may be about to requeue a job that it calls over.

    A preempted job, and one whose node failed, passes through that state on its way back into the
    queue; if it is not back after a while, that was its end.
    """
    recent = status.ended is None or now - status.ended < _REQUEUE_SECONDS
    return backend == "slurm" and status.state in _BEFORE_REQUEUE and recent


def _own_status(
    job_id: str, own: Attempt | None, trouble: str, submission: Submission, now: float
) -> tuple[JobStatus, bool]:
    """Say what is known of a job that its scheduler does not know, or cannot be asked about.

    Returns:
        The status, and whether the job is lost.
    """
    ended = own.ended if own is not None else None
    if ended is not None and not trouble:
        code = int(ended["exit_code"])
        words = str(ended.get("reason", ""))
        state = JobState.COMPLETED if code == 0 else JobState.FAILED
        if words == "terminated":
            state = JobState.CANCELLED
        own_status = JobStatus(
            job_id,
            state,
            reason=f"as the job wrote itself: {words}",
            exit_code=code,
            ended=float(ended["time"]),
        )
        return own_status, False
    if trouble:
        return JobStatus(job_id, JobState.UNKNOWN, reason=trouble), False
    started = submission.started_at() or now
    if now - started < _FORGOTTEN_SECONDS:
        reason = "the scheduler does not know it (yet)"
        return JobStatus(job_id, JobState.UNKNOWN, reason=reason), False
    reason = "the scheduler has forgotten it, and the job did not write down its end"
    return JobStatus(job_id, JobState.UNKNOWN, reason=reason), True


def _started_of(own: Attempt | None) -> float | None:
    if own is None:
        return None
    return next((event.time for event in own.events() if event.event == "started"), None)


def _keep_final(state: State, *, raw: str) -> None:
    """Write an end down, so that it is never asked for again."""
    try:
        write_json(
            state.submission.directory / _FINAL,
            {
                "job_id": state.job_id,
                "state": state.state,
                "raw_state": raw,
                "reason": state.reason,
                "nodes": state.nodes,
                "started": state.started,
                "ended": state.ended,
                "exit_code": state.exit_code,
                "attempts": state.attempts,
            },
        )
    except RecordError:
        return  # somebody else's records, or a full disk: then it is asked for again


def _final_of(store: Store, submission: Submission, record: dict[str, Any]) -> State | None:
    try:
        final = read_json(submission.directory / _FINAL)
    except (NotFoundError, RecordError):
        return None
    return State(
        submission,
        _run_of(store, submission),
        name=str(record["name"]),
        backend=str(record["backend"]),
        job_id=str(final["job_id"]),
        state=str(final["state"]),
        reason=str(final["reason"]),
        nodes=str(final["nodes"]),
        created=float(record["created"]),
        started=final["started"],
        ended=final["ended"],
        exit_code=final["exit_code"],
        attempts=int(final["attempts"]),
        over=True,
    )
