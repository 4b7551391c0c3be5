"""The processes of a job: how they are recognised, signalled and ended."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.records.process import environment_of, live_processes, read_stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.records.process import ProcessStat

SUPERVISOR_MARK = "HPML_LOCAL_SUPERVISOR"
"""Variable in a supervisor's own environment: it is never a part of the job around it."""

_PAUSE_SECONDS = 0.02


class Identity(NamedTuple):
    """A pid with its start time in clock ticks, which tells it from later processes of that pid."""

    pid: int
    start: int


def identity(pid: int) -> Identity:
    """Return the identity of a process; the start is -1 if no process has that pid."""
    process = read_stat(pid)
    return Identity(pid, process.start_ticks if process else -1)


def is_alive(who: Identity) -> bool:
    """Return whether that same process still runs; a zombie does not count."""
    process = read_stat(who.pid)
    return process is not None and process.start_ticks == who.start and not process.ended


def send(who: Identity, number: int) -> bool:
    """Signal that same process; return whether it was still there."""
    try:
        if is_alive(who):
            os.kill(who.pid, number)
            return True
    except (ProcessLookupError, PermissionError):
        pass
    return False


def descendants(root: int) -> set[Identity]:
    """Return all processes below `root`, except other supervisors and what is below those."""
    children: dict[int, list[ProcessStat]] = {}
    for process in live_processes():
        children.setdefault(process.parent, []).append(process)
    members: set[Identity] = set()
    parents = [root]
    while parents:
        for process in children.get(parents.pop(), ()):
            # A job may submit jobs. Their supervisors descend from it, but they outlive it, as
            # under Slurm.
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
    """SIGKILL what `find` returns until it finds nothing; return the pids that survive."""
    until = time.monotonic() + patience_seconds
    while True:
        late = time.monotonic() > until  # before the search: this process may be paused after it
        left = list(find())
        # Search again after each round: a process that forks between the search and the kill leaves
        # a child that the first list does not have.
        for who in left:
            send(who, signal.SIGKILL)
        reap()
        if not left or late:
            return sorted(who.pid for who in left)
        time.sleep(_PAUSE_SECONDS)
