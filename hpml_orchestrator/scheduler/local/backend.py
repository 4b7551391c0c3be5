"""The local backend: the very same sbatch script, run on this machine without Slurm."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    HpmlError,
    RecordError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.scheduler.local import arrays as local_arrays
from hpml_orchestrator.scheduler.local import resources as local_resources
from hpml_orchestrator.scheduler.local.directives import read_directives
from hpml_orchestrator.scheduler.local.jobs import Home, Job, Locks, plain, poke
from hpml_orchestrator.scheduler.local.processes import send
from hpml_orchestrator.scheduler.local.queue import Queue
from hpml_orchestrator.scheduler.local.resources import (
    Machine,
    needs_of,
    short_hostname,
    without_slurm,
)
from hpml_orchestrator.scheduler.model import JobState, JobStatus, SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LocalScheduler"]

_KILL_WAIT_SECONDS = 30.0
_KILL_WAIT_VARIABLE = "HPML_LOCAL_KILL_WAIT"
_CLOCK_SLACK_SECONDS = 1.0


class LocalScheduler:
    """A scheduler for one machine; its jobs are known to every process of the same user.

    Args:
        home: directory of this machine's jobs, `<records>/local/<hostname>`; made on demand.
        gpu_ids: returns the GPUs as CUDA_VISIBLE_DEVICES names them.
        cpu_ids: returns the CPUs that jobs may use.
        memory_mb: returns the memory of the machine in MiB, 0 where not known.
        kill_wait_seconds: time between SIGTERM and SIGKILL; $HPML_LOCAL_KILL_WAIT or 30.
        lock_root: a directory of this very machine that everybody may write to.
        reached: told the name of each point that a submission passes; for tests that die there.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        *,
        gpu_ids: Callable[[], Sequence[str]] = local_resources.gpu_ids,
        cpu_ids: Callable[[], Sequence[int]] = local_resources.cpu_ids,
        memory_mb: Callable[[], int] = local_resources.memory_mb,
        kill_wait_seconds: float | None = None,
        lock_root: Path = Path("/tmp"),  # noqa: S108 - its use is checked by Locks
        reached: Callable[[str], None] = lambda point: None,  # noqa: ARG005
    ) -> None:
        self._home = Home(home, Locks(lock_root))
        self._gpu_ids = gpu_ids
        self._cpu_ids = cpu_ids
        self._memory_mb = memory_mb
        self._kill_wait_seconds = kill_wait_seconds
        self._reached = reached

    def arguments(self, request: SubmitRequest) -> list[str]:
        """Return what will be run."""
        return ["bash", os.fspath(request.directory / "job.sh")]

    def submit(self, request: SubmitRequest) -> str:
        """Queue `job.sh` of the request's directory and return the job's id.

        The order makes a death at any point harmless: the complete job appears under its number
        in one step; from then on any later call finds it and sees to its supervisor.

        Raises:
            SchedulerError: this machine cannot run it; no job exists.
            SchedulerUnavailable: the records or the lock cannot be used; a job may exist.
        """
        with self._home.locks.hold(_submission_lock(request.directory), remove=True):
            try:
                return self._submit(request)
            except SchedulerUnavailable:
                raise
            except SchedulerError as error:
                with contextlib.suppress(HpmlError, OSError):
                    text = f"sbatch: error: {error}\n"
                    write_text(request.directory / "sbatch.err", text)
                raise
            except (HpmlError, OSError) as error:
                raise SchedulerUnavailable(
                    f"the local job could not be written: {error}",
                    hint=f"is {self._home.path} there and writable?",
                ) from error

    def _submit(self, request: SubmitRequest) -> str:
        record, indices, limit = self._record(request)
        write_text(request.directory / "sbatch.err", "")
        self._reached("begin")
        with self._home.lock():
            self._reached("locked")
            environment = without_slurm(request.environment)
            if indices:
                job = local_arrays.publish(
                    self._home, record, environment, request, indices=indices, limit=limit
                )
            else:
                job = self._home.publish(record, environment)
            self._reached("published")
            write_text(request.directory / "sbatch.out", f"{job.job_id}\n")
            self._reached("answered")
            with contextlib.suppress(HpmlError, OSError):  # the job is queued: a later call mends
                self._home.heal()
            self._reached("started")
        return job.job_id

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each known job; unknown ids are left out.

        Raises:
            SchedulerUnavailable: the records cannot be read.
        """
        self._heal()
        found: dict[str, list[Job]] = {}
        numbers_of = local_arrays.finder(self._home)
        for job_id in job_ids:
            jobs = [self._load(number) for number in numbers_of(job_id)]
            found[job_id] = [job for job in jobs if job is not None]
        waits = any(job.state.waiting for jobs in found.values() for job in jobs)
        queue = Queue(self._home.active() if waits else [])
        return {
            job_id: local_arrays.telling(job_id, [_status(job, queue) for job in jobs])
            for job_id, jobs in found.items()
            if jobs
        }

    def find(self, directory: Path, *, name: str, since: float) -> list[str]:
        """Return the ids of the jobs of a submission's directory, oldest first."""
        self._heal()
        wanted = os.path.abspath(directory)
        found = []
        for number in self._home.numbers():
            job = self._home.load(number)
            if (
                job is not None
                and job.array_id in (0, number)
                and job.record["directory"] == wanted
                and name in ("", job.record["name"])
                and job.record["submitted"] >= since - _CLOCK_SLACK_SECONDS
            ):
                found.append(job.job_id)
        return found

    def submitting(self, directory: Path) -> bool:
        """Return whether a process of this machine is inside `submit` for that directory."""
        return self._home.locks.held(_submission_lock(directory))

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; returns at once, running ones end within the kill wait.

        Raises:
            SchedulerUnavailable: the request could not be written.
        """
        asked: list[Job] = []
        numbers_of = local_arrays.finder(self._home)
        numbers = [number for job_id in job_ids for number in numbers_of(job_id)]
        for number in numbers:
            job = self._home.load(number)
            if job is None or job.state.over:
                continue
            try:
                (job.directory / "cancel").touch()
            except OSError as error:
                raise SchedulerUnavailable(
                    f"cannot ask for the end of job {job.shown_id}: {error.strerror}",
                    hint=f"is {self._home.path} there and writable?",
                ) from error
            asked.append(job)
        if asked:
            self._heal()
        for job in asked:
            poke(job, send, signal.SIGUSR1)

    def _load(self, number: int) -> Job | None:
        job = self._home.load(number)
        if job is not None and not job.state.over:
            return self._home.unrecorded.get(job.job_id, job)
        return job

    def _heal(self) -> None:
        """See to the queue; where that cannot be written now, there still is an answer to read."""
        if self._home.needs_healing():
            with self._home.lock(), contextlib.suppress(RecordError, OSError):
                self._home.heal()

    def _record(
        self, request: SubmitRequest
    ) -> tuple[dict[str, object], tuple[int, ...], int | None]:
        """Return the record of the job, and for an array its indices and its limit."""
        if ":" in os.fspath(self._home.path):
            raise SchedulerError(
                f"the directory of local jobs has a colon in its name: {self._home.path}",
                hint="it goes on the jobs' PATH: keep the records elsewhere ($HPML_HOME)",
            )
        for name, value in request.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise SchedulerError(
                    f"no process can have the environment variable {name!r}",
                    hint="leave it out of the job's environment",
                )
        script = request.directory / "job.sh"
        try:
            asked = read_directives(read_text(script))
        except HpmlError as error:
            if isinstance(error, SchedulerError):
                raise
            raise SchedulerError(f"no script to submit: {error}", hint=error.hint) from error
        machine = Machine(tuple(self._cpu_ids()), tuple(self._gpu_ids()), self._memory_mb())
        needs = needs_of(asked, machine)
        indices, limit = local_arrays.array_of(asked.array)
        record: dict[str, object] = {
            "job_id": "",
            "state": JobState.PENDING,
            "name": request.name or asked.job_name or "job.sh",
            "comment": request.comment,
            "directory": os.path.abspath(request.directory),
            "output": os.fspath(request.output),
            "cluster": self._home.cluster,
            "host": short_hostname(),
            "directives": plain(replace(asked, array="")),
            "array": None,
            "needs": plain(needs),
            "machine": plain(machine),
            "kill_wait_seconds": self._kill_wait(),
            "umask": _umask(),
            "after": [[one.job_id, one.end] for one in request.after],
            "submitted": time.time(),
            "started": None,
            "ended": None,
            "restarts": 0,
            "supervisor": None,
            "batch": None,
            "cpus": [],
            "gpus": [],
            "exit_code": None,
            "signal": 0,
            "reason": "",
        }
        return record, indices, limit

    def _kill_wait(self) -> float:
        if self._kill_wait_seconds is not None:
            return self._kill_wait_seconds
        text = os.environ.get(_KILL_WAIT_VARIABLE, "")
        if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
            return float(text)
        return _KILL_WAIT_SECONDS


def _status(job: Job, queue: Queue) -> JobStatus:
    record = job.record
    reason = record["reason"]
    if job.state is JobState.PENDING:
        reason = _waiting_for(job, queue)
    return JobStatus(
        job_id=job.job_id,
        state=job.state,
        raw_state=str(record["state"]),
        reason=reason,
        exit_code=record["exit_code"],
        signal=record["signal"],
        nodes=record["host"] if record["started"] is not None else "",
        submitted=record["submitted"],
        started=record["started"],
        ended=record["ended"],
        restarts=record["restarts"],
        name=record["name"],
        directory=record["directory"],
    )


def _waiting_for(job: Job, queue: Queue) -> str:
    starts_now = queue.starts(job)
    if isinstance(starts_now, str):
        return starts_now
    with contextlib.suppress(OSError, ValueError, TypeError):
        _, count = json.loads((job.directory / "spawned").read_text("ascii"))
        if count > 1 and job.supervisor is None:
            log = job.directory / "supervisor.log"
            return f"no supervisor runs after {count} starts; see {log}"
    return "None"


def _submission_lock(directory: Path) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()
    return f"submit-{digest[:16]}.lock"


def _umask() -> int:
    """Return the umask without changing it for an instant, as other threads may write files."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
