"""The processes of a job: how they are recognised, signalled and ended."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.records.process import live_processes, read_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.records.process import ProcessStat

SUPERVISOR_MARK = "HPML_LOCAL_SUPERVISOR"
"""Variable in a supervisor's own environment: it is never a part of the job around it."""

_PAUSE_SECONDS = 0.02


class Identity(NamedTuple):
    """A process that cannot be taken for another one: its pid and its start in clock ticks."""

    pid: int
    start: int


def identity(pid: int) -> Identity:
    """Return the identity of a process; its start is -1 when there is none of that pid."""
    process = read_stat(pid)
    return Identity(pid, process.start_ticks if process else -1)


def is_alive(who: Identity) -> bool:
    """Return whether that very process still runs; a zombie does not."""
    process = read_stat(who.pid)
    return process is not None and process.start_ticks == who.start and not process.ended


def send(who: Identity, number: int) -> bool:
    """Send a signal to that very process; return whether it was still there."""
    try:
        if is_alive(who):
            os.kill(who.pid, number)
            return True
    except (ProcessLookupError, PermissionError):
        pass
    return False


def environment_of(pid: int) -> list[bytes]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def descendants(root: int) -> set[Identity]:
    """Return all processes below `root`, except other supervisors and what is below those."""
    children: dict[int, list[ProcessStat]] = {}
    for process in live_processes():
        children.setdefault(process.parent, []).append(process)
    members: set[Identity] = set()
    parents = [root]
    while parents:
        for process in children.get(parents.pop(), ()):
            mark = f"{SUPERVISOR_MARK}=".encode()
            if not any(entry.startswith(mark) for entry in environment_of(process.pid)):
                members.add(Identity(process.pid, process.start_ticks))
                parents.append(process.pid)
    return members


def marked(variables: Iterable[str]) -> set[Identity]:
    """Return the processes that have all these `NAME=value` in their environment."""
    wanted = {os.fsencode(variable) for variable in variables}
    return {
        Identity(process.pid, process.start_ticks)
        for process in live_processes()
        if wanted <= set(environment_of(process.pid)) and process.pid != os.getpid()
    }


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
        for who in left:
            send(who, signal.SIGKILL)
        reap()
        if not left or late:
            return sorted(who.pid for who in left)
        time.sleep(_PAUSE_SECONDS)
