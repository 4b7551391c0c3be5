"""What state submissions are in: own records first, then one batched question per scheduler."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, SchedulerUnavailable
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.ends import keep_final, keep_tasks, read_final, read_tasks, run_of
from hpml_orchestrator.runs.state import State, joined
from hpml_orchestrator.scheduler.model import JobState, JobStatus
from hpml_orchestrator.scheduler.recovery import Absent, Found
from hpml_orchestrator.scheduler.slurm.client import PollSchedule
from hpml_orchestrator.scheduler.slurm.states import parse_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.records.store import Attempt, Run, Store, Submission
    from hpml_orchestrator.scheduler.model import Scheduler

__all__ = ["State", "states", "wait_until_over"]

_FORGOTTEN_SECONDS = 60.0
_LOST_ANSWERS = 3
_WATCHED_TASKS = 16
UNREADABLE = "UNREADABLE"
_BEFORE_REQUEUE = (JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL)
_REQUEUE_SECONDS = 180.0
_LOOK_SECONDS = 0.2
_RARE_LOOK_SECONDS = 1.0
_OFTEN_SECONDS = 10.0
_LOCAL_END_SECONDS = 0.5


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
    wanted = list(submissions)
    known: dict[str, State] = {}
    asked: dict[tuple[str, str], list[_Open]] = {}
    for submission in dict.fromkeys(replace(one, index=None) for one in wanted):
        try:
            record = submission.record()
            final = read_final(store, submission, record)
            if final is not None:
                known[submission.sid] = final
                continue
            job_id, unsettled = _job_id(store, submission, record, backend, now())
        except (NotFoundError, RecordError) as error:
            known[submission.sid] = _broken(store, submission, str(error))
            continue
        if unsettled is not None:
            known[submission.sid] = unsettled
            continue
        key = _scheduler_key(str(record["backend"]), str(record["host"]))
        asked.setdefault(key, []).append(_Open.of(store, submission, record, job_id))
    for (name, host), items in asked.items():
        job_ids = [job_id for item in items for job_id in item.unknown]
        answer, trouble = _ask(backend(name, host), job_ids)
        for item in items:
            try:
                known[item.submission.sid] = item.state(answer, trouble, now())
            except RecordError as error:
                known[item.submission.sid] = _broken(store, item.submission, str(error))
    return [_meant(store, known[one.sid], one) for one in wanted]


def _meant(store: Store, state: State, submission: Submission) -> State:
    """Return the state of the task that is meant, or that of the whole submission."""
    if submission.index is None:
        return state
    found = (task for task in state.tasks if task.submission.index == submission.index)
    other = replace(state, submission=submission, run=run_of(store, submission))
    return next(found, other)


@dataclass(frozen=True)
class _Open:
    """A submission that has a job and is not known to be over.

    Attributes:
        runs: index and the scheduler's id of each run that it has.
        ends: states of an array's tasks that are known to be over.
        is_array: whether it has tasks.
    """

    store: Store
    submission: Submission
    record: dict[str, Any]
    job_id: str
    runs: tuple[tuple[int, str], ...]
    ends: dict[int, State]
    is_array: bool

    @staticmethod
    def of(store: Store, submission: Submission, record: dict[str, Any], job_id: str) -> _Open:
        """Return it with what its own records tell."""
        if not submission.is_array():
            return _Open(store, submission, record, job_id, ((0, job_id),), {}, is_array=False)
        runs = tuple((index, f"{job_id}_{index}") for index, _ in submission.runs())
        ends = {
            int(task.submission.index or 0): task
            for task in read_tasks(store, submission, record, job_id)
        }
        return _Open(store, submission, record, job_id, runs, ends, is_array=True)

    @property
    def unknown(self) -> list[str]:
        """The ids that the scheduler is to be asked about."""
        return [job_id for index, job_id in self.runs if index not in self.ends]

    def state(self, answer: dict[str, JobStatus], trouble: str, now: float) -> State:
        """Join what the scheduler says with what was written down, and keep what is over."""
        seen = self.is_array and (bool(self.ends) or any(one in answer for _, one in self.runs))

        def of(submission: Submission, job_id: str) -> State:
            status = answer.get(job_id)
            run = run_of(self.store, submission)
            return _state(submission, run, self.record, job_id, status, trouble, now, seen=seen)

        if not self.is_array:
            state = of(self.submission, self.job_id)
            if state.over:
                keep_final(state)
            return state
        tasks = [
            self.ends.get(index) or of(replace(self.submission, index=index), job_id)
            for index, job_id in self.runs
        ]
        whole = State(
            self.submission,
            run_of(self.store, self.submission),
            name=str(self.record["name"]),
            backend=str(self.record["backend"]),
            job_id=self.job_id,
            state=JobState.UNKNOWN.value,
            created=float(self.record["created"]),
        )
        state = joined(whole, tasks)
        if state.over:
            keep_final(state)
        elif sum(task.over for task in tasks) > len(self.ends):
            keep_tasks(self.submission, [task for task in tasks if task.over])
        return state


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
    said_end = False  # before the scheduler was asked: what is written meanwhile is news
    backends = _opened_once(_opener(store))
    while True:
        state = states(store, [submission], backends=backends, now=now)[0]
        each(state)
        if state.state == UNREADABLE:
            raise RecordError(state.reason)
        lost = lost + 1 if state.lost else 0
        if state.over or lost >= _LOST_ANSWERS:
            return state
        watched = _watched(state)
        said_end = said_end and _all_said_end(watched)
        here = state.backend == "local"
        pause = next(pauses)
        deadline = now() + (min(pause, _LOCAL_END_SECONDS) if said_end and here else pause)
        while now() < deadline:
            each(state)
            often = here or now() - began < _OFTEN_SECONDS
            look = _LOOK_SECONDS if often else _RARE_LOOK_SECONDS
            sleep(min(look, max(0.0, deadline - now())))
            if not said_end and _all_said_end(watched):
                said_end = True
                pauses.reset()
                break


def _watched(state: State) -> list[Run]:
    """Return the runs whose own word of their end is worth a look several times a second.

    Of an array only its last few tasks are: that it is about to be over is news, what one of many
    does is not, and every look leads to a question to the scheduler.
    """
    if not state.tasks:
        return [state.run]
    going = [task.run for task in state.tasks if not task.over]
    return going if len(going) <= _WATCHED_TASKS else []


def _all_said_end(runs: list[Run]) -> bool:
    return bool(runs) and all(_said_end(run) for run in runs)


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


def _broken(store: Store, submission: Submission, reason: str) -> State:
    """Return the state of what cannot be read, which says nothing about its job."""
    return State(
        submission,
        run_of(store, submission),
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
            run_of(store, submission),
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
    from hpml_orchestrator.runs.submit import settle  # noqa: PLC0415 - half a second, rarely needed

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
    submission: Submission,
    run: Run,
    record: dict[str, Any],
    job_id: str,
    status: JobStatus | None,
    trouble: str,
    now: float,
    *,
    seen: bool,
) -> State:
    """Join what the scheduler says with what the job wrote down itself.

    `seen`: whether it is a task of an array of which other tasks are known.
    """
    # Of ten thousand tasks that wait, not one directory has to be looked into.
    waits = submission.index is not None and status is not None and status.state.waiting
    attempts = [] if waits and not (status and status.restarts) else run.attempts()
    own = attempts[-1] if attempts else None
    lost = False
    said_end = own is not None and own.ended is not None
    if status is None or (status.state is JobState.UNKNOWN and said_end):
        if seen and own is None and not trouble:
            # Slurm keeps no record at all of a task that is cancelled while its array waits.
            status = JobStatus(job_id, JobState.CANCELLED)
        else:
            if own is not None and not trouble:
                own.check_readable()
            status, lost = _own_status(job_id, own, trouble, submission, now)
    ended = own.ended if own is not None and status.state.over else None
    exit_code = status.exit_code
    if ended is not None and (not exit_code or status.state is JobState.FAILED):
        exit_code = int(ended["exit_code"])
    reason = _reason(status, own, record)
    over = status.state.over
    if over and status.state is JobState.CANCELLED and status.started is None and own is None:
        exit_code = None
    if over and _may_come_back(str(record["backend"]), status, now):
        over, reason = False, "it may be requeued"
    return State(
        submission,
        run,
        name=str(record["name"]),
        backend=str(record["backend"]),
        job_id=job_id,
        state=status.state.value,
        reason=reason,
        nodes=status.nodes or ("" if own is None or status.state.waiting else own.nodes),
        created=float(record["created"]),
        started=status.started or _started_of(own),
        ended=status.ended or (float(ended["time"]) if ended else None),
        exit_code=exit_code,
        attempts=len(attempts),
        over=over,
        lost=lost,
        raw_state=status.raw_state if over else "",
    )


def _reason(status: JobStatus, own: Attempt | None, record: dict[str, Any]) -> str:
    """Return why a job waits or ended: what hpml knows better before the scheduler's word."""
    if status.reason.startswith("Dependency"):
        runs = ", ".join(f"{one['run']} ({one['end']})" for one in record.get("after", ()))
        if runs and status.state.waiting:
            return f"waits for {runs}"
        if runs and status.state is JobState.CANCELLED:
            return f"did not start: it waited for {runs}, which ended otherwise"
    if status.state is JobState.FAILED and own is not None:
        failed = own.markers("failed")
        if failed:
            return f"{failed[0].get('node')} was not made ready: {failed[0].get('message')}"
        reason = str((own.ended or {}).get("reason", ""))
        if reason == "binding":
            return _misplaced(own)
        if reason not in ("", "failed", "completed"):
            return reason
    if status.state is JobState.CANCELLED and status.started is None and own is None:
        return "cancelled before it started"  # Slurm keeps the reason why it waited
    return "" if status.reason == "None" else status.reason


def _misplaced(attempt: Attempt) -> str:
    """Return the reason of a job that wants its ranks in their places: the first one that is not.

    Missing ranks have no proof: then the job's output has the table.
    """
    wrong = [
        (proof.get("node"), rank)
        for proof in attempt.proofs()
        for rank in proof.get("ranks", ())
        if rank.get("wrong")
    ]
    if not wrong:
        return "ranks did not run where they should: the job's output says which"
    node, rank = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"rank {rank.get('rank')} on {node} {rank['wrong'][0]}{more}"


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
        state = JobState.FAILED if code else JobState.COMPLETED
        own_status = JobStatus(
            job_id,
            parse_state(str(ended.get("state") or state)),
            reason=f"{ended.get('reason', '')} (the job's own record)",
            exit_code=code,
            ended=float(ended["time"]),
        )
        return own_status, not own_status.state.over
    if trouble:
        return JobStatus(job_id, JobState.UNKNOWN, reason=trouble), False
    started = submission.started_at() or now
    if now - started < _FORGOTTEN_SECONDS:
        reason = "the scheduler does not know it (yet)"
        return JobStatus(job_id, JobState.UNKNOWN, reason=reason), False
    reason = "the scheduler has forgotten it, and the job did not write down its end"
    return JobStatus(job_id, JobState.UNKNOWN, reason=reason), True


def _started_of(own: Attempt | None) -> float | None:
    started = own.started if own is not None else None
    return started.time if started is not None else None
