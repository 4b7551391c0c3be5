"""What all schedulers share: requests, states, statuses, the Protocol, and node lists."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Protocol

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.run import task_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ClusterShell.NodeSet import NodeSet


class JobState(enum.StrEnum):
    """State of a job, by Slurm's names; an unfamiliar state is UNKNOWN, never an error."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"

    @property
    def over(self) -> bool:
        """Whether this state is final."""
        return self not in _UNFINISHED

    @property
    def waiting(self) -> bool:
        """Whether the job has not begun to run."""
        return self in (JobState.PENDING, JobState.CONFIGURING, JobState.REQUEUED)


_UNFINISHED = frozenset(
    "PENDING CONFIGURING RUNNING SUSPENDED STOPPED COMPLETING REQUEUED UNKNOWN".split()
)


STATE_FLAGS = {
    # squeue may print a flag in place of the base state: for example, a job whose ranks are in
    # their grace time is SIGNALING, and still runs.
    "EXPEDITING": JobState.PENDING,  # 25.11: requeued with the highest priority
    "LAUNCH_FAILED": JobState.FAILED,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "RECONFIG_FAIL": JobState.FAILED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,  # another cluster of the federation runs it
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED,  # requeued and held
    "STAGE_OUT": JobState.COMPLETING,
    "UPDATE_DB": JobState.UNKNOWN,  # not about the job
}
"""Flags that squeue shows in place of a base state, and the state that each maps to."""


def parse_state(text: str) -> JobState:
    """Return the state for one of Slurm's names; UNKNOWN for any other name.

    >>> [parse_state(text).value for text in ("CANCELLED by 1000", "COMPLETED+", "BRAND_NEW")]
    ['CANCELLED', 'COMPLETED', 'UNKNOWN']
    """
    name = (text.upper().split() or [""])[0].rstrip("+*")
    try:
        return STATE_FLAGS.get(name) or JobState(name)
    except ValueError:
        return JobState.UNKNOWN


@dataclass(frozen=True)
class JobStatus:
    """The status of one job at one moment, from a scheduler.

    Attributes:
        job_id: the scheduler's id, as text.
        state: the state; `raw_state` is the scheduler's own name for it.
        reason: why it waits or why it ended, in the scheduler's words; may be empty.
        exit_code: exit status of the script, None while unfinished or unknown.
        signal: number of the signal that ended it, 0 for none.
        nodes: node list in Slurm's compact form; may be empty.
        submitted, started, ended: seconds since the epoch, None if unknown.
        limit_at: when its time limit ends it, seconds since the epoch; None if unknown.
        expected_start: planned start of a pending job, if the scheduler has planned it.
        restarts: number of requeues.
        name: the job's name.
        directory: its working directory, which is the submission's directory.
        may_requeue: whether it may restart by itself after a state of `BEFORE_REQUEUE`.
    """

    job_id: str
    state: JobState
    raw_state: str = ""
    reason: str = ""
    exit_code: int | None = None
    signal: int = 0
    nodes: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    limit_at: float | None = None
    expected_start: float | None = None
    restarts: int = 0
    name: str = ""
    directory: str = ""
    may_requeue: bool = True

    @property
    def has_dependency(self) -> bool:
        """Whether it waits, or waited, for other jobs."""
        return self.reason.startswith("Dependency")


BEFORE_REQUEUE = (JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL)
"""States that a job may pass through on its way back into the queue."""


def representative(job_id: str, statuses: Sequence[JobStatus]) -> JobStatus:
    """Return the status of an array as a whole, under the requested id.

    A running task takes precedence, then a pending one, then one that did not complete.
    """

    # An array with a running task is running, however many have failed: users wait for all of it.
    # Once all tasks are over, successes must not hide a failure.
    def rank(status: JobStatus) -> int:
        if status.state.over:
            return 3 if status.state is JobState.COMPLETED else 2
        return 1 if status.state.waiting else 0

    return replace(min(statuses, key=rank), job_id=job_id)


@dataclass(frozen=True)
class Dependency:
    """A job whose end another job waits for.

    Attributes:
        job_id: its id; `<array's id>_<index>` for a task of an array.
        end: `ok` if it must complete, `notok` if it must end otherwise, or `any`.
    """

    job_id: str
    end: str


@dataclass(frozen=True)
class SubmitRequest:
    """One call of sbatch.

    Attributes:
        directory: the submission's directory (absolute), which holds `job.sh`. It becomes the job's
            working directory, by which our own job is found again after a crash.
        output: absolute path of the file for the script's standard output and error; the tasks of
            an array have their own, see `task_output`.
        name: the job's name, for looking it up.
        comment: short text stored with the job; may be empty.
        environment: the complete environment of the sbatch process; all of it reaches the job.
        array: whether the script requests a job array.
        after: jobs to wait for; all of them.
        job_name: name for the scheduler to show, if it differs from the script's; any text.
        only: index of the only task of the array to run; None for all of them.
        exclude: nodes to avoid.
        answers: directory for `sbatch.out` and `sbatch.err`; by default the submission's.
    """

    directory: Path
    output: Path
    name: str
    comment: str
    environment: Mapping[str, str] = field(repr=False)
    array: bool = False
    after: tuple[Dependency, ...] = ()
    job_name: str = ""
    only: int | None = None
    exclude: tuple[str, ...] = ()
    answers: Path | None = None

    def answer(self, name: str) -> Path:
        """Return the file for sbatch's output, `sbatch.out` or `sbatch.err`."""
        return (self.answers or self.directory) / name

    def task_output(self, index: int | str) -> Path:
        """Return the output file of an array's task, by its index or Slurm's placeholder."""
        return task_output(self.directory, index)


class Scheduler(Protocol):
    """What hpml needs from a scheduler; calls take many jobs at once where that is useful."""

    name: str

    def cluster(self) -> str:
        """Return the name of the cluster that this process reaches; empty for this machine alone.

        A job id is only meaningful on the cluster that issued it.

        Raises:
            SchedulerUnavailable: no usable answer.
        """
        ...

    def arguments(self, request: SubmitRequest) -> list[str]:
        """Return the submission as an argument list, for the record."""
        ...

    def submit(self, request: SubmitRequest, arguments: Sequence[str] = ()) -> str:
        """Submit `job.sh` of the request's directory and return the job's id.

        The scheduler's own client process writes its output to `sbatch.out` and `sbatch.err` (see
        `SubmitRequest.answer`), so that the answer survives if hpml is killed.

        Args:
            request: what to submit.
            arguments: result of `arguments` for the request; computed by default.

        Raises:
            SchedulerError: the scheduler refused; no job exists.
            SchedulerUnavailable: no usable answer; a job may exist.
        """
        ...

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each known job in one batched call; unknown ids are left out.

        Tasks of an array are requested as `<array's id>_<index>`.

        Raises:
            SchedulerUnavailable: no usable answer.
        """
        ...

    def starts(self, job_id: str) -> list[JobStatus]:
        """Return how each start of a job ended, including requeued ones; empty if unknown."""
        ...

    def find(self, directory: Path, *, name: str, since: float) -> list[str]:
        """Return the ids of jobs whose working directory is `directory`, oldest first.

        Args:
            directory: a submission's directory.
            name: the job's name, to narrow the search.
            since: seconds since the epoch; jobs before it are ignored.
        """
        ...

    def submitting(self, directory: Path) -> bool:
        """Return whether a client process on this machine is still submitting that directory."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; those already over are ignored."""
        ...


# Lists of nodes in Slurm's compact form, `gpu[01-16]-ib[0-1],login1`, by ClusterShell.

MAX_NODES = 65_536  # Slurm's own limit for one list
_HINT = "a list of nodes looks like node[1-3,7],login1"
_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_ENTRY = rf"(?:[A-Za-z0-9_.\-]|{_RANGES})+"
_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Return the names in a node list, each once, in numerical order, with leading zeros.

    Raises:
        InputError: it is not a node list, or names more than 65,536 nodes.
    >>> expand("node[1-3,7]")
    ('node1', 'node2', 'node3', 'node7')
    >>> expand("gpu[01-02]-ib[0-1]")
    ('gpu01-ib0', 'gpu01-ib1', 'gpu02-ib0', 'gpu02-ib1')
    """
    text = text.strip()
    if not text:
        return ()
    # ClusterShell's grammar is wider than Slurm's: `@name` is a group there, and `!` and `&`
    # are set operations. Let only plain lists through.
    if not _LIST.fullmatch(text):
        raise InputError("is not a list of nodes", field="nodes", value=text, hint=_HINT)
    if "[" not in text:
        return tuple(dict.fromkeys(text.split(",")))
    entries = re.findall(_ENTRY, text)
    # Count before expanding: `n[1-999999999]` would exhaust the memory.
    if sum(prod(map(_size, re.findall(_RANGES, entry))) for entry in entries) > MAX_NODES:
        message = f"names more than {MAX_NODES:,} nodes"
        raise InputError(message, field="nodes", value=text, hint=_HINT)
    return tuple(_node_set(text))


def fold(nodes: Iterable[str]) -> str:
    """Return node names as a list in compact form.

    Raises:
        InputError: one of them is not a node name.
    >>> fold(["node3", "node1", "node2", "login"])
    'login,node[1-3]'
    """
    names = list(dict.fromkeys(nodes))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name, re.ASCII):
            raise InputError("is not the name of a node", field="nodes", value=name, hint=_HINT)
    return str(_node_set(",".join(names))) if len(names) > 1 else "".join(names)


def _node_set(text: str) -> NodeSet:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - slow

    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except (NodeSetException, ValueError) as error:
        raise InputError("is not a list of nodes", field="nodes", value=text, hint=_HINT) from error


def _size(ranges: str) -> int:
    """Return how many numbers `[1-3,7]` stands for, without expanding it."""
    spans = (part.partition("-") for part in ranges[1:-1].split(","))
    return sum(max(int(last or first) - int(first) + 1, 1) for first, _, last in spans)
