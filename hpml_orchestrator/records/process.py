"""Processes: who runs, who owns a file, and since when."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping


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


# The process that owns a directory, and whether it is still alive.


@dataclass(frozen=True)
class Owner:
    """The process that owns a directory, such as a job's staged data or a submission.

    Attributes:
        job_key: the directory's name.
        pid: as its own PID namespace counts.
        start_ticks: its start in clock ticks after boot, to detect a reused pid; -1 if unknown.
        boot_id: of the kernel that it ran under.
        hostname: of the node.
        pid_namespace: as `readlink /proc/self/ns/pid` shows it; "" if unknown.
    """

    job_key: str
    pid: int
    start_ticks: int
    boot_id: str
    hostname: str
    pid_namespace: str

    def write(self, path: str) -> None:
        """Record the owner durably."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: str) -> Owner | None:
        """Read a record; None if there is none or it cannot be understood."""
        try:
            return cls.parse(read_json(path))
        except (NotFoundError, RecordError):
            return None

    @classmethod
    def parse(cls, record: Mapping[str, object]) -> Owner | None:
        """Return the owner that a record describes; None if it cannot be understood."""
        try:
            texts = {field.name: str(record[field.name]) for field in fields(cls)}
            return cls(
                job_key=texts["job_key"],
                pid=int(texts["pid"]),
                start_ticks=int(texts["start_ticks"]),
                boot_id=texts["boot_id"],
                hostname=texts["hostname"],
                pid_namespace=texts["pid_namespace"],
            )
        except (KeyError, ValueError):
            return None


def this_owner(job_key: str, pid: int | None = None, *, proc_root: str = "/proc") -> Owner:
    """Describe a process of this node, by default the calling one."""
    number = os.getpid() if pid is None else pid
    return Owner(
        job_key=job_key,
        pid=number,
        start_ticks=_start_ticks(number, proc_root),
        boot_id=boot_id(proc_root),
        hostname=socket.gethostname(),
        pid_namespace=_pid_namespace(proc_root),
    )


def owner_is_alive(owner: Owner, *, proc_root: str = "/proc") -> bool:
    """Return whether an owner lives.

    A process of another host, or of another PID namespace under the same kernel, cannot be judged
    from here and counts as alive.
    """
    # When in doubt, alive: removing a living process's data is worse than leaving a dead one's.
    if owner.hostname != socket.gethostname():
        return True
    if owner.boot_id != boot_id(proc_root):
        return False
    # A pid means nothing in another namespace, such as that of a container.
    if owner.pid_namespace != _pid_namespace(proc_root):
        return True
    started = _start_ticks(owner.pid, proc_root)
    return started >= 0 and started == owner.start_ticks


def boot_id(proc_root: str = "/proc") -> str:
    """Return the id of this boot of the machine; empty if there is none."""
    try:
        with open(f"{proc_root}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _pid_namespace(proc_root: str) -> str:
    try:
        return os.readlink(f"{proc_root}/self/ns/pid")
    except OSError:
        return ""


def _start_ticks(pid: int, proc_root: str) -> int:
    stat = read_stat(pid, proc_root)
    return -1 if stat is None or stat.ended else stat.start_ticks
