"""Whether data fits, in bytes and in inodes, before a byte is copied."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import CapacityError
from hpml_orchestrator.records.mounts import read_mounts
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.cgroup import memory_headroom
from hpml_orchestrator.staging.mounts import MEMORY_TYPES, is_served_type

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "INODE_BYTES",
    "Need",
    "Room",
    "check_room",
    "file_system_type",
    "fits",
    "readers_for",
    "room_at",
    "round_up",
]

_FREE_SPACE = "free space"
_UNLIMITED = 1 << 62
_READERS_OF_A_SERVER = 32
INODE_BYTES = 1024  # inode and name on a tmpfs: 957 measured in a memory cgroup, Linux 6.18


@dataclass(frozen=True)
class Need:
    """What data takes on a file system; `at_least` when counting stopped early."""

    bytes: int
    inodes: int
    at_least: bool = False


@dataclass(frozen=True)
class Room:
    """What a directory's file system still takes.

    Attributes:
        bytes: for an ordinary user; on a tmpfs no more than the job's memory limits leave.
        limit: what sets that figure.
        inodes: None when the file system does not count them.
        block_bytes: a file takes a multiple of this.
        in_memory: files there count as memory of the job.
        inode_bytes: what the kernel itself takes for each file or directory and counts as memory
            of the job; 0 where memory is not what limits.
    """

    bytes: int
    limit: str
    inodes: int | None
    block_bytes: int
    in_memory: bool
    inode_bytes: int = 0


def room_at(
    path: str,
    *,
    proc_root: str = "/proc",
    cgroup_root: str = "/sys/fs/cgroup",
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
) -> Room:
    """Measure the room in an existing directory.

    Raises:
        OSError: the directory is not there.
    """
    figures = statvfs(path)
    free = figures.f_bavail * figures.f_frsize
    limit = f"{_FREE_SPACE} of the file system at {path}"
    kind = file_system_type(path, proc_root=proc_root)
    in_memory = kind in MEMORY_TYPES
    if in_memory and figures.f_blocks == 0:
        free = _UNLIMITED  # ramfs, and a tmpfs mounted with size=0
    headroom = memory_headroom(proc_root=proc_root, cgroup_root=cgroup_root) if in_memory else None
    by_memory = headroom is not None and headroom.bytes < free
    if headroom is not None and by_memory:
        free, limit = headroom
    return Room(
        bytes=free,
        limit=limit,
        inodes=figures.f_favail if figures.f_files else None,
        block_bytes=figures.f_frsize or 4096,
        in_memory=in_memory,
        inode_bytes=INODE_BYTES if by_memory else 0,
    )


def file_system_type(path: str, *, proc_root: str = "/proc") -> str:
    """Return the type as mountinfo names it ("tmpfs", "ext4", "nfs4"), "" when unknown.

    By device number, and by the longest mount point where the number is not listed (btrfs).
    """
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path).rstrip("/") + "/"
    best, longest = "", -1
    for mount in read_mounts(f"{proc_root}/self/mountinfo"):
        if mount.device == wanted:
            return mount.kind
        point = mount.point.rstrip("/") + "/"
        if real.startswith(point) and len(point) >= longest:
            best, longest = mount.kind, len(point)
    return best


def readers_for(path: str) -> int:
    """Return how many readers at once are worth it: many where each waits for a server."""
    return _READERS_OF_A_SERVER if is_served_type(file_system_type(path)) else 1


def fits(need: Need, room: Room) -> bool:
    """Say whether a need is met.

    >>> fits(Need(10, 1), Room(10, "", None, 1, False)), fits(Need(1, 2), Room(1, "", 1, 1, False))
    (True, False)
    """
    return need.bytes <= room.bytes and (room.inodes is None or need.inodes <= room.inodes)


def check_room(need: Need, room: Room, *, name: str, where: str) -> None:
    """Refuse what does not fit.

    Raises:
        CapacityError: says what is needed and available, what sets the limit and what helps.
    """
    faults, hints = [], []
    least = "at least " if need.at_least else ""
    if need.bytes > room.bytes:
        faults.append(
            f"needs {least}{human_bytes(need.bytes)} ({need.bytes} bytes) in {where}, available "
            f"{human_bytes(room.bytes)} ({room.bytes} bytes; {room.limit})"
        )
        if room.in_memory and not room.limit.startswith(_FREE_SPACE):
            more = human_bytes(need.bytes - room.bytes)
            hints.append(f"ask for at least {more} more memory (--mem), or use target: local")
        else:
            hints.append("free space there, or choose another target directory")
    if room.inodes is not None and need.inodes > room.inodes:
        faults.append(
            f"needs {least}{need.inodes} inodes in {where}, available {room.inodes} "
            f"(inode limit of the file system)"
        )
        hints.append("pack the files into one archive and stage it with kind: file")
    if faults:
        raise CapacityError("; ".join(faults), field=name, hint="; ".join(hints))


def round_up(count: int, block_bytes: int) -> int:
    """Return the next multiple of the block size."""
    return -(-count // block_bytes) * block_bytes
