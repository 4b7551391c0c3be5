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
