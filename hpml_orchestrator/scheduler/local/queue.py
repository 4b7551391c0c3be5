"""The queue of this machine: jobs start in the order of their numbers.

Later jobs may overtake tasks above their array's limit (`%2`) and jobs that wait for others. There
is no daemon: every process that submits, queries, cancels or ends a job calls `schedule`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError, counted
from hpml_orchestrator.records.owner import boot_id
from hpml_orchestrator.scheduler.local.processes import (
    SUPERVISOR_MARK,
    kill_until_gone,
    marked,
)
from hpml_orchestrator.scheduler.local.resources import short_hostname
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.local.jobs import Home, LocalJob

_SPAWN_PATIENCE_SECONDS = 10.0
_KILL_PATIENCE_SECONDS = 5.0

# Python in isolated mode, so that neither the user's variables nor the working directory change
# what it imports. The package's parent, a checkout or site-packages, is on sys.path for one import
# only. The fork makes the supervisor a daemon.
_BOOT = (
    "import os, sys; os.fork() and os._exit(0); sys.path.insert(0, sys.argv.pop(1)); "
    "import hpml_orchestrator; del sys.path[0]; "
    "from hpml_orchestrator.scheduler.local.supervisor import main; main(*sys.argv[1:])"
)
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


class Queue:
    """The jobs that are not over, at one moment.

    Args:
        home: the directory of their records.
        jobs: all of them, in order.

    Attributes:
        line: the pending jobs that start as soon as there is room, in order.
        impossible: the pending jobs whose dependencies can no longer be met.
    """

    def __init__(self, home: Home, jobs: Sequence[LocalJob]) -> None:
        self._home = home
        self._dependencies: dict[tuple[str, str], bool | None] = {}
        self._holders = [job for job in jobs if job.has_slots]
        running = Counter(job.directory for job in self._holders)
        self.line: list[LocalJob] = []
        self.impossible: list[LocalJob] = []
        self._reasons: dict[int, str] = {}
        for job in jobs:
            if job.state is not JobState.PENDING:
                continue
            met = {self._dependency(job_id, end) for job_id, end in job.request.after}
            limit = job.request.limit
            # False before None: one dependency that has failed decides, even while others are still
            # open.
            if False in met:
                self.impossible.append(job)
            elif None in met:
                self._reasons[job.number] = "Dependency"
            # A task above its array's limit must not block the line: it cannot start even on an
            # idle machine.
            elif limit and running[job.directory] >= limit:
                reason = f"Priority: the array runs {counted(limit, 'task')} at once"
                self._reasons[job.number] = reason
            else:
                if self.line:
                    reason = f"Priority: job {self.line[-1].job_id} is before it"
                    self._reasons[job.number] = reason
                self.line.append(job)

    def reason(self, job: LocalJob) -> str:
        """Return why a pending job waits."""
        if job.number in self._reasons:
            return self._reasons[job.number]
        allocation = self.allocation(job)
        return allocation if isinstance(allocation, str) else "None"

    def allocation(self, job: LocalJob) -> tuple[list[int], list[str]] | str:
        """Return the CPUs and GPUs for the first job in line, or the reason why it waits."""
        machine, needs = job.request.machine, job.request.needs
        taken_cpus = {cpu for holder in self._holders for cpu in holder.status.cpus}
        taken_gpus = {gpu for holder in self._holders for gpu in holder.status.gpus}
        cpus = [cpu for cpu in machine.cpus if cpu not in taken_cpus]
        gpus = [gpu for gpu in machine.gpus if gpu not in taken_gpus]
        short = [
            f"{wanted} {kind}s wanted, {free} of {total} free"
            for kind, wanted, free, total in (
                ("CPU", needs.cpus, len(cpus), len(machine.cpus)),
                ("GPU", needs.gpus, len(gpus), len(machine.gpus)),
            )
            if free < wanted
        ]
        if short:
            running = ", ".join(holder.job_id for holder in self._holders)
            return f"Resources: {'; '.join(short)} (running: {running})"
        return cpus[: needs.cpus], gpus[: needs.gpus]

    def _dependency(self, job_id: str, end: str) -> bool | None:
        if (job_id, end) not in self._dependencies:
            states = [job.state for job in self._home.find(job_id)]
            met: bool | None = None
            if all(state.over for state in states):
                completed = all(state is JobState.COMPLETED for state in states)
                # A pruned job leaves no states. It ended in some way that nobody knows any more,
                # which satisfies `any` and nothing else.
                met = end == "any" or (bool(states) and completed == (end == "ok"))
            self._dependencies[job_id, end] = met
        return self._dependencies[job_id, end]


def schedule(home: Home) -> list[LocalJob]:
    """End jobs that are lost or can never start, start those that fit; return the unfinished ones.

    Needs the lock. What cannot be written to disk now is retried by the next call.
    """
    jobs = home.active()
    # Pids of another machine would look dead from here, and its jobs would be recorded as failed.
    if any(job.request.host != short_hostname() for job in jobs):
        return jobs  # of another machine, on a shared file system
    overdue = time.time() - _SPAWN_PATIENCE_SECONDS
    for job in jobs:
        if job.state in (JobState.RUNNING, JobState.COMPLETING) and job.supervisor is None:
            why = _clean_up_lost_job(job, home)
            if full := home.full():
                why += f"; its end cannot be recorded: {full}"
            _end(job, JobState.NODE_FAIL, why)
        # A supervisor that was killed before it claimed the job left nothing behind. Start another
        # one: if the first is only slow, the claim under the lock lets one of them run.
        elif job.state is JobState.CONFIGURING and job.status.spawned < overdue:
            _start(home, job, job.status.cpus, job.status.gpus)
    queue = Queue(home, jobs)
    while queue.impossible:  # each may be what others wait for
        for job in queue.impossible:
            _end(job, JobState.CANCELLED, "DependencyNeverSatisfied")
        queue = Queue(home, jobs)
    # Strictly first in, first out: if the head does not fit, nothing behind it starts. A stream of
    # small jobs would otherwise keep a large one waiting for ever.
    while queue.line and not isinstance(got := queue.allocation(queue.line[0]), str):
        _start(home, queue.line[0], *got)
        queue = Queue(home, jobs)
    return jobs


def _end(job: LocalJob, state: JobState, reason: str) -> None:
    with contextlib.suppress(RecordError):
        job.save(replace(job.status, state=state, ended=time.time(), reason=reason))


def _clean_up_lost_job(job: LocalJob, home: Home) -> str:
    if job.status.supervisor is None or job.status.supervisor.boot != boot_id():
        return "the machine was restarted while the job ran"
    variables = [f"SLURM_JOB_ID={job.number}", f"SLURM_CLUSTER_NAME={home.cluster}"]
    # With the supervisor gone, descent leads nowhere: its children belong to init now. Their
    # environment still names the job, even that of a process that left its session.
    left = kill_until_gone(lambda: marked(variables), patience_seconds=_KILL_PATIENCE_SECONDS)
    if left:
        return f"the job's supervisor died; these processes remain: {left}"
    return "the job's supervisor died; its processes were killed"


def _start(home: Home, job: LocalJob, cpus: Sequence[int], gpus: Sequence[str]) -> None:
    """Allocate CPUs and GPUs and start a supervisor, which claims the job under the lock.

    This process may die in between: a later call starts another supervisor, and only one claims.
    """
    with contextlib.suppress(RecordError):
        job.save(
            replace(
                job.status, state=JobState.CONFIGURING, cpus=cpus, gpus=gpus, spawned=time.time()
            )
        )
        argv = [sys.executable, "-I", "-X", "utf8", "-c", _BOOT, _PACKAGE_PARENT]
        argv += [str(home.path), str(home.lock_root), job.job_id]
        with open(job.directory / "supervisor.log", "ab") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                # An almost empty environment: the supervisor must not be found by its submitter's
                # job variables, since whoever ends that outer job would kill this one too.
                env={"PATH": os.defpath, SUPERVISOR_MARK: job.job_id},
                start_new_session=True,
            )
        child.wait()  # it forks at once and leaves
