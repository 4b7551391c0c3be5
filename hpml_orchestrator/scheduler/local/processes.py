"""Processes by identity (pid and start time), their descendants, and how to end all of a job's."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "SUPERVISOR_MARK",
    "Identity",
    "Process",
    "descendants",
    "die_with_parent",
    "environment_of",
    "identity",
    "is_alive",
    "is_supervisor",
    "kill_until_gone",
    "marked",
    "processes",
    "send",
    "set_subreaper",
]

# Name of the variable that marks a supervisor: it is never a part of the job around it.
SUPERVISOR_MARK = b"HPML_LOCAL_SUPERVISOR="

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Identity:
    """A process that cannot be taken for another one: pid and start time in clock ticks."""

    pid: int
    start: int


@dataclass(frozen=True)
class Process:
    """One line of the process table; `state` is the letter of /proc/<pid>/stat."""

    pid: int
    parent: int
    session: int
    start: int
    state: str

    @property
    def identity(self) -> Identity:
        """Pid and start time."""
        return Identity(self.pid, self.start)


def identity(pid: int) -> Identity:
    """Return the identity of a running process.

    Raises:
        ProcessLookupError: there is none of that pid.
    """
    process = _read(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return process.identity


def is_alive(who: Identity) -> bool:
    """Return whether that very process still runs; a zombie does not."""
    process = _read(who.pid)
    return process is not None and process.start == who.start and process.state not in "ZX"


def processes() -> dict[int, Process]:
    """Return every process of this machine that is no zombie, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            process = _read(int(name))
            if process is not None and process.state not in "ZX":
                found[process.pid] = process
    return found


def environment_of(pid: int) -> list[bytes]:
    """Return the variables that a process was started with; none where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def descendants(root: int, table: dict[int, Process]) -> set[Identity]:
    """Return all processes below `root`, without other supervisors and what is below those."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: set[Identity] = set()
    open_ends = [root]
    while open_ends:
        for process in children.get(open_ends.pop(), ()):
            if process.identity not in found and not is_supervisor(process.pid):
                found.add(process.identity)
                open_ends.append(process.pid)
    return found


def marked(job_id: str, cluster: str, table: dict[int, Process]) -> set[Identity]:
    """Return the processes that carry the job's id and cluster in their environment."""
    wanted = {
        b"SLURM_JOB_ID=" + os.fsencode(job_id),
        b"SLURM_CLUSTER_NAME=" + os.fsencode(cluster),
    }
    return {
        process.identity
        for process in table.values()
        if wanted <= set(environment_of(process.pid)) and process.pid != os.getpid()
    }


def is_supervisor(pid: int) -> bool:
    """Return whether a process is a supervisor of the local backend."""
    return any(entry.startswith(SUPERVISOR_MARK) for entry in environment_of(pid))


def send(who: Identity, number: int) -> bool:
    """Send a signal to that very process; return whether it was still there."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3, or a filter: the small race is all that is left
        return is_alive(who) and _kill(who.pid, number)
    try:
        if not is_alive(who):
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def kill_until_gone(
    find: Callable[[], Iterable[Identity]],
    *,
    patience_seconds: float,
    reap: Callable[[], None] = lambda: None,
) -> list[int]:
    """SIGKILL what `find` returns until it returns nothing; return the pids that stay."""
    until = time.monotonic() + patience_seconds
    while True:
        late = time.monotonic() > until  # before the look: this process may be stopped after it
        left = list(find())
        if not left:
            return []
        for who in left:
            send(who, signal.SIGKILL)
        reap()
        if late:
            return sorted(who.pid for who in left)
        time.sleep(_PAUSE_SECONDS)


def set_subreaper(on: bool) -> None:
    """Make orphans below this process its children, or no longer."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call prctl; where it fails, the environment marks alone tell a job's processes."""
    import ctypes  # noqa: PLC0415 - 10 ms that only a supervisor with a job to run pays

    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            text = stream.read()
    except OSError:
        return None
    # The command name stands in parentheses and may hold blanks and parentheses itself.
    fields = text[text.rfind(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        state=fields[0].decode(),
    )
