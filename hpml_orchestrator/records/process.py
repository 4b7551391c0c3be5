"""A process as `/proc/PID/stat` shows it."""

from __future__ import annotations

import os


# No dataclass: hpml-bind imports this once per rank, and importing `dataclasses` would take half of
# the time of its start.
class ProcessStat:
    """The fields of `/proc/PID/stat` that hpml uses (proc_pid_stat(5)).

    Attributes:
        pid: the process id.
        name: the command's name, at most 15 bytes; it may contain spaces and parentheses.
        state: one letter, such as R, S, D, Z or X.
        parent: the parent's pid.
        session: the pid of its session's leader.
        cpu_ticks: user and system time of the process itself, in clock ticks.
        start_ticks: clock ticks from boot to its start; with the pid it names one process.
    """

    def __init__(self, text: str) -> None:
        """Parse the file's text; a damaged one raises ValueError or IndexError."""
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
        """Whether it has ended and only waits to be reaped."""
        return self.state in {"Z", "X"}


def read_stat(pid: int | str, proc_root: str = "/proc") -> ProcessStat | None:
    """Read one process; None if it has ended or may not be read."""
    try:
        with open(os.path.join(proc_root, str(pid), "stat"), "rb") as stream:
            return ProcessStat(stream.read().decode("utf-8", "replace"))
    except (OSError, ValueError, IndexError):
        return None


def environment_of(pid: int | str, proc_root: str = "/proc") -> list[bytes]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        with open(f"{proc_root}/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def live_processes(proc_root: str = "/proc") -> list[ProcessStat]:
    """Return every process except zombies, as it was at one moment."""
    stats = (read_stat(name, proc_root) for name in os.listdir(proc_root) if name.isdecimal())
    return [stat for stat in stats if stat is not None and not stat.ended]
