"""A process as `/proc/PID/stat` shows it."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ProcessStat", "read_stat"]


@dataclass(frozen=True)
class ProcessStat:
    """What hpml uses of `/proc/PID/stat` (proc_pid_stat(5)).

    Attributes:
        pid: the process id.
        name: the command's name, at most 15 bytes; it may hold spaces and parentheses.
        state: one letter, such as R, S, D, Z or X.
        parent: the parent's pid.
        group: the process group.
        session: the session.
        cpu_ticks: user and system time of the process itself, in clock ticks.
        start_ticks: clock ticks from boot to its start; with the pid it names one process.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """Whether it has ended and only waits to be reaped."""
        return self.state in {"Z", "X"}


def read_stat(pid: int | str, proc_root: str = "/proc") -> ProcessStat | None:
    """Read one process; None when it is gone or may not be read."""
    try:
        with open(os.path.join(proc_root, str(pid), "stat"), "rb") as stream:
            text = stream.read().decode("utf-8", "replace")
        head, _, rest = text.rpartition(")")
        number, _, name = head.partition(" (")
        fields = rest.split()
        return ProcessStat(
            pid=int(number),
            name=name,
            state=fields[0],
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):
        return None
