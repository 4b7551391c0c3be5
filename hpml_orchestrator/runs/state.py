"""The state of a submission, of an array and of its tasks, and its record once it is over.

`final.json` has the last state of a submission that is over, for an array with all of its tasks.
While tasks of an array are unfinished, `ends.json` has those that have ended, because a scheduler
forgets them long before the last one ends.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError, counted
from hpml_orchestrator.records import targets
from hpml_orchestrator.records.damage import RUN_FIELDS, find_damage, record_damage
from hpml_orchestrator.records.feed import is_number
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.run import Run
from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.scheduler.model import BEFORE_REQUEUE, JobState, JobStatus, parse_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpml_orchestrator.records.damage import Damage
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import EndRecord, SubmitRecord
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.site.model import Site

_End: TypeAlias = dict[str, Any]  # fields of a state that the scheduler has reported
_FINAL, _ENDS = "final.json", "ends.json"
_RECORDED_TEXTS = ("job_id", "state", "raw_state", "reason", "nodes")
_RECORDED_NUMBERS = ("started", "ended", "exit_code", "attempts")
_SHOWN = "job_id state reason nodes started ended exit_code attempts over".split()
# An array that has ended has the state of its worst task, errors of the program first.
_WORST_FIRST = (
    "FAILED OUT_OF_MEMORY TIMEOUT DEADLINE NODE_FAIL BOOT_FAIL PREEMPTED CANCELLED COMPLETED"
).split()
_COUNTED_AS = {
    **dict.fromkeys(("RUNNING", "COMPLETING"), "running"),
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED"), "waiting"),
    "COMPLETED": "done",
    "TIMEOUT": "over their time limit",
    "OUT_OF_MEMORY": "out of memory",
}
_REQUEUE_SECONDS = 180.0
_NEXT_JOB_SECONDS = 120.0
_COUNT_ORDER = ("running", "waiting", "unknown", "failed")


@dataclass(frozen=True)
class State:
    """One submission and its job, or one task of an array.

    Times are seconds since the epoch.
    """

    submission: Submission  # with the index of the task, for a task of an array
    name: str
    backend: str
    job_id: str  # the scheduler's; empty while it is not known
    state: str  # a scheduler's, or `NOT SUBMITTED`, `REFUSED`, `SUBMITTING`, `UNREADABLE`
    cluster: str = ""  # it was submitted to this one; empty for this machine, or if unknown
    reason: str = ""  # why, in a few words; for an array, the number of tasks in each state
    nodes: str = ""  # node list
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    limit_at: float | None = None  # when the scheduler ends it; None if unknown
    expected_start: float | None = None  # of a waiting job, if the scheduler has planned it
    exit_code: int | None = None  # of the script; for an array, of its worst task
    attempts: int = 0  # number of starts
    over: bool = False  # whether nothing more will happen by itself
    # Whether the scheduler answers but no longer knows the job, and the job did not record its end:
    # it is not running, and how it ended will not be known.
    lost: bool = False
    # Whether it belongs to another cluster than the one that this process reaches: `reason` names
    # both, and the state is UNKNOWN because only that cluster knows it.
    elsewhere: bool = False
    # Whether its continuation failed: it is over until a user requeues it.
    interrupted: bool = False
    raw_state: str = ""  # the scheduler's own name of the state, once it is over
    tasks: tuple[State, ...] = ()  # of an array: one state per task, by index

    @staticmethod
    def of(submission: Submission, record: SubmitRecord) -> State:
        """Return the state of a submission by its record alone: UNKNOWN, without a job."""
        return State(
            submission,
            name=record["name"],
            backend=record["backend"],
            job_id="",
            state="UNKNOWN",
            cluster=record.get("cluster", ""),
            created=record["created"],
        )

    @property
    def run(self) -> Run:
        """Its run; for a whole array, a directory that does not exist."""
        return run_of(self.submission)

    @property
    def unfinished(self) -> bool:
        """Whether its job may still run."""
        return not (self.over or self.lost)

    @property
    def text(self) -> str:
        """Its state, and why in parentheses."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def why(self) -> str:
        """Its reason, and when the scheduler expects it to start."""
        if self.expected_start is None or self.expected_start < time.time():
            return self.reason
        return f"{self.reason}; expected start {clock_text(self.expected_start)}".lstrip("; ")

    @property
    def waits(self) -> bool:
        """Whether its job has not begun to run."""
        return parse_state(self.state).waiting

    def to_json(self) -> dict[str, object]:
        """Return the state for programs; `tasks` is empty unless it is an array."""
        return {
            "id": self.submission.label,
            "name": self.name,
            "backend": self.backend,
            "cluster": self.cluster,
            **{name: getattr(self, name) for name in _SHOWN},
            "created": self.created,
            "directory": None if self.tasks else str(self.run.directory),
            "submission": str(self.submission.directory),
            "output": None if self.tasks else str(self.run.output),
            "tasks": self.tasks_to_json(),
        }

    def tasks_to_json(self) -> list[dict[str, object]]:
        """Return the states of an array's tasks for programs."""
        return [
            {
                "index": task.submission.index,
                "run": task.run.rid,
                **{name: getattr(task, name) for name in _SHOWN},
                "directory": str(task.run.directory),
                "output": str(task.run.output),
            }
            for task in self.tasks
        ]


def run_of(submission: Submission) -> Run:
    """Return the run of a submission or of one task; its directory need not exist."""
    return Run(submission.directory.parents[1] / "runs" / submission.label)


def record_ends(state: State) -> None:
    """Record the end of a submission, or of those tasks of an array that have ended."""
    directory = state.submission.directory
    # An interrupted task ends only until somebody requeues it. Recording that as its end would hide
    # the continuation.
    ended = [task for task in state.tasks if task.over and not task.interrupted]
    tasks = {"tasks": {str(task.submission.index): _end_of(task) for task in ended}}
    tasks = tasks if ended else {}
    # Another user's records, or a full disk: the scheduler is queried again next time.
    with contextlib.suppress(RecordError, OSError):
        if not state.over or len(ended) < len(state.tasks):
            write_json(directory / _ENDS, tasks)
            return
        # First the new file, then the removal: a crash in between leaves both, and `final.json`
        # wins.
        write_json(directory / _FINAL, {**_end_of(state), **tasks})
        (directory / _ENDS).unlink(missing_ok=True)
    # Prometheus targets, which the agents could not withdraw if they were killed
    with contextlib.suppress(HpmlError):
        monitor = state.submission.requested_job().monitor
        if monitor.enabled:
            default = targets.default_directory(directory.parents[1])
            targets.withdraw_run(Path(monitor.targets or default), state.submission.label)


def reopen(submission: Submission, *, undo: bool = False) -> None:
    """Withdraw the recorded end, because a run continues; or restore it."""
    # One rename in either direction, so that no reader finds neither file: the ended tasks of an
    # array stay known while one of them continues.
    final, ends = submission.directory / _FINAL, submission.directory / _ENDS
    with contextlib.suppress(FileNotFoundError):
        os.replace(*((ends, final) if undo else (final, ends)))


def read_final(base: State) -> State | None:
    """Return the recorded last state of a submission; None if it is not known to be over.

    Args:
        base: the submission, without a job.
    """
    submission = base.submission
    final, ends = _read_ends(submission.directory / _FINAL)
    if not final:
        return None
    tasks = tuple(_ended_tasks(base, ends, final["job_id"]).values())
    # An end belongs to a job, not to a run. A continuation has another job id, which makes the
    # recorded end stale even if `reopen` did not run.
    newest = (submission.job() or {}).get("job_id", final["job_id"])
    if str(newest) != final["job_id"] or len(tasks) < len(ends):
        return None  # it continues: that was the end of an earlier job
    return replace(base, over=True, tasks=tasks, **final)


def read_ended_tasks(base: State) -> dict[int | None, State]:
    """Return the tasks of an unfinished array that are recorded as ended, by index.

    Args:
        base: the array, with its job.
    """
    for name in (_ENDS, _FINAL):
        _, ends = _read_ends(base.submission.directory / name)
        if ends:
            return _ended_tasks(base, ends, base.job_id)
    return {}


def _end_of(state: State) -> _End:
    return {name: getattr(state, name) for name in (*_RECORDED_TEXTS, *_RECORDED_NUMBERS)}


def _read_ends(path: Path) -> tuple[_End, dict[int, _End]]:
    """Return the recorded end of a submission, and those of its tasks; empty if damaged."""
    try:
        record = read_json(path)
        tasks = {int(index): _checked_end(end) for index, end in record.get("tasks", {}).items()}
        return _checked_end(record) if path.name == _FINAL else {}, tasks
    except (NotFoundError, RecordError, AttributeError, KeyError, TypeError, ValueError):
        return {}, {}


def _checked_end(record: Mapping[str, Any]) -> _End:
    end: _End = {"job_id": record["job_id"], "state": record["state"]}
    end |= {name: record.get(name, "") for name in _RECORDED_TEXTS if name not in end}
    end |= {name: record.get(name) for name in _RECORDED_NUMBERS}
    end["attempts"] = record.get("attempts", 0)
    for name, value in end.items():
        right = (
            isinstance(value, str) if name in _RECORDED_TEXTS else value is None or is_number(value)
        )
        if not right:
            raise ValueError(f"{name} is {value!r}")
    return end


def _ended_tasks(base: State, ends: Mapping[int, _End], job_id: str) -> dict[int | None, State]:
    submission = base.submission
    continued = submission.continued() if ends else {}
    return {
        index: replace(base, submission=submission.at(index), over=True, **end)
        for index, end in sorted(ends.items())
        if end["job_id"] == continued.get(index, f"{job_id}_{index}")
    }


def array_state(whole: State, tasks: Sequence[State]) -> State:
    """Return the state of an array.

    It is over when every task is, and then has the state of its worst task. Before that it is
    RUNNING as soon as one task has run, else PENDING, or UNKNOWN if no task's state is known.

    Args:
        whole: what is known of the submission.
        tasks: one state per task, by index; at least one.
    """
    over = all(task.over for task in tasks)
    worst = min(tasks, key=_badness)
    state = worst.state if over else _unfinished(tasks)
    ends = [task.ended for task in tasks if task.ended is not None]
    return replace(
        whole,
        state=state,
        reason=_counts(tasks, state),
        started=min((task.started for task in tasks if task.started is not None), default=None),
        ended=max(ends, default=None) if over else None,
        exit_code=worst.exit_code if over else None,
        attempts=sum(task.attempts for task in tasks),
        over=over,
        lost=not over and not any(task.unfinished for task in tasks),
        raw_state=worst.raw_state if over else "",
        tasks=tuple(tasks),
    )


def _badness(task: State) -> int:
    return _WORST_FIRST.index(task.state) if task.state in _WORST_FIRST else len(_WORST_FIRST)


def _unfinished(tasks: Sequence[State]) -> str:
    kinds = {_counted_as(task) for task in tasks if not task.over}
    # Between two waves of a throttled array no task runs for a moment. It has begun all the same,
    # and must not fall back to PENDING.
    begun = any(task.over and task.started is not None for task in tasks)
    if kinds == {"unknown"}:
        return JobState.UNKNOWN.value
    if kinds <= {"waiting", "unknown"} and not begun:
        return JobState.PENDING.value
    return JobState.RUNNING.value


def _counted_as(task: State) -> str:
    # A task that may be requeued waits, although it shows the state that it passes through, such as
    # PREEMPTED.
    if not task.over and task.state in _WORST_FIRST:
        return "waiting"
    return _COUNTED_AS.get(task.state, task.state.lower().replace("_", " "))


def _counts(tasks: Sequence[State], state: str) -> str:
    """Return `3 of 10 done, 2 running, 1 failed`, and why tasks wait if none runs."""
    counts = Counter(_counted_as(task) for task in tasks)
    kinds = [*_COUNT_ORDER, *(kind for kind in counts if kind not in (*_COUNT_ORDER, "done"))]
    parts = [f"{counts['done']} of {len(tasks)} done"]
    text = ", ".join([*parts, *(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])])
    if state in ("PENDING", "UNKNOWN"):
        why = next((task.reason for task in tasks if not task.over and task.reason), "")
        return f"{text}: {why}" if why else text
    return text


# The state of a run: what its scheduler says about its job, and what its own records say.


class Silence(enum.Enum):
    """Why a scheduler has no status for a job."""

    NO_ANSWER = "it does not answer"
    NOT_YET = "the scheduler does not know it (yet)"
    FORGOTTEN = "the scheduler has forgotten it, and the job did not record its end"


class Cause(enum.Enum):
    """What decided about the state of a run."""

    SCHEDULER = "the scheduler's status"
    RECORD = "the job's own record"
    SILENCE = "the scheduler has no status"
    MAY_REQUEUE = "it may be requeued"
    CONTINUES = "it continues in another job"
    INTERRUPTED = "interrupted before it could continue"


@dataclass(frozen=True)
class OwnRecords:
    """What is recorded about the newest attempt of a run."""

    end: EndRecord | None = None  # by its script, else by hpml for a script that was killed
    next_call: float | None = None  # of sbatch for the next job, if that job is not on record

    @property
    def is_followed(self) -> bool:
        """Whether another job was announced, or sbatch called for one that is not on record."""
        return self.next_call is not None or bool(self.end and self.end.get("goes_on"))

    @property
    def followed_since(self) -> float:
        """When the next job was announced or asked for, seconds since the epoch."""
        return max(float(self.end["time"]) if self.end else 0.0, self.next_call or 0.0)


@dataclass(frozen=True)
class Settled:
    """The state of a run, and of the newest job that it has."""

    state: str
    cause: Cause
    job: JobStatus | None = None  # its status, by the scheduler or else by its own record
    over: bool = False
    lost: bool = False
    interrupted: bool = False
    job_over: bool = False  # whether the job itself has ended, and will not be requeued


def settle(
    status: JobStatus | Silence, own: OwnRecords, *, job_id: str, requeues: bool, now: float
) -> Settled:
    """Return the state of a run.

    The scheduler decides whether a job has ended: it kills jobs before they can record anything,
    and a script that has recorded its end may still hold its nodes. The job's own record decides
    only if the scheduler has forgotten the job, as Slurm does after MinJobAge without accounting.

    Args:
        status: what the scheduler says about the newest job.
        own: what the newest attempt recorded.
        job_id: of the newest job.
        requeues: whether the scheduler requeues jobs by itself.
        now: seconds since the epoch.
    """
    cause = Cause.SCHEDULER
    match status, own.end:
        case Silence.NO_ANSWER, _:
            return Settled(JobState.UNKNOWN.value, Cause.SILENCE)
        case ((Silence() | JobStatus(state=JobState.UNKNOWN)), end) if end is not None:
            job, cause = _recorded_status(job_id, end), Cause.RECORD
        case Silence(), _:
            lost = status is Silence.FORGOTTEN
            return Settled(JobState.UNKNOWN.value, Cause.SILENCE, lost=lost)
        case JobStatus() as job, _:
            pass
    state = job.state
    # A preempted job, and one whose node failed, passes through that state on its way back into
    # Slurm's queue. If it is not back after a while, longer than the 121 s that a requeued job
    # waits with Slurm's default credentials, that was its end.
    recent = job.ended is None or now - job.ended < _REQUEUE_SECONDS
    may_requeue = requeues and state in BEFORE_REQUEUE and recent and job.may_requeue
    ended = partial(Settled, job=job, job_over=not may_requeue)
    # The script that announced a continuation may have been killed before it could call sbatch. Two
    # minutes are the grace period in which a job may still appear.
    may_follow = now - own.followed_since < _NEXT_JOB_SECONDS
    match state:
        case _ if not state.over:
            return Settled(state.value, cause, job, lost=cause is Cause.RECORD)
        case JobState.CANCELLED:
            return ended(state.value, cause, over=True)
        case _ if own.is_followed and may_follow:
            return ended("SUBMITTING", Cause.CONTINUES)
        case _ if own.is_followed:
            shown = "FAILED" if state is JobState.COMPLETED else state.value
            return ended(shown, Cause.INTERRUPTED, over=True, interrupted=True)
        case _ if may_requeue:
            return ended(state.value, Cause.MAY_REQUEUE)
        case _:
            return ended(state.value, cause, over=True)


def _recorded_status(job_id: str, end: EndRecord) -> JobStatus:
    """Return the status that a job's own record of its end stands for."""
    code, goes_on = int(end["exit_code"]), end.get("goes_on")
    state = parse_state(str(end.get("state") or ""))
    if not end.get("state") or (goes_on and not state.over):
        state = JobState.FAILED if code or goes_on else JobState.COMPLETED
    reason, ended = str(end.get("reason", "")), float(end["time"])
    return JobStatus(job_id, state, reason=reason, exit_code=code, ended=ended)


# The address of a run's Job dashboard, in the Grafana or viewer that the site profile names.


def cluster_job(attempt: Attempt) -> tuple[str, str]:
    """Return cluster and job id of an attempt, as metrics have them in their labels.

    For a task of an array it is the task's own job id. Unknown values are empty: a run of the local
    backend, such as local-3fa9c1-7, belongs to the cluster of its node, which is not known here.
    """
    try:
        cluster = str(read_json(attempt.directory / "head.json").get("cluster", ""))
    except HpmlError:
        cluster = ""
    if cluster.startswith("local-"):
        return "", f"{cluster}-{attempt.job_id}"
    return cluster, attempt.job_id


def job_dashboard(state: State, *, chosen: str = "") -> str | None:
    """Return the address of a run's Job dashboard, over the time that its last attempt ran.

    None before the run has started, for an array as a whole, and without an address in the site
    profile. The profile is the chosen one, else those of the run's submission.

    Args:
        state: of the run.
        chosen: the value of `--site` or `HPML_SITE`.
    """
    return _address(state, _site_of(state, chosen)) if state.started else None


def state_json(state: State, *, chosen: str = "") -> dict[str, object]:
    """Return a state for programs, with the address of its dashboard and of each task's."""
    site = _site_of(state, chosen) if state.started else None
    tasks = [
        {**row, "dashboard": _address(task, site)}
        for row, task in zip(state.tasks_to_json(), state.tasks, strict=True)
    ]
    return {**state.to_json(), "tasks": tasks, "dashboard": _address(state, site)}


def _site_of(state: State, chosen: str) -> Site | None:
    try:
        if chosen:
            from hpml_orchestrator.site.profile import find_profiles  # noqa: PLC0415 - few have one

            return _site(tuple(map(str, find_profiles(None, {}, chosen=chosen))))
        return _site(tuple(state.submission.record().get("site", ())))
    except HpmlError:  # `hpml check` reports what is wrong with a profile
        return None


@cache
def _site(paths: tuple[str, ...]) -> Site | None:
    if not paths:
        return None
    from hpml_orchestrator.site.model import load_site  # noqa: PLC0415 - few have one

    return load_site([*map(Path, paths)]).site


def _address(state: State, site: Site | None) -> str | None:
    if site is None or site.monitoring.dashboards is None:
        return None
    if not state.started or state.tasks or state.waits:
        return None
    try:
        attempt = state.run.newest()
    except HpmlError:  # another user's
        return None
    if attempt is None or not attempt.job_id:
        return None
    cluster, job_id = cluster_job(attempt)
    parameters = {
        "var-cluster": cluster or site.cluster or "",
        "var-jobid": job_id,
        "from": math.floor(state.started * 1000),
        "to": math.ceil(state.ended * 1000) if state.ended else "now",
    }
    query = urlencode({name: value for name, value in parameters.items() if value != ""})
    return f"{site.monitoring.dashboards.rstrip('/')}/d/hpml-job?{query}"


# Find damaged records of a run before figures are computed from them.


def damage_of(state: State, attempts: Sequence[Attempt]) -> list[Damage]:
    """Return the damaged files of a run: its plan, and those of some attempts.

    Args:
        state: of the run.
        attempts: in order, up to the last one. Only that may still be written.
    """
    found = [*record_damage(state.run.directory / "run.json", RUN_FIELDS)]
    return found + [
        damage
        for attempt in attempts
        for damage in find_damage(
            attempt.directory,
            # The last line of a file that is still written may be incomplete; that is no damage.
            is_growing=attempt is attempts[-1] and state.unfinished and attempt.ended is None,
        )
    ]


def damage_error(state: State, found: Sequence[Damage]) -> RecordError:
    """Return the error that names damaged files."""
    more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    hint = f"`hpml show {state.submission.label}` prints what can be read; figures are incomplete"
    return RecordError(f"{found[0]}{more}", hint=hint)


@contextlib.contextmanager
def naming_damage(state: State) -> Iterator[None]:
    """Turn errors about a record's form into one that names the damaged file.

    Raises:
        RecordError: names the file if it can be found.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        attempts = state.run.attempts()
        if found := damage_of(state, attempts):
            raise damage_error(state, found) from error
        places = [str(state.submission.directory), *(str(one.directory) for one in attempts[-1:])]
        raise RecordError(
            f"a record in {' or '.join(places)} is damaged: it does not have the form that this "
            "hpml writes"
        ) from error
