"""Processes: start one detached, know it again later, stop exactly those that were started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _errors import DevclusterError
from _packages import SEARCH_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_POLL = 0.03


@dataclass(frozen=True)
class Process:
    """A process by number and start time: the number alone may be given out again."""

    pid: int
    start: int

    def alive(self) -> bool:
        """Tells whether this very process still runs; a zombie has ended."""
        return _start_time(self.pid) == self.start

    def send(self, number: int) -> None:
        """Signals the process if it is still the same one."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name and may itself hold blanks and brackets.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> Process | None:
    """Gives the running process with that pid, None if it does not exist."""
    start = _start_time(pid)
    return None if start is None else Process(pid, start)


def daemon_environment(**extra: str) -> dict[str, str]:
    """Gives the daemons nothing of the caller's environment, least of all its SLURM_ variables."""
    base = {"PATH": SEARCH_PATH, "HOME": "/root", "LANG": "C.UTF-8", "SHELL": "/bin/sh"}
    return base | extra


def start_detached(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> tuple[Process, subprocess.Popen[bytes]]:
    """Starts a daemon in its own session, with its output going to a file."""
    with log.open("ab") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    # Not yet waited for, so the entry is there even if the program has already ended.
    start = _start_time(popen.pid)
    return Process(popen.pid, -1 if start is None else start), popen


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Asks until the answer is yes (True) or the time is over (False)."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def stop(processes: Iterable[Process], seconds: float) -> None:
    """Ends processes: SIGTERM to all of them, and SIGKILL to what is left after the time given."""
    left = [process for process in processes if process.alive()]
    for process in left:
        process.send(signal.SIGTERM)
    if not wait_until(lambda: _reap_and_count(left) == 0, seconds):
        kill(left)


def kill(processes: Iterable[Process]) -> None:
    """Ends processes at once and waits for them to be gone."""
    left = [process for process in processes if process.alive()]
    for process in left:
        process.send(signal.SIGKILL)
    if not wait_until(lambda: _reap_and_count(left) == 0, 10):
        pids = ", ".join(str(process.pid) for process in left if process.alive())
        raise DevclusterError(f"these processes do not end even by SIGKILL: {pids}")


def _reap_and_count(processes: list[Process]) -> int:
    for process in processes:
        # Our own children (a failed 'up') would stay zombies; for other processes this fails: fine.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return sum(process.alive() for process in processes)


def inside(tag: str) -> list[Process]:
    """Finds all processes that live in a virtual node's mounts, even those Slurm lost sight of.

    A node's private /tmp is mounted under a name that holds the cluster's random tag, so no
    process outside of this cluster can be mistaken for one of its processes.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        process = identify(int(entry.name))
        if process is None:
            continue
        try:
            mounts = (entry / "mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if f" {tag}-" in mounts:
            found.append(process)
    return found
