"""The process that owns a directory, and whether it is still alive."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.process import read_stat

if TYPE_CHECKING:
    from collections.abc import Mapping


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
