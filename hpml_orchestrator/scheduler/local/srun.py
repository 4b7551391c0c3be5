"""`srun` for the local backend: start the tasks of a step on this machine.

It takes the options that hpml's scripts use and refuses every other one. What only means something
on a cluster (binding, memory, generic resources, MPI plug-in, a step's own time limit) is accepted
and does nothing. Standard library only, Python >= 3.9, few imports: it starts in some 30 ms.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # as in typing, which takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["OptionError", "Options", "main", "parse"]

_USAGE_ERROR = 2
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_WATCHED = {signal.SIGCHLD, *_FORWARDED}
_POLL_SECONDS = 1.0
_LABEL_POLL_SECONDS = 0.02
_DRAIN_SECONDS = 1.0
_SHORT_WAIT_SECONDS = 5.0
_CHUNK_BYTES = 65536
_FAILED_TO_START = 126
_SIGNALLED = 128

# Long name -> whether it takes a value ("?": only after =). What `Options` does not keep is
# accepted for the sake of the cluster and has no meaning here.
_LONG = {
    "ntasks": "=",
    "nodes": "=",
    "ntasks-per-node": "=",
    "cpus-per-task": "=",
    "overlap": "",
    "exact": "",
    "export": "=",
    "cpu-bind": "=",
    "gpu-bind": "=",
    "mem": "=",
    "mem-bind": "=",
    "mem-per-cpu": "=",
    "mpi": "=",
    "kill-on-bad-exit": "?",
    "wait": "=",
    "label": "",
    "output": "=",
    "error": "=",
    "job-name": "=",
    "unbuffered": "",
    "time": "=",
    "gres": "=",
    "gpus": "=",
    "gpus-per-node": "=",
    "gpus-per-task": "=",
    "gpus-per-socket": "=",
    "signal": "=",
    "distribution": "=",
    "chdir": "=",
    "quiet": "",
}
_SHORT = {
    "n": "ntasks",
    "N": "nodes",
    "c": "cpus-per-task",
    "K": "kill-on-bad-exit",
    "W": "wait",
    "l": "label",
    "o": "output",
    "e": "error",
    "J": "job-name",
    "u": "unbuffered",
    "t": "time",
    "G": "gpus",
    "m": "distribution",
    "D": "chdir",
    "Q": "quiet",
}


class OptionError(ValueError):
    """The command line is not one that this srun can honour."""


class Options:
    """What a command line asks for; None where it leaves something to the job."""

    def __init__(self) -> None:
        self.ntasks: int | None = None
        self.ntasks_per_node: int | None = None
        self.cpus_per_task: int | None = None
        self.kill_on_bad_exit = False
        self.wait_seconds = 0
        self.label = False
        self.output = ""
        self.error = ""
        self.job_name = ""
        self.chdir = ""
        self.quiet = False
        self.command: list[str] = []


def parse(argv: Sequence[str]) -> Options:
    """Read the options up to the command.

    Raises:
        OptionError: an option that is not known here, a wrong value, more than one node, or no
            command.

    >>> options = parse(["-n2", "--label", "hostname", "-s"])
    >>> options.ntasks, options.command
    (2, ['hostname', '-s'])
    """
    options = Options()
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            kind = _LONG.get(name)
            if kind is None:
                raise OptionError(f"unrecognized option '{word}' (local backend)")
            if equals and not kind:
                raise OptionError(f"option '--{name}' takes no value")
            if kind == "=" and not equals:
                value = _next(rest, word)
            _set(options, name, value)
        else:
            _short(options, word[1:], rest)
    if not rest:
        raise OptionError("no command given to execute")
    options.command = rest
    return options


def _short(options: Options, letters: str, rest: list[str]) -> None:
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in _SHORT:
            raise OptionError(f"invalid option -- '{letter}' (local backend)")
        name = _SHORT[letter]
        if _LONG[name] == "=":
            _set(options, name, letters or _next(rest, f"-{letter}"))
            return
        if _LONG[name] == "?" and letters[:1].isdigit():
            _set(options, name, letters)
            return
        _set(options, name, "")


def _next(rest: list[str], word: str) -> str:
    if not rest:
        raise OptionError(f"option '{word}' requires an argument")
    return rest.pop(0)


def _set(options: Options, name: str, value: str) -> None:
    _refuse(name, value)
    if name == "kill-on-bad-exit":
        options.kill_on_bad_exit = value != "0"
    elif name == "wait":
        options.wait_seconds = _number(name, value, least=0)
    elif name in ("ntasks", "ntasks-per-node", "cpus-per-task"):
        setattr(options, name.replace("-", "_"), _number(name, value))
    elif name in ("label", "quiet"):
        setattr(options, name, True)
    elif name in ("output", "error", "job-name", "chdir"):
        setattr(options, name.replace("-", "_"), value)


def _refuse(name: str, value: str) -> None:
    if name == "nodes" and _number(name, value.partition("-")[0]) > 1:
        raise OptionError(f"--nodes={value}: the local backend has one node")
    if name == "export" and value not in ("ALL", ""):
        raise OptionError(f"--export={value}: the local backend exports ALL")
    if name == "cpu-bind" and "help" in value.split(","):
        raise OptionError(f"--cpu-bind={value}: the local backend binds no tasks")


def _number(name: str, value: str, *, least: int = 1) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise OptionError(f"invalid value for --{name}: {value!r}")
    return int(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a step and return the highest exit status of its tasks, 128 + signal for a killed one."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        step = _Step(options, _task_count(options))
    except OptionError as error:
        _say(str(error))
        return _USAGE_ERROR
    return step.run()


def _task_count(options: Options) -> int:
    if options.ntasks is not None:
        return options.ntasks
    if options.ntasks_per_node is not None:
        return options.ntasks_per_node
    text = os.environ.get("SLURM_NTASKS", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else 1


def _say(text: str) -> None:
    os.write(2, f"srun: error: {text}\n".encode("utf-8", "surrogateescape"))


class _Task:
    """One task: its process, which leads its own group, and how it ended."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.status: int | None = None

    def look(self) -> bool:
        """Return whether it has ended since the last look; it stays a zombie for now.

        While it does, its number cannot become another process or group.
        """
        if self.status is not None:
            return False
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        exited = found.si_code == os.CLD_EXITED
        self.status = found.si_status if exited else _SIGNALLED + found.si_status
        return True

    def send(self, number: int) -> None:
        """Send a signal to the task and all that is left in its group."""
        try:  # noqa: SIM105 - contextlib costs a quarter of the start
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class _Step:
    """The tasks of one srun."""

    def __init__(self, options: Options, ntasks: int) -> None:
        self.options = options
        self.ntasks = ntasks
        self.step_id = _claim_step()
        self.tasks: list[_Task] = []
        self.lines: dict[int, tuple[int, bytes, bytearray]] = {}
        self.poll = select.poll()
        self.kill_at = float("inf")
        self.term_at = float("inf")
        self.kill_wait = _kill_wait()
        self.signaller = int(os.environ.get("HPML_LOCAL_SIGNALLER", "0") or 0)

    def run(self) -> int:
        """Start the tasks, wait for their end, return the status of the step."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in range(self.ntasks):
                self.tasks.append(_Task(rank, self._fork(rank)))
        except OSError as error:
            _say(f"cannot start task {len(self.tasks)}: {error.strerror}")
            for task in self.tasks:
                task.send(signal.SIGKILL)
            return _FAILED_TO_START
        while any(task.status is None for task in self.tasks):
            self._wait()
            for task in self.tasks:
                if task.look():
                    self._ended(task)
            self._keep_times()
        for task in self.tasks:
            task.send(signal.SIGKILL)  # what it left behind; a step ends with its tasks
            os.waitpid(task.pid, 0)
        self._drain()
        return max((task.status or 0) for task in self.tasks)

    def _fork(self, rank: int) -> int:
        pipes = [os.pipe() for _ in range(2)] if self.options.label else []
        pid = os.fork()
        if pid == 0:
            self._become_task(rank, [write for _, write in pipes])
        for target, (read, write) in enumerate(pipes, start=1):
            os.close(write)
            self.lines[read] = (target, b"%d: " % rank, bytearray())
            self.poll.register(read, select.POLLIN)
        try:  # noqa: SIM105 - as above
            os.setpgid(pid, pid)  # both sides do it: neither waits for the other
        except OSError:
            pass
        return pid

    def _become_task(self, rank: int, pipes: list[int]) -> NoReturn:
        try:
            try:
                os.setpgid(0, 0)
                self._redirect(rank, pipes)
                if self.options.chdir:
                    os.chdir(self.options.chdir)
                for number in _WATCHED:
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
                command = self.options.command
                os.execvpe(command[0], command, self._environment(rank))  # noqa: S606
            except OSError as error:
                _say(f"execve(): {self.options.command[0]}: {error.strerror}")
                os._exit(error.errno or errno.ENOENT)
        finally:
            os._exit(_FAILED_TO_START)

    def _redirect(self, rank: int, pipes: list[int]) -> None:
        if rank:
            _open_as(0, "/dev/null", os.O_RDONLY)
        for target, write in enumerate(pipes, start=1):
            os.dup2(write, target)
        if self.options.output:
            _open_as(1, self._file_name(self.options.output, rank))
            if not self.options.error:
                os.dup2(1, 2)
        if self.options.error:
            _open_as(2, self._file_name(self.options.error, rank))

    def _file_name(self, pattern: str, rank: int) -> str:
        if pattern == "none":
            return "/dev/null"
        values = {
            "t": str(rank),
            "n": "0",
            "s": str(self.step_id),
            "j": os.environ.get("SLURM_JOB_ID", "0"),
            "x": os.environ.get("SLURM_JOB_NAME", ""),
            "N": os.environ.get("SLURMD_NODENAME", "localhost"),
            "%": "%",
        }
        head, *parts = pattern.replace("%%", "%\0").split("%")
        found = head
        for part in parts:
            key = "%" if part[:1] == "\0" else part[:1]
            found += values[key] + part[1:] if key in values else "%" + part
        return found

    def _environment(self, rank: int) -> dict[str, str]:
        host = os.environ.get("SLURMD_NODENAME", "localhost")
        values: dict[str, object] = {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_NODEID": 0,
            "SLURM_NTASKS": self.ntasks,
            "SLURM_NPROCS": self.ntasks,
            "SLURM_NNODES": 1,
            "SLURM_STEP_ID": self.step_id,
            "SLURM_STEPID": self.step_id,
            "SLURM_STEP_NUM_TASKS": self.ntasks,
            "SLURM_STEP_NUM_NODES": 1,
            "SLURM_STEP_NODELIST": host,
            "SLURM_STEP_TASKS_PER_NODE": self.ntasks,
            "SLURM_TASKS_PER_NODE": self.ntasks,
            "SLURM_GTIDS": ",".join(str(number) for number in range(self.ntasks)),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_TASK_PID": os.getpid(),
        }
        if self.options.cpus_per_task is not None:
            values["SLURM_CPUS_PER_TASK"] = self.options.cpus_per_task
        if self.options.ntasks_per_node is not None:
            values["SLURM_NTASKS_PER_NODE"] = self.options.ntasks_per_node
        if self.options.job_name:
            values["SLURM_JOB_NAME"] = self.options.job_name
        return {**os.environ, **{name: str(value) for name, value in values.items()}}

    def _wait(self) -> None:
        """Wait for a task's end, a signal, output to label, or the time to act."""
        pause = min(self.term_at, self.kill_at) - time.monotonic()
        pause = max(0.0, min(pause, _POLL_SECONDS))
        if self.lines:  # no call of Python 3.9 waits for both: signals are looked for in between
            self._copy(min(pause, _LABEL_POLL_SECONDS))
            pause = 0.0
        received = signal.sigtimedwait(_WATCHED, pause)
        while received is not None:
            # The supervisor of a local job signals the tasks itself. And after this process was
            # stopped for a while, Python returns a signal that never was, with any number.
            if received.si_signo in _FORWARDED and received.si_pid != self.signaller:
                for task in self.tasks:
                    task.send(received.si_signo)
            received = signal.sigtimedwait(_WATCHED, 0)

    def _ended(self, task: _Task) -> None:
        now = time.monotonic()
        if task.status and not self.options.quiet:
            how = f"Exited with exit code {task.status}"
            if task.status > _SIGNALLED:
                number = task.status - _SIGNALLED
                how = signal.strsignal(number) or f"Signal {number}"
            _say(f"{os.environ.get('SLURMD_NODENAME', 'localhost')}: task {task.rank}: {how}")
        if task.status and self.options.kill_on_bad_exit:
            self.term_at = min(self.term_at, now)
        elif self.options.wait_seconds:
            self.kill_at = min(self.kill_at, now + self.options.wait_seconds)

    def _keep_times(self) -> None:
        now = time.monotonic()
        if now >= self.term_at:
            self.term_at = float("inf")
            self.kill_at = min(self.kill_at, now + self.kill_wait)
            self._send_rest(signal.SIGCONT)
            self._send_rest(signal.SIGTERM)
        if now >= self.kill_at:
            self.kill_at = float("inf")
            self._send_rest(signal.SIGKILL)

    def _send_rest(self, number: int) -> None:
        for task in self.tasks:
            if task.status is None:
                task.send(number)

    def _copy(self, seconds: float) -> None:
        """Copy what the tasks have written, whole lines at a time, each with its label."""
        for read, _ in self.poll.poll(seconds * 1000):
            target, label, held = self.lines[read]
            data = os.read(read, _CHUNK_BYTES)
            if not data:
                self.poll.unregister(read)
                os.close(read)
                del self.lines[read]
                if held:
                    _write_all(target, label + bytes(held) + b"\n")
                continue
            *lines, rest = (bytes(held) + data).split(b"\n")
            held[:] = rest
            _write_all(target, b"".join(label + line + b"\n" for line in lines))

    def _drain(self) -> None:
        """Copy what is left; a process that escaped its group cannot hold the step open."""
        until = time.monotonic() + _DRAIN_SECONDS
        late = False
        while self.lines and not late:
            late = time.monotonic() > until  # before the look: what is there by now is not lost
            self._copy(_LABEL_POLL_SECONDS)


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _open_as(target: int, path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_APPEND) -> None:
    opened = os.open(path, flags, 0o666)
    os.dup2(opened, target)


def _kill_wait() -> float:
    try:
        asked = float(os.environ.get("HPML_LOCAL_KILL_WAIT", _SHORT_WAIT_SECONDS))
    except ValueError:
        return _SHORT_WAIT_SECONDS
    return min(asked, _SHORT_WAIT_SECONDS)


def _claim_step() -> int:
    """Return the next step id of the job: one empty file each in its directory."""
    job = os.environ.get("HPML_LOCAL_JOB")
    if not job:
        return 0
    steps = os.path.join(job, "steps")
    try:
        number = max((int(name) for name in os.listdir(steps) if name.isdigit()), default=-1)
        while True:
            number += 1
            try:
                os.close(os.open(os.path.join(steps, str(number)), os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            return number
    except OSError as error:
        raise OptionError(f"cannot claim a step in {steps}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
