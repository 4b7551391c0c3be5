"""The state of submissions: from their records first, then one batched query per scheduler."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError, SchedulerUnavailable
from hpml_orchestrator.records.files import create_json, read_json
from hpml_orchestrator.records.texts import ENDING_WORDS, memory_fault, signal_name
from hpml_orchestrator.records.units import ALL_MEMORY
from hpml_orchestrator.runs.backend import backends_of, elsewhere
from hpml_orchestrator.runs.state import (
    Cause,
    OwnRecords,
    Settled,
    Silence,
    State,
    array_state,
    read_ended_tasks,
    read_final,
    record_ends,
    run_of,
    settle,
)
from hpml_orchestrator.scheduler.model import BEFORE_REQUEUE, JobState, JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import EndRecord
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.scheduler.slurm.messages import Outcome

# The ends of attempts whose script was killed before it could record them, by what Slurm knows.

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


UNREADABLE = "UNREADABLE"
_FORGOTTEN_SECONDS = 60.0


def states(
    store: Store,
    submissions: Iterable[Submission],
    *,
    backends: Backends | None = None,
    now: Callable[[], float] = time.time,
) -> list[State]:
    """Return the state of each submission or task, in the order given.

    Recorded ends are read first; each scheduler is queried once for all other submissions. The
    state of a submission of another cluster is UNKNOWN: its job id means another job here.
    """
    backends = backends or backends_of(store)
    wanted = list(submissions)

    @cache  # a controller that does not answer costs one timeout, not one per submission
    def query_error_of(scheduler: tuple[str, str]) -> str:
        try:
            backends(*scheduler).cluster()
        except SchedulerUnavailable as error:
            return str(error)
        return ""

    known: dict[str, State] = {}
    unfinished: dict[tuple[str, str], list[_UnfinishedRun]] = {}
    for submission in dict.fromkeys(submission.at(None) for submission in wanted):
        try:
            record = submission.record()
            name = str(record["backend"])
            scheduler = name, str(record["host"]) if name == "local" else ""
            base = State.of(submission, record)
            state = (
                # The cheapest source comes first. The cluster comes before any query about a job
                # id, because the same id is another job elsewhere.
                read_final(base)
                or _elsewhere(base, scheduler, backends, query_error_of)
                or _without_job(store, base, partial(backends, *scheduler), now())
            )
            if state is None:
                _find_next(store, submission, partial(backends, *scheduler), now())
                unfinished.setdefault(scheduler, []).append(_UnfinishedRun.read(base))
            else:
                known[submission.sid] = state
        except (NotFoundError, RecordError) as error:
            known[submission.sid] = _unreadable(submission, error)
    # One query per scheduler, however many submissions there are: a sweep may have thousands.
    for scheduler, group in unfinished.items():
        job_ids = [job_id for pending in group for job_id in pending.job_ids_to_query]
        try:
            answer, query_error = backends(*scheduler).query(job_ids), ""
        except SchedulerUnavailable as error:
            answer, query_error = {}, str(error)
        for pending in group:
            try:
                known[pending.base.submission.sid] = pending.state(
                    answer, query_error, now(), backends(*scheduler).starts
                )
            except RecordError as error:
                known[pending.base.submission.sid] = _unreadable(pending.base.submission, error)
    return [_chosen(known[submission.sid], submission) for submission in wanted]


def state_of(
    store: Store,
    submission: Submission,
    *,
    backends: Backends | None = None,
    now: Callable[[], float] = time.time,
) -> State:
    """Return the state of one submission or task.

    Raises:
        RecordError: its record cannot be read.
    """
    (state,) = states(store, [submission], backends=backends, now=now)
    if state.state == UNREADABLE:
        raise RecordError(state.reason)
    return state


def _chosen(state: State, submission: Submission) -> State:
    whole = replace(state, submission=submission)
    tasks = (task for task in state.tasks if task.submission.index == submission.index)
    return state if submission.index is None else next(tasks, whole)


def _unreadable(submission: Submission, error: Exception) -> State:
    return State(submission, "?", "?", job_id="", state=UNREADABLE, reason=str(error))


def _elsewhere(
    base: State,
    scheduler: tuple[str, str],
    backends: Backends,
    query_error_of: Callable[[tuple[str, str]], str],
) -> State | None:
    if not base.cluster:
        return None
    query_error = query_error_of(scheduler)
    where = query_error or elsewhere(base.cluster, backends(*scheduler))
    if not where:
        return None
    job_id = str((base.submission.job() or {}).get("job_id", ""))
    return replace(base, job_id=job_id, reason=where, elsewhere=not query_error)


def _without_job(
    store: Store, base: State, scheduler: Callable[[], Scheduler], now: float
) -> State | None:
    """Return the state of a submission without a job (yet); None if it has one."""
    submission = base.submission
    if submission.job() is not None:
        return None
    from hpml_orchestrator.runs.submit import (  # noqa: PLC0415 - few runs have no job
        determine_outcome,
        known_absent,
    )
    from hpml_orchestrator.scheduler.slurm.messages import Absent, Found  # noqa: PLC0415 - as above

    refused = submission.refused()
    outcome: Outcome
    if refused is not None:
        outcome = Absent("refused", refused=str(refused["reason"]))
    else:
        outcome = known_absent(store, submission) or determine_outcome(
            store, submission, scheduler(), now=now
        )
    if isinstance(outcome, Found):
        return None
    state, reason, over = "SUBMITTING", outcome.reason, False
    if isinstance(outcome, Absent):
        state, reason, over = "REFUSED", outcome.refused, True
        if not reason:
            state = "NOT SUBMITTED"
            reason = f"hpml was interrupted; `hpml submit --resume {submission.sid}` submits it"
    return replace(base, state=state, reason=reason, over=over)


def _find_next(
    store: Store, submission: Submission, scheduler: Callable[[], Scheduler], now: float
) -> None:
    if submission.is_array():
        return  # `hpml requeue` looks for that of a task
    newest = run_of(submission).newest()
    start = newest.newest_start() if newest is not None else None
    if newest is None or start is None or (newest.next and newest.next["time"] >= start.time):
        return
    from hpml_orchestrator.runs.submit import next_outcome  # noqa: PLC0415 - few runs continue

    with contextlib.suppress(RecordError):  # another user's
        next_outcome(store, submission, newest, scheduler(), known=submission.job_ids(), now=now)


@dataclass(frozen=True)
class _UnfinishedRun:
    """A submission that has a job and is not known to be over."""

    base: State  # with its job
    job_ids: dict[int | None, str]  # by the index of an array's task; of a single job by None
    ends: Mapping[int | None, State]  # of an array's tasks that are known to be over, by index

    @staticmethod
    def read(base: State) -> _UnfinishedRun:
        """Read what its own records say."""
        submission = base.submission
        job_id = str((submission.job() or {})["job_id"])
        base = replace(base, job_id=job_id)
        if not submission.is_array():
            return _UnfinishedRun(base, {None: job_id}, {})
        continued = submission.continued()
        job_ids: dict[int | None, str] = {
            index: continued.get(index, f"{job_id}_{index}") for index, _ in submission.runs()
        }
        return _UnfinishedRun(base, job_ids, read_ended_tasks(base))

    @property
    def job_ids_to_query(self) -> list[str]:
        """The ids to ask the scheduler about."""
        return [job_id for index, job_id in self.job_ids.items() if index not in self.ends]

    def state(
        self,
        answer: Mapping[str, JobStatus],
        query_error: str,
        now: float,
        starts: Callable[[str], list[JobStatus]],
    ) -> State:
        """Combine the scheduler's answer, by job id, with the records, and record ends.

        `starts` asks the scheduler how each start of a job ended.
        """
        # A controller that was set up anew counts its ids from 1 again, so a job of this id may
        # belong to somebody else. The working directory tells.
        others = {
            job_id
            for job_id in self.job_ids.values()
            if job_id in answer
            and PurePath(answer[job_id].directory).name not in ("", self.base.submission.sid)
        }
        answer = {job_id: status for job_id, status in answer.items() if job_id not in others}
        any_known = bool(self.ends) or any(job_id in answer for job_id in self.job_ids.values())
        states = []
        for index, job_id in self.job_ids.items():
            if index in self.ends:
                states.append(self.ends[index])
                continue
            run = self.base.submission.at(index)
            status: JobStatus | Silence | None = answer.get(job_id)
            if query_error:
                status = Silence.NO_ANSWER
            elif status is None and any_known and not run_of(run).attempts():
                # Slurm keeps no record of a task that is cancelled while its array waits. As the
                # other tasks are known, this one has not merely been forgotten with all of them.
                status = JobStatus(job_id, JobState.CANCELLED)
            elif status is None:
                # Right after sbatch the job may not be visible yet, so a young job is not lost. A
                # job with our id in another directory is: the controller has given the id away.
                age = now - (run.started_at() or now)
                is_lost = job_id in others or age >= _FORGOTTEN_SECONDS
                status = Silence.FORGOTTEN if is_lost else Silence.NOT_YET
            base = replace(self.base, submission=run, job_id=job_id)
            state = _state_of_job(base, status, now, starts)
            if query_error:
                state = replace(state, reason=query_error)
            states.append(state)
        state = states[0]
        if None not in self.job_ids:
            state = array_state(self.base, states)
        ended = sum(task.over and not task.interrupted for task in state.tasks)
        if (state.over and not state.interrupted) or ended > len(self.ends):
            record_ends(state)
        return state


def _state_of_job(
    base: State,
    status: JobStatus | Silence,
    now: float,
    starts: Callable[[str], list[JobStatus]],
) -> State:
    """Combine what the scheduler says about one job with the records of its run."""
    submission, job_id, is_slurm = base.submission, base.job_id, base.backend == "slurm"
    known = status if isinstance(status, JobStatus) else None
    is_waiting = known is not None and known.state.waiting
    # A waiting task has no records yet. Looking for them would cost ten thousand directory reads.
    is_unstarted = submission.index is not None and is_waiting and not (known and known.restarts)
    attempts = [] if is_unstarted else run_of(submission).attempts()
    newest = attempts[-1] if attempts else None
    by_script = newest.ended if newest is not None else None
    record_lost_ends(attempts if is_waiting else attempts[:-1], starts)
    end = by_script
    is_silent = known is None or (known.state is JobState.UNKNOWN and end is not None)
    if newest is not None and is_silent and status is not Silence.NO_ANSWER:
        newest.check_readable()
    elif newest is not None and known is not None and end is None and is_slurm:
        end = lost_end(newest, known)
    may_be_over = known is None or known.state.over or end is not None
    own = OwnRecords(end, _unanswered_call(newest) if may_be_over else None)
    settled = settle(status, own, job_id=job_id, requeues=is_slurm, now=now)
    job = settled.job or JobStatus(job_id, JobState.UNKNOWN)
    if not job.state.over:
        end = by_script = None
    if newest is not None and settled.job_over and by_script is None:
        record_end(newest, end)
    # A job that waits again has left its nodes, and the start of its last attempt.
    begun = newest.started if newest is not None and not job.state.waiting else None
    ended = job.ended or (float(end["time"]) if end else None)
    return replace(
        base,
        job_id="" if settled.cause is Cause.CONTINUES else job_id,
        state=settled.state,
        over=settled.over,
        lost=settled.lost,
        interrupted=settled.interrupted,
        reason=_words(base, settled, status, newest, end),
        nodes=job.nodes or (str(begun.data.get("nodes", "")) if begun is not None else ""),
        started=job.started or (begun.time if begun is not None else None),
        ended=newest.last_written if settled.lost and newest is not None else ended,
        limit_at=job.limit_at,
        expected_start=job.expected_start,
        exit_code=_exit_code(job, by_script, newest),
        attempts=len(attempts),
        raw_state=job.raw_state if settled.over else "",
    )


def _unanswered_call(newest: Attempt | None) -> float | None:
    call = newest.newest_start() if newest is not None else None
    return call.time if call is not None and newest is not None and newest.next is None else None


def _exit_code(job: JobStatus, by_script: EndRecord | None, newest: Attempt | None) -> int | None:
    code = exit_status(job)
    if job.state is JobState.CANCELLED and job.started is None and newest is None:
        return None
    # Slurm's exit code may be missing, and is 0 after a signal (`0:15`). The one that the script
    # recorded counts then.
    if by_script is not None and (not code or job.state is JobState.FAILED):
        return int(by_script["exit_code"])
    return code


def _words(
    base: State,
    settled: Settled,
    status: JobStatus | Silence,
    newest: Attempt | None,
    end: EndRecord | None,
) -> str:
    """Return why a run is in its state, in a few words; may be empty."""
    match settled:
        case Settled(cause=Cause.INTERRUPTED):
            rid = base.submission.label
            return f"{settled.cause.value}: `hpml requeue {rid}`"
        case Settled(cause=Cause.CONTINUES | Cause.MAY_REQUEUE):
            return settled.cause.value
        case Settled(job=JobStatus() as job):
            by_record = settled.cause is Cause.RECORD
            if by_record:
                job = replace(job, reason=f"{job.reason} ({settled.cause.value})")
            return (
                _exceeded(base.submission, job, end, by_record=by_record)
                or _unseen(base, job, newest)
                or _reason(base.submission, job, newest, end, by_record=by_record)
            )
        case _:
            return status.value if isinstance(status, Silence) else ""


def _reason(
    submission: Submission,
    status: JobStatus,
    own: Attempt | None,
    end: EndRecord | None,
    *,
    by_record: bool,
) -> str:
    """Return why a job waits or ended; hpml's own records take precedence over the scheduler's."""
    if status.has_dependency:
        after = submission.record().get("after", ())
        runs = ", ".join(f"{one['run']} ({one['end']})" for one in after)
        if runs and status.state.waiting:
            return f"waits for {runs}"
        if runs and status.state is JobState.CANCELLED:
            return f"did not start: it waited for {runs}, which ended otherwise"
    if status.state is JobState.FAILED and own is not None and (why := _failure(own, end)):
        return why
    if end and status.state in BEFORE_REQUEUE and not by_record:
        return str(end["reason"])
    if status.state is JobState.CANCELLED and status.started is None and own is None:
        return "cancelled before it started"  # Slurm still prints why it waited
    if status.reason == "NonZeroExitCode" and status.exit_code is not None:
        return f"exit code {status.exit_code}"
    reason = "" if status.reason == "None" else status.reason
    if not status.state.waiting:
        return reason
    from hpml_orchestrator.scheduler.slurm.messages import explain  # noqa: PLC0415 - few wait

    return explain(reason, status.job_id)


def _unseen(base: State, status: JobStatus, own: Attempt | None) -> str:
    """Return why a job failed that recorded neither its start nor output; else an empty text."""
    failed = base.backend == "slurm" and status.state is JobState.FAILED
    if not failed or own is not None or run_of(base.submission).has_output():
        return ""
    said = f" ({status.reason})" if status.reason not in {"", "None"} else ""
    return (
        f"nothing of this job reached its record{said}: do the nodes see "
        f"{base.submission.directory.parents[1]}? Set HPML_HOME to a directory that they see"
    )


def _failure(own: Attempt, end: EndRecord | None) -> str:
    """Return why a job failed, by its records; empty if they do not say."""
    if failed := own.markers("failed"):
        message = str(failed[0].get("message")).partition("\n")[0]  # the output has all lines
        return f"{failed[0].get('node')} did not become ready: {message}"
    reason = str((end or {}).get("reason", ""))
    if reason == "binding":
        return _binding_error(own)
    return "" if reason in ("failed", "completed") else reason


def _exceeded(
    submission: Submission, status: JobStatus, end: EndRecord | None, *, by_record: bool
) -> str:
    """Return which limit ended a job, the request and how to raise it; empty if none did."""
    end = end or {}
    known = str(end.get("state") or "")
    state = known if status.state is JobState.FAILED else status.state.value
    if state not in ("TIMEOUT", "OUT_OF_MEMORY"):
        return ""
    words = str(end["reason"]) if known == state else ENDING_WORDS[state]
    if by_record:
        words = status.reason
    if end.get("stays"):  # more time would not help
        return words
    asked, label = submission.requested_job().resources, submission.label
    if state == "TIMEOUT":
        limit = asked.written("time")
        return f"{words}: {limit} requested; raise it with --set resources.time=…"
    requested, raised = "the job requested no amount", "memory"
    if asked.memory == ALL_MEMORY:
        return f"{words}: it had all memory of its nodes; take more nodes, or larger ones"
    if asked.memory_per_cpu:
        requested = f"{asked.written('memory_per_cpu')} per CPU requested"
        raised = "memory_per_cpu"
    elif asked.memory:
        requested = f"{asked.written('memory')} per node requested"
    return f"{words}: {requested}; raise it with `hpml resubmit {label} --set resources.{raised}=…`"


def _binding_error(attempt: Attempt) -> str:
    wrong = [
        f"rank {rank.get('rank')} on {proof.get('node')} {rank['wrong'][0]}"
        for proof in attempt.proofs()
        for rank in proof.get("ranks", ())
        if rank.get("wrong")
    ]
    if not wrong:
        return "ranks are not bound as planned: the job's output names them"
    return wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
