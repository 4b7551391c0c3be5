"""Room on the node: bytes, inodes, memory limits of cgroups, and types of file systems.

Files on a tmpfs count towards the memory of the job that wrote them. So a job that stages into RAM
is killed when it reaches a limit of any ancestor cgroup, however empty the tmpfs is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import CapacityError
from hpml_orchestrator.records.mounts import file_system_type, is_served_type, read_mounts
from hpml_orchestrator.records.texts import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


MEMORY_TYPES = frozenset({"tmpfs", "devtmpfs", "ramfs"})
"""File systems that keep files in the node's memory."""

INODE_BYTES = 1024
"""Kernel memory per inode and name on a tmpfs: 957 measured in a memory cgroup, Linux 6.18."""

_STAT_BLOCK_BYTES = 512
_FREE_SPACE = "free space"
_UNLIMITED = 1 << 62
_NO_LIMIT = 1 << 60  # version 1 shows "no limit" as 2^63 rounded down to a page
_READERS_OF_A_SERVER = 32


@dataclass(frozen=True)
class Need:
    """Bytes and inodes that data takes on a file system; `at_least` if counting stopped early."""

    bytes: int
    inodes: int
    at_least: bool = False


@dataclass(frozen=True)
class Room:
    """Room that is left in a directory.

    Attributes:
        bytes: free bytes for an ordinary user; on a tmpfs, limited by the job's memory limits.
        limit: what sets that figure.
        inodes: free inodes; None if the file system does not count them.
        block_bytes: block size; files take a multiple of it.
        in_memory: files there count towards the job's memory.
        inode_bytes: kernel memory per file or directory, which also counts towards the job's
            memory; 0 if memory is not the limit.
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
        OSError: the directory does not exist.
    """
    figures = statvfs(path)
    free = figures.f_bavail * figures.f_frsize
    limit = f"{_FREE_SPACE} of the file system at {path}"
    kind = file_system_type(path, proc_root=proc_root)
    in_memory = kind in MEMORY_TYPES
    # These report no size at all: memory is their only limit.
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


def capacity_at(path: str) -> int:
    """Return the capacity in bytes of the file system of an existing directory.

    Raises:
        OSError: the directory does not exist.
    """
    figures = os.statvfs(path)
    return figures.f_blocks * figures.f_frsize or _UNLIMITED


def readers_for(path: str) -> int:
    """Return how many readers to run at once: many on a network file system, else 1."""
    return _READERS_OF_A_SERVER if is_served_type(file_system_type(path)) else 1


def fits(need: Need, room: Room) -> bool:
    """Return whether there is enough room.

    >>> fits(Need(10, 1), Room(10, "", None, 1, False)), fits(Need(1, 2), Room(1, "", 1, 1, False))
    (True, False)
    """
    return need.bytes <= room.bytes and (room.inodes is None or need.inodes <= room.inodes)


def room_without(room: Room, directories: list[str]) -> Room:
    """Return the room that there would be without some directories."""
    held = [usage(one) for one in directories]
    inodes = None if room.inodes is None else room.inodes + sum(one.inodes for one in held)
    return replace(room, bytes=room.bytes + sum(one.taken_bytes for one in held), inodes=inodes)


class DirectoryUsage(NamedTuple):
    """Contents of a directory, and the room that it takes on its file system.

    Attributes:
        bytes: total size of its regular files, each inode counted once.
        files: number of names of regular files.
        taken_bytes: allocated blocks, in bytes.
        inodes: number of inodes, including the directory itself.
    """

    bytes: int
    files: int
    taken_bytes: int
    inodes: int


def usage(directory: str) -> DirectoryUsage:
    """Measure a directory; files that are removed meanwhile may be missing."""
    size = files = taken = 0
    inodes = set()
    for parent, directories, names in os.walk(directory):
        for name in (*directories, *names):
            with contextlib.suppress(OSError):
                info = os.lstat(f"{parent}/{name}")
                is_file = stat.S_ISREG(info.st_mode)
                files += is_file
                if info.st_ino not in inodes:
                    inodes.add(info.st_ino)
                    size += info.st_size * is_file
                    taken += info.st_blocks * _STAT_BLOCK_BYTES
    return DirectoryUsage(size, files, taken, len(inodes) + 1)


def check_room(need: Need, room: Room, *, name: str, where: str) -> None:
    """Raise an error if the data does not fit.

    Raises:
        CapacityError: names the need, the available room, the limit, and advice.
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


class Headroom(NamedTuple):
    """Bytes that may still be used, and the limit that they come from."""

    bytes: int
    why: str


class _Files(NamedTuple):
    limit: str
    used: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def memory_headroom(
    *, proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup"
) -> Headroom | None:
    """Return the smallest of limit - usage of all ancestor cgroups and of the free memory.

    Page cache that was not used lately (`inactive_file` in memory.stat) counts as free: the kernel
    drops it before it kills a process. It does not include pages of a tmpfs.

    Returns:
        None if neither a limit nor /proc/meminfo can be read.
    """
    found = []
    available = _meminfo_available(proc_root)
    if available is not None:
        found.append(Headroom(available, "free memory of the node (MemAvailable)"))
    for directory, files in _ancestors(proc_root, cgroup_root):
        free = _free_bytes(directory, files)
        if free is not None:
            found.append(Headroom(free, f"memory limit of cgroup {directory}"))
    return min(found, default=None)


def _free_bytes(directory: str, files: _Files) -> int | None:
    limit = _number(_text(f"{directory}/{files.limit}"))
    used = _number(_text(f"{directory}/{files.used}"))
    # The root of version 2 has none of these files, and "max" is not a number: both mean no limit.
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    cache = 0
    for line in _text(f"{directory}/memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            cache = _number(value) or 0
    return max(0, limit - used + min(cache, used))


def _ancestors(proc_root: str, cgroup_root: str) -> list[tuple[str, _Files]]:
    result = []
    for line in _text(f"{proc_root}/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            files, type_name = _V2, "cgroup2"
        elif "memory" in controllers.split(","):
            files, type_name = _V1, "cgroup"
        else:
            continue
        mount_root, point = _mount(proc_root, cgroup_root, type_name)
        below = path
        # A container may mount only a part of the hierarchy; /proc still has the whole path.
        if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
            below = path[len(mount_root) :]
        # In a cgroup namespace, the path of a process outside of it begins with `..`.
        parts = [part for part in below.split("/") if part not in {"", ".."}]
        result += [("/".join([point, *parts[:n]]), files) for n in range(len(parts), -1, -1)]
    return result


def _mount(proc_root: str, cgroup_root: str, type_name: str) -> tuple[str, str]:
    for mount in read_mounts(f"{proc_root}/self/mountinfo"):
        if mount.kind == type_name and (type_name == "cgroup2" or "memory" in mount.options):
            point = mount.point
            if f"{point}/".startswith("/sys/fs/cgroup/"):
                point = cgroup_root + point[len("/sys/fs/cgroup") :]
            return mount.root, point
    return "/", f"{cgroup_root}/memory" if type_name == "cgroup" else cgroup_root


def _meminfo_available(proc_root: str) -> int | None:
    for line in _text(f"{proc_root}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            kibibytes = _number(line.split()[1])
            return None if kibibytes is None else kibibytes * 1024
    return None


def _number(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None  # "max", or no such file


def _text(path: str) -> str:
    try:
        with open(os.fsencode(path), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
