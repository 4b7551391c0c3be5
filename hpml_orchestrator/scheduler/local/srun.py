"""`srun` of the local backend: runs the tasks of a step on this machine.

It accepts the options that hpml's scripts write, as `--name=value`, and refuses all others.
It uses the standard library only, with few imports, and is copied into each job's directory; it
starts in about 30 ms.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_KILL = "kill-on-bad-exit"
_NUMBERS = {"nodes", "ntasks", "ntasks-per-node", "wait", _KILL}
_NOTHING = {"cpu-bind", "export", "mpi", "overlap"}  # they mean nothing on one node
_SIZES = (
    "SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE"
).split()

_USAGE_ERROR = 2
_FAILED_TO_START = 126
_SIGNALLED = 128
_FORWARDED = {getattr(signal, f"SIG{name}") for name in "TERM INT HUP QUIT USR1 USR2 CONT".split()}
_WATCHED = {signal.SIGCHLD, *_FORWARDED}
_NEVER = float("inf")
_POLL_SECONDS = 1.0
_MAX_KILL_WAIT_SECONDS = 5.0


class OptionError(ValueError):
    """The local backend cannot run this command line."""


def parse(argv: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Return the numbers that options give, and the command.

    Raises:
        OptionError: an unknown option, a wrong value, more than one node, or no command.

    >>> parse(["--ntasks=2", "--overlap", "hostname", "-s"])
    ({'ntasks': 2}, ['hostname', '-s'])
    """
    numbers: dict[str, int] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, _, value = word[2:].partition("=")
        known = word.startswith("--") and name in _NUMBERS | _NOTHING
        right = value.isascii() and value.isdigit() if name in _NUMBERS else value != "none,help"
        if not known or not right or (name == "export" and value != "ALL"):
            raise OptionError(f"{word}: the local backend does not know this option or value")
        if name == "nodes" and value != "1":
            raise OptionError(f"{word}: the local backend has one node")
        if name in _NUMBERS:
            numbers[name] = int(value)
    if not rest:
        raise OptionError("no command given to execute")
    return numbers, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a step and return the highest exit status of its tasks, 128 + signal for a killed one."""
    try:
        step = _Step(*parse(sys.argv[1:] if argv is None else argv))
    except OptionError as error:
        _error(str(error))
        return _USAGE_ERROR
    return step.run()


def _error(text: str) -> None:
    os.write(2, f"srun: error: {text}\n".encode("utf-8", "surrogateescape"))


class _Task:
    """One task: a process that leads its own group."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.status: int | None = None

    def has_just_ended(self) -> bool:
        """Return whether it ended since the last call; it stays a zombie, which keeps its pid."""
        if self.status is not None:
            return False
        # WNOWAIT leaves a zombie. As long as it exists, its pid and so its process group cannot be
        # given to a stranger, and killpg stays safe.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return False
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else _SIGNALLED + result.si_status
        return True

    def send(self, number: int) -> None:
        """Signal the task and everything that is left in its process group."""
        try:  # noqa: SIM105 - contextlib costs a quarter of the start
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class _Step:
    """The tasks of one srun."""

    def __init__(self, options: dict[str, int], command: list[str]) -> None:
        self.options = options
        self.command = command
        count = options.get("ntasks") or options.get("ntasks-per-node")
        self.ntasks = count or int(os.environ.get("SLURM_NTASKS", "1"))
        self.host = os.environ.get("SLURMD_NODENAME", "localhost")
        self.step_id = _claim_step()
        self.tasks: list[_Task] = []
        self.kill_at = self.term_at = _NEVER
        asked = float(os.environ.get("HPML_LOCAL_KILL_WAIT", _MAX_KILL_WAIT_SECONDS))
        self.kill_wait = min(asked, _MAX_KILL_WAIT_SECONDS)
        self.supervisor = int(os.environ.get("HPML_LOCAL_SUPERVISOR_PID", "0"))

    def run(self) -> int:
        """Start the tasks, wait until all have ended, and return the status of the step."""
        # If SIGCHLD is ignored, which a shell may pass on, the kernel reaps the children itself and
        # no status is left to wait for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Blocked signals are fetched by sigtimedwait, so that none is lost between two waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            for rank in range(self.ntasks):
                self.tasks.append(_Task(rank, self._fork(rank)))
        except OSError as error:
            _error(f"cannot start task {len(self.tasks)}: {error.strerror}")
            self._send(signal.SIGKILL)
            return _FAILED_TO_START
        while any(task.status is None for task in self.tasks):
            self._wait()
            for task in self.tasks:
                if task.has_just_ended():
                    self._task_ended(task)
            self._end_when_due()
        for task in self.tasks:
            task.send(signal.SIGKILL)  # what it left behind; a step ends with its tasks
            os.waitpid(task.pid, 0)
        return max(task.status or 0 for task in self.tasks)

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_task(rank)
        try:  # noqa: SIM105 - as above
            os.setpgid(pid, pid)  # both sides do it: neither waits for the other
        except OSError:
            pass
        return pid

    def _become_task(self, rank: int) -> NoReturn:
        try:
            os.setpgid(0, 0)
            if rank:  # standard input is task 0's
                os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            for number in (*_WATCHED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.execvpe(self.command[0], self.command, self._environment(rank))  # noqa: S606
        except OSError as error:
            _error(f"execve(): {self.command[0]}: {error.strerror}")
            os._exit(error.errno or errno.ENOENT)
        finally:
            os._exit(_FAILED_TO_START)

    def _environment(self, rank: int) -> dict[str, str]:
        ranks = ",".join(str(number) for number in range(self.ntasks))
        values: dict[str, object] = {
            **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), rank),
            **dict.fromkeys(("SLURM_STEP_ID", "SLURM_STEPID"), self.step_id),
            **dict.fromkeys(_SIZES, self.ntasks),
            "SLURM_NODEID": 0,
            "SLURM_NNODES": 1,
            "SLURM_STEP_NUM_NODES": 1,
            "SLURM_STEP_NODELIST": self.host,
            "SLURM_GTIDS": ranks,
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_TASK_PID": os.getpid(),
        }
        if "ntasks-per-node" in self.options:
            values["SLURM_NTASKS_PER_NODE"] = self.ntasks
        return {**os.environ, **{name: str(value) for name, value in values.items()}}

    def _wait(self) -> None:
        pause = min(self.term_at, self.kill_at) - time.monotonic()
        received = signal.sigtimedwait(_WATCHED, max(0.0, min(pause, _POLL_SECONDS)))
        while received is not None:
            # The job's supervisor signals the tasks itself. Besides, after this process was stopped
            # for a while, Python may return signals that nobody sent, with any number.
            if received.si_signo in _FORWARDED and received.si_pid != self.supervisor:
                self._send(received.si_signo)
            received = signal.sigtimedwait(_WATCHED, 0)

    def _task_ended(self, task: _Task) -> None:
        now = time.monotonic()
        if task.status:
            how = f"Exited with exit code {task.status}"
            if task.status > _SIGNALLED:
                number = task.status - _SIGNALLED
                how = signal.strsignal(number) or f"Signal {number}"
            _error(f"{self.host}: task {task.rank}: {how}")
        if task.status and self.options.get(_KILL):
            self.term_at = min(self.term_at, now)
        # --wait counts from the first task that ends, whatever its status, and kills without
        # SIGTERM.
        elif seconds := self.options.get("wait"):
            self.kill_at = min(self.kill_at, now + seconds)

    def _end_when_due(self) -> None:
        now = time.monotonic()
        if now >= self.term_at:
            self.term_at = _NEVER
            self.kill_at = min(self.kill_at, now + self.kill_wait)
            # A stopped task acts on SIGTERM only once it continues.
            self._send(signal.SIGCONT)
            self._send(signal.SIGTERM)
        if now >= self.kill_at:
            self.kill_at = _NEVER
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for task in self.tasks:
            if task.status is None:
                task.send(number)


def _claim_step() -> int:
    """Return the next step id of the job: each srun makes a file of that name."""
    steps = os.environ.get("HPML_LOCAL_STEPS")
    if not steps:
        return 0
    number = 0
    try:
        # O_EXCL makes the number a claim: several sruns of one script may start at the same time.
        while True:
            try:
                os.close(os.open(f"{steps}/{number}", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                number += 1
            else:
                return number
    except OSError as error:
        raise OptionError(f"cannot claim a step in {steps}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
