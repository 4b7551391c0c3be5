"""The process that waits for its turn, runs one local job, and records how it ended.

A daemon in its own session, started with the submission. Of an array it takes the next task, and
starts another supervisor for those after it. It is a child subreaper: processes that the job leaves
behind become its children, and it ends them with the job. While the job runs it handles three
signals: USR1 cancels the job, USR2 requeues it, and TERM ends it as a node failure, as at the
machine's shutdown.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.scheduler.local.jobs import BEHIND, Home, Status
from hpml_orchestrator.scheduler.local.processes import descendants, kill_until_gone, send
from hpml_orchestrator.scheduler.local.resources import short_hostname
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.local.jobs import LocalJob

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HEARD = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
_IGNORED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE}
_NEVER = float("inf")
_NEVER_MET = "DependencyNeverSatisfied"
_REQUEUE = (JobState.REQUEUED, "requeued")
_MAX_PAUSE_SECONDS = 3600.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.2
_KILL_PATIENCE_SECONDS = 10.0
_RECORD_PATIENCE_SECONDS = 600.0
_RECORD_PAUSE_SECONDS = 0.5


def main(home_path: str, number: str, lock: str) -> None:
    """Wait for the next task of a submission, and run it."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # another supervisor may have blocked them
    os.set_inheritable(int(lock), False)
    home = Home(Path(home_path))
    run = _next(home, int(number))
    with contextlib.suppress(HpmlError, OSError):  # the next call of hpml starts the others
        home.started(int(number), int(lock))
    if run is not None:
        run.until_over()
        if run.ending and run.ending[0] is JobState.NODE_FAIL:
            return  # the machine shuts down: whoever waits starts after it
        # Under the lock: while another process holds it, an end that was recorded just now must not
        # look like the death of a supervisor.
        with contextlib.suppress(HpmlError, OSError), home.lock():
            home.start(home.settle())


def _next(home: Home, number: int) -> _Run | None:
    """Wait until a task of a submission may start, and claim it; None if all have.

    Jobs that could start stand in a line, in the order of their numbers: a byte of a file is each
    one's place, locked as long as it waits. So the kernel wakes a process once nobody is before it,
    and takes a killed one out of the line.
    """
    with home.opened("line") as line:
        while tasks := home.pending(number):
            reason = _obstacle(home, tasks[0])
            if reason:
                fcntl.lockf(line, fcntl.LOCK_UN, 1, number)  # let others pass
            else:
                os.utime(line)  # cleaners of /tmp go by age
                fcntl.lockf(line, fcntl.LOCK_EX, 1, number)
                reason = "" if _nobody_before(line, number, fcntl.LOCK_NB) else BEHIND
            if not reason or reason != tasks[0].status.reason:
                try:
                    claimed = _claimed(home, number, reason)
                except (HpmlError, OSError):  # no job is lost because a disk is full for a moment
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
                    time.sleep(_RECORD_PAUSE_SECONDS)
                    continue
                if claimed is not None:
                    return _Run(home, claimed)
            if reason == BEHIND:
                _nobody_before(line, number)
            else:
                time.sleep(_LOOK_SECONDS)
    return None


def _claimed(home: Home, number: int, reason: str) -> LocalJob | None:
    """Claim the next task of a submission, or note why it waits; raises if that is not recorded."""
    with home.lock(_NEVER):
        tasks = home.pending(number)  # some may have been cancelled
        if reason == _NEVER_MET:
            for job in tasks:
                job.end(JobState.CANCELLED, reason)
        if reason == _NEVER_MET or not tasks:
            return None
        got = reason or _allocation(tasks[0], home.settle())
        if isinstance(got, str):
            tasks[0].wait_for(got)
            return None
        # Signals are blocked before the claim: from then on `cancel` sends one, whose default
        # action would kill this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        tasks[0].claim(*got)
        return tasks[0]


def _nobody_before(line: int, number: int, how: int = 0) -> bool:
    """Wait until nobody is before a job in the line, or return whether that is so."""
    try:
        fcntl.lockf(line, fcntl.LOCK_SH | how, number, 0)
    except (BlockingIOError, PermissionError):
        return False
    fcntl.lockf(line, fcntl.LOCK_UN, number, 0)
    return True


def _obstacle(home: Home, job: LocalJob) -> str:
    """Return why a job cannot start, however much room there is; empty for nothing."""
    request = job.request
    met = {_met(home, job_id, end) for job_id, end in request.after}
    if False in met:  # one dependency that has failed decides, even while others are still open
        return _NEVER_MET
    if None in met:
        return "Dependency"
    tasks = home.jobs_of(job.submission) if request.limit else []
    if request.limit and sum(task.has_slots for task in tasks) >= request.limit:
        return f"Priority: the array runs {counted(request.limit, 'task')} at once"
    return ""


def _met(home: Home, job_id: str, end: str) -> bool | None:
    """Return whether a dependency is met; None if that is still open."""
    jobs = home.dependency(job_id)
    if jobs is None:
        return None
    states = [job.state for job in jobs]
    if not all(state.over for state in states):
        return None
    completed = all(state is JobState.COMPLETED for state in states)
    # A pruned job leaves no states. It ended in some way that nobody knows any more, which
    # satisfies `any` and nothing else.
    return end == "any" or (bool(states) and completed == (end == "ok"))


def _allocation(job: LocalJob, unfinished: Sequence[LocalJob]) -> tuple[list[int], list[str]] | str:
    """Return the CPUs and GPUs for a job, or why there are none."""
    machine, needs = job.request.machine, job.request.needs
    holders = [other for other in unfinished if other.has_slots]
    taken_cpus = {cpu for holder in holders for cpu in holder.status.cpus}
    taken_gpus = {gpu for holder in holders for gpu in holder.status.gpus}
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
        running = ", ".join(holder.job_id for holder in holders)
        return f"Resources: {'; '.join(short)} (running: {running})"
    return cpus[: needs.cpus], gpus[: needs.gpus]


class _Run:
    """One job from its first process to its last."""

    def __init__(self, home: Home, job: LocalJob) -> None:
        self.home = home
        self.job = job
        self.shell: subprocess.Popen[bytes]
        self.status: int | None = None
        self.ending: tuple[JobState, str] | None = None
        self.kill_at = _NEVER  # a laptop's sleep does not count

    def until_over(self) -> None:
        """Run the job and record its end."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        try:
            self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._keep(JobState.FAILED, f"cannot start: {error}", 1)
            return
        limit_at = time.monotonic() + self.job.request.needs.seconds
        while self.status is None:
            deadline = limit_at if self.ending is None else self.kill_at
            self._hear(deadline - time.monotonic())
            if self.ending is None and time.monotonic() >= limit_at:
                self.ending = (JobState.TIMEOUT, "TimeLimit")
            if self.status is None and self.ending is not None:
                self._end(*self.ending)
        # A script that requeues itself and ends at once sends both signals in one moment.
        self._hear(0.0)
        left = self._end_leftovers()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)
        if self.ending == _REQUEUE and not left:
            with self.home.lock(_NEVER):  # `cancel` holds it while it chooses whom to signal
                self._hear(0.0)
                if self.ending == _REQUEUE:
                    self._keep(*_REQUEUE)
                    return
        code, number = (self.status, 0) if self.status >= 0 else (0, -self.status)
        state, reason = self.ending or (JobState.COMPLETED, "")
        if self.ending is None and number:
            state, reason = JobState.FAILED, f"RaisedSignal:{number}({signal.strsignal(number)})"
        elif self.ending is None and code:
            state, reason = JobState.FAILED, "NonZeroExitCode"
        if left:
            reason = f"{reason or 'ended'}; these processes remain: {left}"
            # Processes that survive SIGKILL still hold GPUs or memory: the next attempt would start
            # beside them.
            state = JobState.NODE_FAIL if state is JobState.REQUEUED else state
        self._keep(state, reason, code, number)

    def _hear(self, seconds: float) -> None:
        """Wait for a signal, reap what has ended, and note how the job is to end."""
        heard, pause = set(), min(max(seconds, 0.0), _MAX_PAUSE_SECONDS)
        while received := signal.sigtimedwait(_HEARD, pause):
            heard.add(received.si_signo)
            pause = 0.0
        with contextlib.suppress(ChildProcessError):  # orphans of the job are children, too
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        state = self.ending[0] if self.ending else None
        runs = state is None and self.status is None
        # The request to requeue may come from a script that has ended since; a time limit does not
        # undo it, a cancellation does.
        if signal.SIGUSR2 in heard and state in (None, JobState.TIMEOUT):
            self.ending = _REQUEUE
        elif signal.SIGTERM in heard and runs:
            self.ending = (JobState.NODE_FAIL, "the job's supervisor received a signal to stop")
        if signal.SIGUSR1 in heard and (runs or state is JobState.REQUEUED):
            self.ending = (JobState.CANCELLED, "cancelled")

    def _start(self) -> None:
        request, directory = self.job.request, self.job.directory
        steps = directory / f"steps-{self.job.position}"
        steps.mkdir(exist_ok=True)
        entries = (directory / "environment").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
        environment = {name: value for name, _, value in pairs}
        environment.setdefault("TMPDIR", tempfile.gettempdir())
        environment |= _variables(self.job, self.home.cluster)
        environment["PATH"] = f"{directory / 'bin'}:{environment.get('PATH', os.defpath)}"
        environment["HPML_LOCAL_STEPS"] = str(steps)
        environment["HPML_LOCAL_SUPERVISOR_PID"] = str(supervisor := os.getpid())
        environment["HPML_LOCAL_KILL_WAIT"] = f"{request.kill_wait_seconds:g}"

        def prepare() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            # The parent may have died before prctl took effect; then no death signal would come.
            if os.getppid() != supervisor:
                os._exit(1)
            for number in _IGNORED:  # they would stay ignored
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.job.status.cpus)

        script = os.path.join(request.directory, "job.sh")
        os.stat(script)
        with open(self.job.output, "ab", 0) as output:
            self.shell = subprocess.Popen(
                ["bash", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=request.directory,
                env=environment,
                umask=request.umask,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
            )

    def _end(self, state: JobState, reason: str) -> None:
        """Begin to end the job, or kill what is late; the reason goes into its output."""
        if self.kill_at < _NEVER:
            if time.monotonic() >= self.kill_at:
                self._send(signal.SIGKILL)
                time.sleep(_PAUSE_SECONDS)
            return
        # As slurmstepd writes it.
        why = {
            JobState.TIMEOUT: " DUE TO TIME LIMIT",
            JobState.NODE_FAIL: " DUE TO NODE FAILURE",
            JobState.REQUEUED: " DUE TO JOB REQUEUE",
        }
        line = (
            f"hpml: *** JOB {self.job.number} ON {os.uname().nodename} CANCELLED AT "
            f"{time.strftime('%Y-%m-%dT%H:%M:%S')}{why.get(state, '')} ***\n"
        )
        with contextlib.suppress(OSError), open(self.job.output, "a", encoding="utf-8") as output:
            output.write(line)
        self._terminate(reason)

    def _terminate(self, reason: str) -> None:
        self.kill_at = time.monotonic() + self.job.request.kill_wait_seconds
        with contextlib.suppress(RecordError):
            self.job.save(replace(self.job.status, state=JobState.COMPLETING, reason=reason))
        # SIGCONT first, as slurmstepd does: a stopped process acts on SIGTERM only once it
        # continues.
        self._send(signal.SIGCONT)
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        # Oldest first: otherwise a script would continue with its next command.
        for who in sorted(descendants(os.getpid()), key=lambda who: (who.start, who.pid)):
            send(who, number)

    def _end_leftovers(self) -> list[int]:
        """End what the script left behind, first by TERM; return the pids that survive."""
        if descendants(os.getpid()) and self.kill_at == _NEVER:
            self._terminate("")
        while time.monotonic() < self.kill_at and descendants(os.getpid()):
            self._hear(_PAUSE_SECONDS)
        return kill_until_gone(
            lambda: descendants(os.getpid()),
            patience_seconds=_KILL_PATIENCE_SECONDS,
            reap=lambda: self._hear(0.0),
        )

    def _keep(self, state: JobState, reason: str, code: int = 0, number: int = 0) -> None:
        """Record the end; on a full disk, retry until there is room."""
        status = Status(restarts=self.job.status.restarts + 1)
        if state is not JobState.REQUEUED:
            status = replace(
                self.job.status,
                state=state,
                ended=time.time(),
                exit_code=code,
                signal=number,
                reason=reason,
            )
        until = time.monotonic() + _RECORD_PATIENCE_SECONDS
        while True:
            try:
                return self.job.save(status)
            except RecordError as error:
                # The end exists nowhere else. Exiting now would have the next query call the job
                # lost, so keep trying for ten minutes unless the machine shuts down.
                late = time.monotonic() > until
                if late or signal.sigtimedwait({signal.SIGTERM}, _RECORD_PAUSE_SECONDS):
                    sys.exit(f"the end of job {self.job.job_id} ({state}) is not recorded: {error}")


def _variables(job: LocalJob, cluster: str) -> dict[str, str]:
    """Return the variables of a one-node Slurm job, for a job that has its CPUs and GPUs."""
    request, needs, status = job.request, job.request.needs, job.status
    started = int(status.started or 0)
    host = short_hostname()
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job.number),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"), host),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), 0),
        **dict.fromkeys(("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"), len(status.cpus)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), needs.tasks),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), needs.tasks),
        "SLURM_CPUS_PER_TASK": needs.cpus_per_task,
        "SLURM_MEM_PER_NODE": needs.memory_mb,
        "SLURM_JOB_NAME": request.name,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_SUBMIT_DIR": request.directory,
        "SLURM_SUBMIT_HOST": request.host,
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_USER": user_name(os.getuid()),
        "SLURM_JOB_START_TIME": started,
        "SLURM_JOB_END_TIME": started + needs.seconds,
        "SLURM_RESTART_COUNT": status.restarts or None,
    }
    if gpus := status.gpus:
        values |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), len(gpus))
        values |= dict.fromkeys(("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"), ",".join(gpus))
    if indices := request.indices:
        values |= {
            "SLURM_ARRAY_JOB_ID": job.directory.name,
            "SLURM_ARRAY_TASK_ID": job.index,
            "SLURM_ARRAY_TASK_COUNT": len(indices),
            "SLURM_ARRAY_TASK_MIN": indices[0],
            "SLURM_ARRAY_TASK_MAX": indices[-1],
            "SLURM_ARRAY_TASK_STEP": indices[1] - indices[0] if len(indices) > 1 else 1,
        }
    return {name: str(value) for name, value in values.items() if value is not None}
