"""A small Slurm in memory."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.scheduler.model import JobState, JobStatus
from hpml_orchestrator.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hpml_orchestrator.scheduler.model import SubmitRequest


class Killed(BaseException):
    """Stands for hpml being killed with SIGKILL: only a test may catch it."""


class Fault(enum.Enum):
    """What goes wrong in one call."""

    NONE = "nothing"
    UNAVAILABLE = "the controller does not answer and has not acted"
    LOST_ANSWER = "the controller acted, its answer was lost"
    REFUSED = "submit only: refused, in sbatch's words"
    KILLED_BEFORE = "submit only: hpml is killed before sbatch runs"
    KILLED_DURING = "submit only: hpml is killed, sbatch lives on and is answered later"
    BOTH_KILLED = "submit only: hpml and sbatch are killed, the request arrives later"
    KILLED_AFTER = "submit only: hpml is killed when sbatch has been answered"


@dataclass
class FakeJob:
    """A job of the fake; `states` is what it goes through, by seconds since its submission."""

    status: JobStatus
    states: Sequence[tuple[float, JobState]] = ((0.0, JobState.PENDING),)


class FakeScheduler:
    """A `Scheduler` for tests.

    Attributes:
        jobs: every job by id, of an array each task by `<array's id>_<index>`; change a status with
            `move`, forget a job with `del`.
        faults: what goes wrong in the next calls, one each; nothing when it is empty.
        delay_seconds: how long a request of KILLED_DURING is on its way.
        unseen_delay_seconds: the same of BOTH_KILLED, after sbatch has left the list of processes.
        cluster_name: what `cluster` returns.
        accounted: what accounting has of all starts of jobs.

    >>> fake = FakeScheduler()
    >>> fake.faults.append(Fault.UNAVAILABLE)
    >>> fake.query(["1"])
    Traceback (most recent call last):
    hpml_orchestrator.errors.SchedulerUnavailable: the controller does not answer
    """

    name = "fake"

    def __init__(self, clock: FakeClock | None = None, faults: Iterable[Fault] = ()) -> None:
        self.clock = clock or FakeClock()
        self.faults = list(faults)
        self.jobs: dict[str, FakeJob] = {}
        self.delay_seconds = 30.0
        self.unseen_delay_seconds = 30.0
        self.cluster_name = "fake"
        self.accounted: list[JobStatus] = []
        self._accepted = 0
        self._on_the_way: list[tuple[float, SubmitRequest, bool]] = []

    def cluster(self) -> str:
        """Return the cluster's name."""
        return self.cluster_name

    def arguments(self, request: SubmitRequest) -> list[str]:
        """Return the submission as an argument list."""
        return ["sbatch", str(request.directory / "job.sh")]

    def submit(self, request: SubmitRequest, arguments: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Make a job, as far as the next fault lets it."""
        fault = self._next_fault()
        if fault is Fault.KILLED_BEFORE:
            raise Killed
        for name in ("sbatch.out", "sbatch.err"):
            request.answer(name).write_text("", encoding="utf-8")
        if fault in (Fault.KILLED_DURING, Fault.BOTH_KILLED):
            seen = fault is Fault.KILLED_DURING
            delay = self.delay_seconds if seen else self.unseen_delay_seconds
            self._on_the_way.append((self.clock.time() + delay, request, seen))
            raise Killed
        if fault is Fault.REFUSED:
            words = "Batch job submission failed: Invalid account specified"
            request.answer("sbatch.err").write_text(f"sbatch: error: {words}\n", "utf-8")
            raise SchedulerError(words)
        if fault is Fault.UNAVAILABLE:
            raise SchedulerUnavailable("the controller does not answer")
        job_id = self._accept(request, answered=fault is not Fault.LOST_ANSWER)
        if fault is Fault.KILLED_AFTER:
            raise Killed
        if fault is Fault.LOST_ANSWER:
            raise SchedulerUnavailable("Socket timed out on send/recv operation")
        return job_id

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each known job."""
        self._read_fault()
        return {key: self._status(self.jobs[key]) for key in job_ids if key in self.jobs}

    def starts(self, job_id: str) -> list[JobStatus]:
        """Return what the list `accounted` has of a job."""
        return [status for status in self.accounted if status.job_id == job_id]

    def find(self, directory: Path, *, name: str, since: float) -> list[str]:  # noqa: ARG002
        """Return the ids of jobs with that directory, oldest first."""
        self._read_fault()
        jobs = [job.status for job in self.jobs.values()]
        ids = (_whole(job.job_id) for job in jobs if job.directory == str(directory))
        return list(dict.fromkeys(ids))

    def submitting(self, directory: Path) -> bool:
        """Return whether a request of a live sbatch for that directory is on its way."""
        self._arrive()
        return any(alive and req.directory == directory for _, req, alive in self._on_the_way)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs that are not over."""
        fault = self._next_fault()
        if fault is Fault.UNAVAILABLE:
            raise SchedulerUnavailable("the controller does not answer")
        for job_id, job in self.jobs.items():
            asked = job_id in job_ids or _whole(job_id) in job_ids
            if asked and not self._status(job).state.over:
                self.move(job_id, JobState.CANCELLED)
        if fault is Fault.LOST_ANSWER:
            raise SchedulerUnavailable("Socket timed out on send/recv operation")

    def move(
        self, job_id: str, state: JobState, *, exit_code: int | None = None, signal: int = 0
    ) -> None:
        """Put a job into a state, for good."""
        job, now = self.jobs[job_id], self.clock.time()
        job.status = replace(
            self._status(job), exit_code=exit_code, signal=signal, restarts=job.status.restarts
        )
        job.states = [(now - (job.status.submitted or now), state)]

    def _status(self, job: FakeJob) -> JobStatus:
        now, status = self.clock.time(), job.status
        submitted = status.submitted or 0.0
        for after, state in job.states:
            at = submitted + after
            if at <= now:
                started = None if state.waiting else status.started or at
                ended = at if state.over else None
                status = replace(
                    status, state=state, raw_state=state.value, started=started, ended=ended
                )
        if status.state is JobState.COMPLETED and status.exit_code is None:
            status = replace(status, exit_code=0)
        return status

    def _accept(self, request: SubmitRequest, *, answered: bool) -> str:
        self._accepted += 1
        job_id = str(self._accepted)
        for task_id in _tasks(job_id, request):
            status = JobStatus(
                task_id,
                JobState.PENDING,
                submitted=self.clock.time(),
                name=request.name,
                directory=str(request.directory),
            )
            self.jobs[task_id] = FakeJob(status)
        if answered:
            request.answer("sbatch.out").write_text(f"{job_id}\n", "utf-8")
        return job_id

    def _arrive(self) -> None:
        now = self.clock.time()
        due = [item for item in self._on_the_way if item[0] <= now]
        self._on_the_way = [item for item in self._on_the_way if item[0] > now]
        for _, request, alive in due:
            self._accept(request, answered=alive)

    def _next_fault(self) -> Fault:
        self._arrive()
        return self.faults.pop(0) if self.faults else Fault.NONE

    def _read_fault(self) -> None:
        if self._next_fault() in (Fault.UNAVAILABLE, Fault.LOST_ANSWER):
            raise SchedulerUnavailable("the controller does not answer")


def _whole(job_id: str) -> str:
    return job_id.partition("_")[0]


def _tasks(job_id: str, request: SubmitRequest) -> list[str]:
    if request.only is not None:
        return [f"{job_id}_{request.only}"]
    if not request.array:
        return [job_id]
    script = (request.directory / "job.sh").read_text("utf-8")
    (asked,) = re.findall(r"^#SBATCH --array=(\S+)$", script, re.MULTILINE)
    return [f"{job_id}_{index}" for index in parse_array(asked).indices]
