"""The process that waits for slots, runs one local job, and writes down how it ended.

Started by `local_jobs.Home` as a daemon of its own session. What the job leaves behind stays below
this process (it is a child subreaper) and is ended with the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.owner import boot_id
from hpml_orchestrator.scheduler.local.jobs import Home, Job, Locks, poke
from hpml_orchestrator.scheduler.local.processes import (
    Identity,
    descendants,
    die_with_parent,
    environment_of,
    identity,
    kill_until_gone,
    marked,
    processes,
    send,
    set_subreaper,
)
from hpml_orchestrator.scheduler.local.queue import Queue
from hpml_orchestrator.scheduler.local.resources import slurm_variables
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_WATCHED = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM}
_BLOCKED = _WATCHED | {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR2}
_FIRST_POLL_SECONDS = 1.0
_LATER_POLL_SECONDS = 5.0
_RUN_POLL_SECONDS = 5.0
_LEFT_POLL_SECONDS = 0.1
_KILL_PATIENCE_SECONDS = 10.0
_RECORD_PATIENCE_SECONDS = 600.0
_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 15.0
_CANNOT_EXECUTE = 126


def main(argv: Sequence[str]) -> int:
    """Supervise one job: `<home> <directory of locks> <job id>`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    home = Home(Path(argv[0]), Locks(Path(argv[1])))
    job = _claim(home, argv[2])
    if job is None:
        return 0
    if _wait_for_slots(home, job):
        set_subreaper(True)
        _Run(job).until_over()
        set_subreaper(False)  # supervisors started below are nobody's leftovers
    _wake_next(home)
    return 0


def _claim(home: Home, job_id: str) -> Job | None:
    """Become the one supervisor of a waiting job; None when there is one or it does not wait."""
    with home.lock():
        job = home.load(job_id)
        if job is None or job.state is not JobState.PENDING or job.supervisor is not None:
            return None
        me = identity(os.getpid())
        job.write(supervisor={"pid": me.pid, "start": me.start, "boot": boot_id()})
    answer = Path(job.record["directory"]) / "sbatch.out"
    if not answer.exists() and answer.parent.is_dir():
        with contextlib.suppress(HpmlError):
            write_text(answer, f"{job.array_id or job_id}\n")
    return job


def _wait_for_slots(home: Home, job: Job) -> bool:
    """Wait in line; return whether the job is to run now (False: it was cancelled meanwhile)."""
    while True:
        pause = _FIRST_POLL_SECONDS
        # What fails here (a full disk, no process to be had) may pass: the line is kept.
        with contextlib.suppress(HpmlError, OSError), home.lock():
            jobs = home.heal()
            mine = [other for other in jobs if other.job_id == job.job_id]
            if not mine:
                return False
            job.record = mine[0].record
            if job.holds_slots:  # written, though the write was reported as failed
                return True
            got = Queue(jobs).starts(job)
            if not isinstance(got, str):
                cpus, gpus = got
                job.write(state=JobState.RUNNING, started=time.time(), cpus=cpus, gpus=gpus)
                _poke_first(home)
                return True
            if got.startswith("Priority"):
                pause = _LATER_POLL_SECONDS
        received = signal.sigtimedwait(_WATCHED, pause)
        if received is not None and received.si_signo == signal.SIGTERM:
            sys.exit(0)  # the job keeps waiting; the next call of hpml starts another supervisor


def _wake_next(home: Home) -> None:
    """Give the slots to whoever is next."""
    with contextlib.suppress(HpmlError, OSError):
        with home.lock():
            home.heal()
        _poke_first(home)


def _poke_first(home: Home) -> None:
    waiting = Queue(home.active()).line
    if waiting:
        poke(waiting[0], send, signal.SIGUSR1)


class _Run:
    """One job from its first process to its last."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kill_wait: float = job.record["kill_wait_seconds"]
        self.shell: Identity | None = None
        self.status: int | None = None
        self.ending: tuple[JobState, str] | None = None
        self.kill_at = float("inf")
        began = time.monotonic()  # does not count while a laptop sleeps
        asked = job.record["directives"]
        limit = asked["time_limit_seconds"]
        self.limit_at = float("inf") if limit is None else began + limit
        self.warning: Any = asked["stop_signal"] if limit is not None else None
        self.warn_at = self.limit_at - self.warning["seconds"] if self.warning else float("inf")

    def until_over(self) -> None:
        """Run the job and record its end."""
        problem = self._start()
        if problem:
            self._record(JobState.FAILED, 1, 0, problem)
            return
        while self.status is None:
            self._step()
            if self.status is None:
                self._sleep()
        left = self._end_leftovers()
        code, number = (self.status, 0) if self.status >= 0 else (0, -self.status)
        if self.ending is not None:
            state, reason = self.ending
        elif number:
            state, reason = JobState.FAILED, f"RaisedSignal:{number}({signal.strsignal(number)})"
        elif code:
            state, reason = JobState.FAILED, "NonZeroExitCode"
        else:
            state, reason = JobState.COMPLETED, ""
        if left:
            reason = f"{reason or 'ended'}; processes that could not be ended: {left}"
        self._record(state, code, number, reason)

    def _start(self) -> str:
        """Start the script; return what is in the way, or nothing."""
        record = self.job.record
        script = os.path.join(record["directory"], "job.sh")
        try:
            output = os.open(record["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            return f"cannot open the output file {record['output']}: {error.strerror}"
        if not os.path.isfile(script):
            os.close(output)
            return f"{script} is gone"
        gate, opener = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(opener)
            self._become_script(script, output, gate, parent)
        os.close(gate)
        os.close(output)
        self.shell = identity(pid)
        # Nothing of the job runs before its pid is written down.
        with contextlib.suppress(HpmlError):
            self.job.write(batch={"pid": pid, "start": self.shell.start})
        os.write(opener, b"g")
        os.close(opener)
        return ""

    def _become_script(self, script: str, output: int, gate: int, parent: int) -> NoReturn:
        record = self.job.record
        try:
            os.setsid()
            die_with_parent()
            for number in _BLOCKED | {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM}:
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, record["cpus"])
            null = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.umask(record["umask"])
            os.chdir(record["directory"])
            environment = self._environment()
            if os.read(gate, 1) != b"g" or os.getppid() != parent:
                os._exit(_CANNOT_EXECUTE)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            bash = "/bin/bash" if os.path.exists("/bin/bash") else "bash"
            os.execvpe(bash, ["bash", script], environment)  # noqa: S606 - it is the shell
        except BaseException as error:  # noqa: BLE001 - the child must not go on as a supervisor
            os.write(2, f"hpml: the script could not be started: {error}\n".encode())
        finally:
            os._exit(_CANNOT_EXECUTE)

    def _environment(self) -> dict[str, str]:
        record = self.job.record
        body = (self.job.directory / "environment").read_bytes()
        entries = (entry.partition(b"=") for entry in body.split(b"\0") if entry)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
        environment |= slurm_variables(
            record, cpus=record["cpus"], gpus=record["gpus"], started=record["started"]
        )
        path = environment.get("PATH", os.defpath)
        environment["PATH"] = f"{self.job.directory / 'bin'}:{path}"
        environment["SLURM_TASK_PID"] = str(os.getpid())
        environment["HPML_LOCAL_JOB"] = str(self.job.directory)
        environment["HPML_LOCAL_SIGNALLER"] = str(os.getppid())
        environment["HPML_LOCAL_KILL_WAIT"] = f"{self.kill_wait:g}"
        return environment

    def _step(self) -> None:
        now = time.monotonic()
        if self.ending is None:
            if self.job.cancelled:
                self._begin_end(JobState.CANCELLED, "cancelled")
            elif now >= self.limit_at:
                self._begin_end(JobState.TIMEOUT, "TimeLimit")
            elif now >= self.warn_at:
                self.warn_at = float("inf")
                self._warn()
        elif now >= self.kill_at:
            for who in self._members():
                send(who, signal.SIGKILL)

    def _begin_end(self, state: JobState, reason: str) -> None:
        self.ending = (state, reason)
        self.kill_at = time.monotonic() + self.kill_wait
        with contextlib.suppress(HpmlError):
            self.job.write(state=JobState.COMPLETING, reason=reason)
        self._tell_output(state)
        self._terminate()

    def _tell_output(self, state: JobState) -> None:
        """Say in the job's output why it is ended, as slurmstepd does."""
        record = self.job.record
        why = {JobState.TIMEOUT: " DUE TO TIME LIMIT", JobState.NODE_FAIL: " DUE TO NODE FAILURE"}
        line = (
            f"hpml: *** JOB {self.job.job_id} ON {os.uname().nodename} CANCELLED AT "
            f"{time.strftime('%Y-%m-%dT%H:%M:%S')}{why.get(state, '')} ***\n"
        )
        with contextlib.suppress(OSError), open(record["output"], "a", encoding="utf-8") as output:
            output.write(line)

    def _terminate(self) -> None:
        # Oldest first: a script must not go on to its next command because this one was ended.
        members = sorted(self._members(), key=lambda who: (who.start, who.pid))
        for number in (signal.SIGCONT, signal.SIGTERM):
            for who in members:
                send(who, number)

    def _warn(self) -> None:
        if self.warning["batch_shell_only"]:
            if self.shell is not None:
                send(self.shell, self.warning["number"])
            return
        for who in self._members():
            if any(entry.startswith(b"SLURM_STEP_ID=") for entry in environment_of(who.pid)):
                send(who, self.warning["number"])

    def _sleep(self) -> None:
        until = min(self.limit_at, self.warn_at) if self.ending is None else self.kill_at
        pause = max(_LEFT_POLL_SECONDS, until - time.monotonic())
        received = signal.sigtimedwait(_WATCHED, min(pause, _RUN_POLL_SECONDS))
        if received is not None and received.si_signo == signal.SIGTERM and self.ending is None:
            self._begin_end(JobState.NODE_FAIL, "the job's supervisor was told to stop")
        self._reap()

    def _reap(self) -> None:
        """Collect every child that ended; orphans of the job are children too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.shell is not None and pid == self.shell.pid and self.status is None:
                self.status = os.waitstatus_to_exitcode(status)

    def _members(self) -> set[Identity]:
        table = processes()
        record = self.job.record
        found = descendants(os.getpid(), table)
        found |= marked(self.job.job_id, record["cluster"], table)
        if self.shell is not None and self.status is None:
            found.add(self.shell)  # before its exec it still looks like a supervisor
        return found

    def _end_leftovers(self) -> list[int]:
        """End what the script left behind, kindly first; return the pids that stay."""
        if self._members() and self.ending is None:
            self.kill_at = time.monotonic() + self.kill_wait
            with contextlib.suppress(HpmlError):
                self.job.write(state=JobState.COMPLETING)
            self._terminate()
        while time.monotonic() < self.kill_at and self._members():
            signal.sigtimedwait({signal.SIGCHLD}, _LEFT_POLL_SECONDS)
            self._reap()
        return kill_until_gone(
            self._members, patience_seconds=_KILL_PATIENCE_SECONDS, reap=self._reap
        )

    def _record(self, state: JobState, code: int, number: int, reason: str) -> None:
        """Write the end down, with patience: a full disk passes, and the result stays true."""
        ended, began = time.time(), time.monotonic()
        seen, pause = "", _FIRST_RETRY_SECONDS
        while True:
            cause = self.job.finish(
                state, ended=ended, exit_code=code, number=number, reason=reason
            )
            waited = time.monotonic() - began
            if not cause:
                if seen:
                    _log(f"the job's end was recorded {waited:.0f} s late: {seen}")
                return
            if cause != seen:
                _log(f"the job's end ({state}, {code}:{number}) cannot be recorded: {cause}")
                seen = cause
            received = signal.sigtimedwait(_WATCHED, pause)
            self._reap()
            told = received is not None and received.si_signo == signal.SIGTERM
            if told or waited > _RECORD_PATIENCE_SECONDS or not self.job.directory.exists():
                _log(f"the job's end ({state}, {code}:{number}) was not recorded: {cause}")
                return
            pause = min(pause * 2, _LAST_RETRY_SECONDS)


def _log(text: str) -> None:
    """Say something in supervisor.log, which may lie on the very disk that is full."""
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))
