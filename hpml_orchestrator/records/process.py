"""Processes and their state in /proc."""

from __future__ import annotations

import os


# Not a dataclass: every hpml-bind imports this, and importing `dataclasses` would take half of its
# start time.
class ProcessStat:
    """The fields of `/proc/PID/stat` that hpml uses (proc_pid_stat(5)).

    Attributes:
        pid: process ID.
        name: the command's name, at most 15 bytes; it may contain spaces and parentheses.
        state: one letter, such as R, S, D, Z or X.
        parent: the parent's pid.
        session: the pid of its session's leader.
        cpu_ticks: user and system time of the process itself, in clock ticks.
        start_ticks: clock ticks from boot to its start; with the pid it identifies a process.
    """

    def __init__(self, text: str) -> None:
        """Parse the file's text; raise ValueError or IndexError if it is damaged."""
        # The name may contain spaces and parentheses, so split at the last one.
        head, _, rest = text.rpartition(")")
        number, _, self.name = head.partition(" (")
        fields = rest.split()
        self.pid = int(number)
        self.state = fields[0]
        self.parent, self.session = int(fields[1]), int(fields[3])
        self.cpu_ticks = int(fields[11]) + int(fields[12])
        self.start_ticks = int(fields[19])

    @property
    def ended(self) -> bool:
        """Whether it has ended and waits to be reaped."""
        return self.state in {"Z", "X"}


def read_stat(pid: int | str, proc_root: str = "/proc") -> ProcessStat | None:
    """Read one process; None if it has ended or is not readable."""
    try:
        with open(os.path.join(proc_root, str(pid), "stat"), "rb") as stream:
            return ProcessStat(stream.read().decode("utf-8", "replace"))
    except (OSError, ValueError, IndexError):
        return None


def environment_of(pid: int | str, proc_root: str = "/proc") -> list[bytes]:
    """Return a process's initial environment variables; empty if they cannot be read."""
    try:
        with open(f"{proc_root}/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def live_processes(proc_root: str = "/proc") -> list[ProcessStat]:
    """Return all processes except zombies."""
    stats = (read_stat(name, proc_root) for name in os.listdir(proc_root) if name.isdecimal())
    return [stat for stat in stats if stat is not None and not stat.ended]
