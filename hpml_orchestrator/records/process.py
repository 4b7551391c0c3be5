"""Processes: their state in /proc, and which process owns a directory."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping


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


# The process that owns a directory, and whether it is still alive.


@dataclass(frozen=True)
class Owner:
    """The process that owns a directory, such as a job's staged data or a submission.

    Attributes:
        job_key: the directory's name.
        pid: in its own PID namespace.
        start_ticks: start time in clock ticks after boot, to detect a reused pid; -1 if unknown.
        boot_id: ID of the boot in which it ran.
        hostname: of the node.
        pid_namespace: output of `readlink /proc/self/ns/pid`; empty if unknown.
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
        """Read a record; None if it is missing or invalid."""
        try:
            return cls.parse(read_json(path))
        except (NotFoundError, RecordError):
            return None

    @classmethod
    def parse(cls, record: Mapping[str, object]) -> Owner | None:
        """Return the owner in a record; None if it is invalid."""
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
    """Return a process of this node as an owner, by default the current process."""
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
    """Return whether an owner is alive.

    A process on another host, or in another PID namespace of this host, counts as alive because it
    is not visible here.
    """
    # If in doubt, alive: removing a live process's data is worse than keeping a dead one's.
    if owner.hostname != socket.gethostname():
        return True
    if owner.boot_id != boot_id(proc_root):
        return False
    # A pid has no meaning in another namespace, such as that of a container.
    if owner.pid_namespace != _pid_namespace(proc_root):
        return True
    started = _start_ticks(owner.pid, proc_root)
    return started >= 0 and started == owner.start_ticks


def boot_id(proc_root: str = "/proc") -> str:
    """Return the ID of the machine's current boot; empty if there is none."""
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
