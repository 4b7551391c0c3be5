"""How much more memory this process may use: every cgroup above it, version 1 and 2.

Files on a tmpfs count as memory of the job that wrote them, so a job that stages into RAM is
killed when a limit of any ancestor is reached, however empty the tmpfs is.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hpml_orchestrator.records.mounts import read_mounts

__all__ = ["Headroom", "memory_headroom"]

_UNLIMITED = 1 << 60  # version 1 shows "no limit" as 2^63 rounded down to a page


class Headroom(NamedTuple):
    """Bytes that may still be used, and what sets that figure."""

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
    """Return the least of limit - used over all ancestors and of the machine's free memory.

    Clean page cache that was not touched lately (`inactive_file` of memory.stat) is taken as free:
    the kernel drops it before it kills anyone, and pages of a tmpfs are not in it.

    Returns:
        None when neither a limit nor /proc/meminfo is known.
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
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    cache = 0
    for line in _text(f"{directory}/memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            cache = _number(value) or 0
    return max(0, limit - used + min(cache, used))


def _ancestors(proc_root: str, cgroup_root: str) -> list[tuple[str, _Files]]:
    """Return the directories of this process's memory cgroup and of all above it."""
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
        if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
            below = path[len(mount_root) :]
        parts = [part for part in below.split("/") if part not in {"", ".."}]
        result += [("/".join([point, *parts[:n]]), files) for n in range(len(parts), -1, -1)]
    return result


def _mount(proc_root: str, cgroup_root: str, type_name: str) -> tuple[str, str]:
    """Return (directory of the hierarchy that is mounted, mount point under cgroup_root)."""
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
