"""`srun` of the local backend: runs the tasks of a step on this machine.

It accepts the options that hpml's scripts write, as `--name=value`, and refuses all others.
It is copied into each job's directory and uses only the standard library, with few imports, so
that it starts in about 30 ms.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than everything else
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_KILL = "kill-on-bad-exit"
_NUMBERS = {"nodes", "ntasks", "ntasks-per-node", "wait", _KILL}
_NOTHING = {"cpu-bind", "export", "mpi", "overlap"}  # meaningless on one node
_SIZES = (
    "SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_STEP_NUM_TASKS "
    "SLURM_STEP_TASKS_PER_NODE"
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
    """Return the numbers that options set, and the command.

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
        numbers, command = parse(sys.argv[1:] if argv is None else argv)
        step = _claim_step()
    except OptionError as error:
        _error(str(error))
        return _USAGE_ERROR
    count = numbers.get("ntasks") or numbers.get("ntasks-per-node")
    count = count or int(os.environ.get("SLURM_NTASKS", "1"))
    # A shell may pass on an ignored SIGCHLD. The kernel then reaps the children itself and leaves
    # no status to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Block the signals and fetch them with sigtimedwait, so that none is lost between two waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    tasks: list[_Task] = []
    try:
        tasks.extend(_Task(n, _environment(n, count, step), command) for n in range(count))
    except OSError as error:
        _error(f"cannot start task {len(tasks)}: {error.strerror}")
        _send(tasks, signal.SIGKILL)
        return _FAILED_TO_START
    _wait_for(tasks, kill=numbers.get(_KILL, 0) > 0, wait=numbers.get("wait", 0))
    for task in tasks:
        task.send(signal.SIGKILL)  # kill leftovers: a step ends with its tasks
        os.waitpid(task.pid, 0)
    return max(task.status or 0 for task in tasks)


def _error(text: str) -> None:
    os.write(2, f"srun: error: {text}\n".encode("utf-8", "surrogateescape"))


class _Task:
    """One task: a process that leads its own group."""

    def __init__(self, rank: int, environment: dict[str, str], command: list[str]) -> None:
        self.rank = rank
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(environment, command)
        try:  # noqa: SIM105 - contextlib costs a quarter of the start
            os.setpgid(self.pid, self.pid)  # parent and child both call this, so neither waits
        except OSError:
            pass

    def _become(self, environment: dict[str, str], command: list[str]) -> NoReturn:
        try:
            os.setpgid(0, 0)
            if self.rank:  # standard input is task 0's
                os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            for number in (*_WATCHED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            environment["SLURM_TASK_PID"] = str(os.getpid())
            os.execvpe(command[0], command, environment)  # noqa: S606 - the task's own
        except OSError as error:
            _error(f"execve(): {command[0]}: {error.strerror}")
            os._exit(error.errno or errno.ENOENT)
        finally:
            os._exit(_FAILED_TO_START)

    def has_just_ended(self) -> bool:
        """Return whether it ended since the last call; its zombie reserves the pid."""
        if self.status is not None:
            return False
        # WNOWAIT leaves a zombie. As long as it exists, its pid and process group cannot be reused,
        # so killpg is safe.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return False
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else _SIGNALLED + result.si_status
        if self.status:
            how = f"Exited with exit code {self.status}"
            if not exited:
                how = signal.strsignal(result.si_status) or f"Signal {result.si_status}"
            host = os.environ.get("SLURMD_NODENAME", "localhost")
            _error(f"{host}: task {self.rank}: {how}")
        return True

    def send(self, number: int) -> None:
        """Signal the task and everything left in its process group."""
        try:  # noqa: SIM105 - as above
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def _send(tasks: Sequence[_Task], *numbers: int) -> None:
    for number in numbers:
        for task in tasks:
            if task.status is None:
                task.send(number)


def _wait_for(tasks: Sequence[_Task], *, kill: bool, wait: int) -> None:
    """Wait until all tasks have ended; forward signals, and kill tasks that are late."""
    supervisor = int(os.environ.get("HPML_LOCAL_SUPERVISOR_PID", "0"))
    asked = float(os.environ.get("HPML_LOCAL_KILL_WAIT", _MAX_KILL_WAIT_SECONDS))
    told, kill_at = False, _NEVER
    while any(task.status is None for task in tasks):
        pause = max(0.0, min(kill_at - time.monotonic(), _POLL_SECONDS))
        while (received := signal.sigtimedwait(_WATCHED, pause)) is not None:
            pause = 0
            # The job's supervisor signals the tasks itself. Also, after this process was stopped
            # for a while, Python may return signals that nobody sent, with any number.
            if received.si_signo in _FORWARDED and received.si_pid != supervisor:
                _send(tasks, received.si_signo)
        for task in tasks:
            if not task.has_just_ended():
                continue
            if task.status and kill and not told:
                told = True
                kill_at = min(kill_at, time.monotonic() + min(asked, _MAX_KILL_WAIT_SECONDS))
                # A stopped task handles SIGTERM only after it continues.
                _send(tasks, signal.SIGCONT, signal.SIGTERM)
            # --wait counts from the first task that ends, whatever its status, and kills without
            # SIGTERM.
            elif wait:
                kill_at = min(kill_at, time.monotonic() + wait)
        if time.monotonic() >= kill_at:
            kill_at = _NEVER
            _send(tasks, signal.SIGKILL)


def _environment(rank: int, count: int, step: int) -> dict[str, str]:
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), rank),
        **dict.fromkeys(("SLURM_STEP_ID", "SLURM_STEPID"), step),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), 1),
        **dict.fromkeys(_SIZES, count),
        "SLURM_NODEID": 0,
        "SLURM_STEP_NODELIST": os.environ.get("SLURMD_NODENAME", "localhost"),
        "SLURM_GTIDS": ",".join(map(str, range(count))),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    return {**os.environ, **{name: str(value) for name, value in values.items()}}


def _claim_step() -> int:
    """Return the next step id of the job: each srun creates a file of that name."""
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
