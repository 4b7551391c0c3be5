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
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.scheduler.local.jobs import Home
from hpml_orchestrator.scheduler.local.processes import (
    Identity,
    descendants,
    identity,
    kill_until_gone,
    send,
)
from hpml_orchestrator.scheduler.local.resources import slurm_variables
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.local.jobs import Line, LocalJob

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
_IGNORED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE}
_NEVER = float("inf")
_NEVER_MET = "DependencyNeverSatisfied"
_BEHIND = "Priority: an earlier job waits for room"
_MAX_PAUSE_SECONDS = 3600.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.2
_KILL_PATIENCE_SECONDS = 10.0
_RECORD_PATIENCE_SECONDS = 600.0
_RECORD_PAUSE_SECONDS = 0.5
_CANNOT_EXECUTE = 126


def main(home_path: str, lock_root: str, number: str, lock: str) -> None:
    """Wait for the next task of a submission, and run it."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    os.set_inheritable(int(lock), False)
    home = Home(Path(home_path), Path(lock_root))
    run = _next(home, int(number))
    home.started(int(number), int(lock))
    if run is not None:
        run.until_over()
        # Under the lock: while another process holds it, an end that was recorded just now must not
        # look like the death of a supervisor.
        with contextlib.suppress(HpmlError, OSError), home.lock():
            home.start(home.settle())


def _next(home: Home, number: int) -> _Run | None:
    """Wait until a task of a submission may start, and claim it; None if all have."""
    with home.line(number) as line:
        while tasks := home.pending(number):
            reason = _obstacle(home, tasks[0], line)
            if not reason or reason != tasks[0].status.reason:
                with home.lock(_NEVER):
                    for job in home.pending(number):  # some may have been cancelled
                        if reason == _NEVER_MET:
                            job.end(JobState.CANCELLED, reason)
                            continue
                        allocation = reason or _allocation(job, home.settle())
                        if not isinstance(allocation, str):
                            # The handlers come before the claim: from then on `cancel` signals this
                            # process, and the default action of SIGUSR1 would kill it.
                            run = _Run(home, job)
                            job.claim(*allocation)
                            return run
                        job.wait_for(allocation)
                        break
            if reason == _BEHIND:
                line.wait()
            else:
                time.sleep(_LOOK_SECONDS)
    return None


def _obstacle(home: Home, job: LocalJob, line: Line) -> str:
    """Return why a job cannot start, however much room there is; empty if it is the next one."""
    request = job.request
    met = {_met(home, job_id, end) for job_id, end in request.after}
    # False before None: one dependency that has failed decides, even while others are still open.
    reason = _NEVER_MET if False in met else "Dependency" if None in met else ""
    running = sum(task.has_slots for task in home.jobs_of(job.submission))
    if request.limit and running >= request.limit:
        reason = reason or f"Priority: the array runs {counted(request.limit, 'task')} at once"
    if reason:
        line.leave()  # it must not block those behind it: it could not start on an idle machine
        return reason
    return "" if line.is_first() else _BEHIND


def _met(home: Home, job_id: str, end: str) -> bool | None:
    """Return whether a dependency is met; None if that is still open."""
    states = [job.state for job in home.find(job_id)]
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


class _Signals:
    """The signals that this process received, through the interpreter's wake-up pipe."""

    def __init__(self) -> None:
        # A wake-up pipe instead of work in handlers: a signal that arrives just before select()
        # still ends it, and no handler runs in the middle of a record's write.
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> set[int]:
        """Wait for a signal and return all that arrived."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        return set(os.read(self._read, 4096)) if ready else set()


class _Run:
    """One job from its first process to its last."""

    def __init__(self, home: Home, job: LocalJob) -> None:
        self.home = home
        self.job = job
        self.signals = _Signals()
        self.shell = Identity(0, 0)
        self.status: int | None = None
        self.ending: tuple[JobState, str] | None = None
        self.limit_at = self.kill_at = _NEVER  # a laptop's sleep does not count

    def until_over(self) -> None:
        """Run the job and record its end."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        problem = self._start()
        if problem:
            self._record(JobState.FAILED, 1, 0, problem)
            return
        self.limit_at = time.monotonic() + self.job.request.needs.seconds
        while self.status is None:
            deadline = self.limit_at if self.ending is None else self.kill_at
            pause = max(deadline - time.monotonic(), _PAUSE_SECONDS)
            received = self.signals.wait(min(pause, _MAX_PAUSE_SECONDS))
            self._reap()
            if self.status is None:
                self._act(received, time.monotonic())
            else:
                # A script that requeues itself and ends at once sends both signals in one moment.
                # Read what is left, or the requeue would be lost.
                self._change(received | self.signals.wait(0.0))
        left = self._end_leftovers()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)
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
        if state is JobState.REQUEUED:
            with self.home.lock():  # `cancel` holds it while it chooses which processes to signal
                self._change(self.signals.wait(0.0))
                if self.ending == (state, reason):
                    self._record(state, code, number, reason)
                    return
            state, reason = JobState.CANCELLED, "cancelled"
        self._record(state, code, number, reason)

    def _act(self, received: set[int], now: float) -> None:
        self._change(received)
        if self.ending is not None and self.kill_at == _NEVER:
            self._end(*self.ending)
        elif self.ending is not None:
            if now >= self.kill_at:
                self._send(signal.SIGKILL)
        elif signal.SIGUSR1 in received:
            self._end(JobState.CANCELLED, "cancelled")
        elif signal.SIGTERM in received:
            self._end(JobState.NODE_FAIL, "the job's supervisor received a signal to stop")
        elif now >= self.limit_at:
            self._end(JobState.TIMEOUT, "TimeLimit")

    def _change(self, received: set[int]) -> None:
        """Record that the job is requeued; a time limit does not undo that, a cancellation does.

        The request may come from a script that has ended since.
        """
        state = self.ending[0] if self.ending else None
        if signal.SIGUSR1 in received and state is JobState.REQUEUED:
            self.ending = (JobState.CANCELLED, "cancelled")
        elif signal.SIGUSR2 in received and state in (None, JobState.TIMEOUT):
            self.ending = (JobState.REQUEUED, "requeued")

    def _start(self) -> str:
        """Start the script; return why that failed, or nothing."""
        script = os.path.join(self.job.request.directory, "job.sh")
        path = self.job.output
        try:
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            return f"cannot open the output file {path}: {error.strerror}"
        if not os.path.isfile(script):
            os.close(output)
            return f"{script} is gone"
        parent = os.getpid()
        # Block the signals over the fork: until its exec the child has our handlers and our pipe,
        # and a cancellation sent to it would vanish in them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        pid = os.fork()
        if pid == 0:
            self._become_script(script, output, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os.close(output)
        self.shell = identity(pid)
        return ""

    def _become_script(self, script: str, output: int, parent: int) -> NoReturn:
        request = self.job.request
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            # The parent may have died before prctl took effect; then no death signal would ever
            # come.
            if os.getppid() != parent:
                os._exit(_CANNOT_EXECUTE)
            # Ignored signals stay ignored across exec, and Python ignores SIGPIPE and SIGXFSZ: the
            # script would behave differently from one that a shell starts.
            for number in _HANDLED | _IGNORED | {signal.SIGXFSZ}:
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.job.status.cpus)
            null = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.umask(request.umask)
            os.chdir(request.directory)
            environment = self._environment(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execvpe("bash", ["bash", script], environment)  # noqa: S606 - it is the shell
        except BaseException as error:  # noqa: BLE001 - the child must not continue as a supervisor
            os.write(2, f"hpml: the script could not be started: {error}\n".encode())
        finally:
            os._exit(_CANNOT_EXECUTE)

    def _environment(self, supervisor: int) -> dict[str, str]:
        directory = self.job.directory
        steps = directory / f"steps-{self.job.position}"
        steps.mkdir(exist_ok=True)
        entries = (directory / "environment").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
        environment = {name: value for name, _, value in pairs}
        environment.setdefault("TMPDIR", tempfile.gettempdir())
        environment |= slurm_variables(self.job, self.home.cluster)
        environment["PATH"] = f"{directory / 'bin'}:{environment.get('PATH', os.defpath)}"
        environment["SLURM_TASK_PID"] = str(os.getpid())
        environment["HPML_LOCAL_STEPS"] = str(steps)
        environment["HPML_LOCAL_SUPERVISOR_PID"] = str(supervisor)
        environment["HPML_LOCAL_KILL_WAIT"] = f"{self.job.request.kill_wait_seconds:g}"
        return environment

    def _end(self, state: JobState, reason: str) -> None:
        """Begin to end the job and write the reason into its output, as slurmstepd does."""
        self.ending = (state, reason)
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
        for who in sorted(self._members(), key=lambda who: (who.start, who.pid)):
            send(who, number)

    def _members(self) -> set[Identity]:
        members = descendants(os.getpid())
        if self.status is None:
            members.add(self.shell)  # before its exec it still looks like a supervisor
        return members

    def _reap(self) -> None:
        """Reap all children that have ended; orphans of the job are children too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell.pid and self.status is None:
                    self.status = os.waitstatus_to_exitcode(ended[1])

    def _end_leftovers(self) -> list[int]:
        """End what the script left behind, first by TERM; return the pids that survive."""
        if self._members() and self.kill_at == _NEVER:
            self._terminate("")
        while time.monotonic() < self.kill_at and self._members():
            self.signals.wait(_PAUSE_SECONDS)
            self._reap()
        return kill_until_gone(
            self._members, patience_seconds=_KILL_PATIENCE_SECONDS, reap=self._reap
        )

    def _record(self, state: JobState, code: int, number: int, reason: str) -> None:
        """Record the end; on a full disk, retry until there is room."""
        ended, began = time.time(), time.monotonic()
        while True:
            try:
                if state is JobState.REQUEUED:
                    self.job.requeue()
                    return
                self.job.save(
                    replace(
                        self.job.status,
                        state=state,
                        ended=ended,
                        exit_code=code,
                        signal=number,
                        reason=reason,
                    )
                )
            except RecordError as error:
                # The end exists nowhere else. Exiting now would have the next query call the job
                # lost, so keep trying for ten minutes unless the machine shuts down.
                late = time.monotonic() - began > _RECORD_PATIENCE_SECONDS
                if late or signal.SIGTERM in self.signals.wait(_RECORD_PAUSE_SECONDS):
                    sys.exit(f"the end of job {self.job.job_id} ({state}) is not recorded: {error}")
            else:
                return
