"""The local backend: runs the same sbatch script on this machine, without Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    HpmlError,
    RecordError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.scheduler.local import processes
from hpml_orchestrator.scheduler.local.jobs import BEHIND, Home, LocalJob, LocalRequest
from hpml_orchestrator.scheduler.local.processes import Identity, send
from hpml_orchestrator.scheduler.model import JobState, JobStatus, SubmitRequest, representative

if TYPE_CHECKING:
    from collections.abc import Sequence

_KILL_WAIT_SECONDS = 30.0
_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)
_CLOCK_SLACK_SECONDS = 1.0
_LOCK_GLANCE_SECONDS = 0.2


class LocalScheduler:
    """A scheduler for one machine; its jobs are known to every process of the same user.

    Args:
        home: directory of this machine's jobs, `<records>/local/<hostname>`; made on demand.
        machine: what jobs share; all of this machine when left out.
    """

    name = "local"

    def __init__(self, home: Path, *, machine: processes.LocalMachine | None = None) -> None:
        self._home = Home(home)
        self._machine = machine

    def cluster(self) -> str:
        """Return an empty name: the record of a local job names its host instead."""
        return ""

    def arguments(self, request: SubmitRequest) -> list[str]:
        """Return the command that runs the script, for the record."""
        return ["bash", os.fspath(request.directory / "job.sh")]

    def submit(self, request: SubmitRequest, arguments: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Queue `job.sh` of the request's directory and return the job's id.

        This process may die at any point: the complete job appears in one step, and from then on
        every later call finds it and starts it.

        Raises:
            SchedulerError: this machine cannot run it; no job exists.
            SchedulerUnavailable: the records or the lock cannot be used; a job may exist.
        """
        with self._home.lock():
            try:
                record = self._record(request)
                # The same files as Slurm's client writes, so that recovery reads one kind of
                # evidence for both backends.
                write_text(request.answer("sbatch.err"), "")
                job_id = self._home.publish(record, request.environment)
                write_text(request.answer("sbatch.out"), f"{job_id}\n")
            except SchedulerUnavailable:
                raise
            except SchedulerError as error:
                with contextlib.suppress(HpmlError):
                    write_text(request.answer("sbatch.err"), f"sbatch: error: {error}\n")
                raise
            except (HpmlError, OSError) as error:
                raise SchedulerUnavailable(
                    f"the local job could not be written: {error}",
                    hint=f"is {self._home.path} there and writable?",
                ) from error
            with contextlib.suppress(HpmlError, OSError):  # a later call starts it
                self._home.start(self._home.find(job_id))
        return job_id

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each known job; unknown ids are left out.

        Raises:
            SchedulerUnavailable: the records cannot be read.
        """
        active = {job.number: job for job in self._settle()}
        statuses: dict[str, JobStatus] = {}
        for job_id in job_ids:
            jobs = [active.get(job.number, job) for job in self._home.find(job_id)]
            if jobs:
                statuses[job_id] = representative(job_id, [_status(job) for job in jobs])
        return statuses

    def starts(self, job_id: str) -> list[JobStatus]:  # noqa: ARG002 - scripts are not lost here
        """Return nothing: there is no accounting."""
        return []

    def find(self, directory: Path, *, name: str, since: float) -> list[str]:
        """Return the ids of the jobs of a submission's directory, oldest first."""
        self._settle()
        firsts = [jobs[0] for jobs in map(self._home.jobs_of, self._home.numbers()) if jobs]
        return [
            job.directory.name
            for job in firsts
            if job.request.directory == os.path.abspath(directory)
            and name in ("", job.request.name)
            and job.request.submitted >= since - _CLOCK_SLACK_SECONDS
        ]

    def submitting(self, directory: Path) -> bool:  # noqa: ARG002 - there is one lock for all
        """Return whether a process of this machine may be inside `submit` for that directory."""
        try:
            with self._home.lock(_LOCK_GLANCE_SECONDS):
                return False
        except SchedulerUnavailable:
            return True

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; returns at once, running ones end within the kill wait.

        Raises:
            SchedulerError: they are another machine's.
            SchedulerUnavailable: the state could not be written.
        """
        # Pids and the lock in /tmp mean nothing on another machine, although its records may be
        # visible here on a shared file system.
        jobs = [job for job_id in job_ids for job in self._home.find(job_id)]
        for host in {job.request.host for job in jobs} - {processes.short_hostname()}:
            raise SchedulerError(f"the local jobs of {host} cannot be cancelled from here")
        with self._home.lock():
            for job in [job for job_id in job_ids for job in self._home.find(job_id)]:
                if job.state is JobState.PENDING:
                    try:
                        job.end(JobState.CANCELLED, "cancelled")
                    except RecordError as error:
                        raise SchedulerUnavailable(
                            f"cannot cancel job {job.job_id}: {error}",
                            hint=f"is {self._home.path} there and writable?",
                        ) from error
                # Ask the supervisor rather than kill the job's processes here: it alone knows all
                # of them, including daemons that left the session, and it records the end.
                elif (
                    not job.state.over
                    and (owner := job.supervisor)
                    and not send(Identity(owner.pid, owner.start_ticks), signal.SIGUSR1)
                ):
                    # As after a restart of its container, from where nobody can tell.
                    job.end(JobState.CANCELLED, "cancelled; its supervisor is not here")

    def _settle(self) -> list[LocalJob]:
        """End lost jobs and start missing supervisors; return the unfinished jobs."""
        # Never wait here: whoever holds the lock knows the state, so a query need not.
        with contextlib.suppress(SchedulerUnavailable, OSError), self._home.lock(0.0):
            jobs = self._home.settle()
            self._home.start(jobs)
            return jobs
        return self._home.active()

    def _record(self, request: SubmitRequest) -> LocalRequest:
        """Return the record of a submission; later calls read nothing else about it."""
        # PATH has no way to escape a colon, and without our `bin` in front the job would find
        # Slurm's srun or none.
        if ":" in os.fspath(self._home.path):
            raise SchedulerError(
                f"the directory of local jobs has a colon in its name: {self._home.path}",
                hint="it is added to the PATH of jobs: keep the records elsewhere ($HPML_HOME)",
            )
        if not (request.directory / "job.sh").is_file():
            raise SchedulerError(f"no script to submit: there is no job.sh in {request.directory}")
        try:
            job = NodeJob.read(request.directory).job
        except RecordError as error:
            raise SchedulerError(f"no job to submit: {error}") from error
        machine = self._machine or processes.this_machine()
        for _, has, shown in processes.shortages(job, machine):
            raise SchedulerError(
                f"the job asks for {shown}; this machine ({processes.short_hostname()}) has "
                f"{has or 'none'}",
                hint="ask for less, or submit it to a Slurm cluster",
            )
        # Linux has no call that only reads the umask: set it and put it back. The job inherits the
        # user's, as under Slurm, not that of whichever process happens to start it.
        os.umask(umask := os.umask(0o022))
        wait = os.environ.get("HPML_LOCAL_KILL_WAIT", "")
        indices = job.array.indices if job.array else ()
        return LocalRequest(
            name=request.name,
            directory=os.path.abspath(request.directory),
            output=os.fspath(request.output),
            host=processes.short_hostname(),
            indices=indices if request.only is None else (request.only,),
            limit=job.array.limit if job.array else None,
            needs=processes.needs_of(job, machine),
            machine=machine,
            kill_wait_seconds=float(wait) if _SECONDS.fullmatch(wait) else _KILL_WAIT_SECONDS,
            umask=umask,
            after=[(dependency.job_id, dependency.end) for dependency in request.after],
            submitted=time.time(),
        )


def _status(job: LocalJob) -> JobStatus:
    status = job.status
    no_reason = BEHIND if job.position else "None"  # of an array one task at a time is looked at
    if job.state is not JobState.PENDING:
        no_reason = ""
    return JobStatus(
        job_id=job.job_id,
        state=status.state,
        raw_state=status.state.value,
        reason=status.reason or no_reason,
        exit_code=status.exit_code,
        signal=status.signal,
        nodes=job.request.host if status.started is not None else "",
        submitted=job.request.submitted,
        started=status.started,
        ended=status.ended,
        restarts=status.restarts,
        name=job.request.name,
        directory=job.request.directory,
    )
