"""What the control groups of a job counted, in version 1 and 2 alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpml_exporters.jobs import raw

__all__ = ["Usage", "UsageReader", "count_cpus", "counts_cpu", "counts_memory"]

_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # version 1 has no word for it, only a number near the largest one
_RESOURCES = ("cpu", "memory", "io")
_FIXED_READINGS = 12  # from one reading of limits and CPU sets to the next
_HAS_LINKS = 2  # fewer: the file system does not count directories in a directory


@dataclass
class Usage:
    """Figures of one group; what it does not count is missing or None.

    Attributes:
        cpu_seconds: by mode, user and system.
        memory: bytes by kind: rss, cache, shmem, which do not overlap.
        limit: bytes.
        peak: bytes.
        oom_kills: processes killed, by the group that counted them.
        pressure: seconds by resource.
        cpus: number of them.
    """

    cpu_seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    limit: int | None = None
    peak: int | None = None
    oom_kills: dict[str, int] = field(default_factory=dict)
    pressure: dict[str, float] = field(default_factory=dict)
    cpus: int | None = None


class UsageReader:
    """Reads the groups of one job again and again.

    Args:
        files: keeps the files open that are read each time.
    """

    def __init__(self, files: raw.Kept) -> None:
        self._files = files
        self._listed: dict[str, tuple[int, list[str]]] = {}
        self._fixed: dict[str, tuple[int | None, int | None]] = {}
        self._readings = 0

    def usage(self, groups: Mapping[str, str]) -> Usage:
        """Return what the groups of a job counted.

        Args:
            groups: as in `JobSeen.groups`.
        """
        self._readings += 1
        return self._version_2(groups[""]) if "" in groups else self._version_1(groups)

    def forget(self, groups: Mapping[str, str]) -> None:
        """Close the files of groups that are gone."""
        for path in groups.values():
            self._files.forget(path)

    def _limit_and_cpus(self, limit: str, cpus: str) -> tuple[int | None, int | None]:
        """Read what hardly ever changes only now and then."""
        key = limit or cpus
        known = self._fixed.get(key)
        if known is None or self._readings % _FIXED_READINGS == 0:
            # No file, or the word max of version 2: no limit.
            bound = _number(_read(limit)) if limit else None
            text = _read(cpus).decode("ascii", "replace").strip() if cpus else ""
            known = self._fixed[key] = (bound, count_cpus(text))
        return known

    def _version_2(self, path: str) -> Usage:
        usage, read = Usage(), self._files.read
        cpu = _pairs(read(f"{path}/cpu.stat"))
        if b"user_usec" in cpu and b"system_usec" in cpu:
            usage.cpu_seconds = {
                "user": int(cpu[b"user_usec"]) / 1e6,
                "system": int(cpu[b"system_usec"]) / 1e6,
            }
        # Empty unless Slurm set it; what is in effect would be all CPUs of the machine.
        limit, usage.cpus = self._limit_and_cpus(f"{path}/memory.max", f"{path}/cpuset.cpus")
        # `file` has shmem in it.
        usage.memory = _kinds(_pairs(read(f"{path}/memory.stat")), b"anon", b"file", b"shmem")
        if usage.memory:
            usage.limit = limit
            usage.peak = _number(read(f"{path}/memory.peak"))
            kills = _pairs(read(f"{path}/memory.events")).get(b"oom_kill")
            usage.oom_kills = {} if kills is None else {path: int(kills)}
        for resource in _RESOURCES:
            stalled = _stalled(read(f"{path}/{resource}.pressure"))
            if stalled is not None:
                usage.pressure[resource] = stalled
        return usage

    def _version_1(self, groups: Mapping[str, str]) -> Usage:
        usage, read = Usage(), self._files.read
        cpu = _pairs(read(f"{groups['cpuacct']}/cpuacct.stat")) if "cpuacct" in groups else {}
        if b"user" in cpu and b"system" in cpu:
            usage.cpu_seconds = {
                "user": int(cpu[b"user"]) / _TICKS,
                "system": int(cpu[b"system"]) / _TICKS,
            }
        path = groups.get("memory", "")
        cpuset = groups.get("cpuset", "")
        limit, usage.cpus = self._limit_and_cpus(
            f"{path}/memory.limit_in_bytes" if path else "",
            f"{cpuset}/cpuset.cpus" if cpuset else "",
        )
        if path:
            memory = _pairs(read(f"{path}/memory.stat"))
            usage.memory = _kinds(memory, b"total_rss", b"total_cache", b"total_shmem")
            usage.limit = limit if limit is not None and limit < _NO_LIMIT else None
            usage.peak = _number(read(f"{path}/memory.max_usage_in_bytes"))
            self._add_oom_kills(path, usage.oom_kills)
        return usage

    def _add_oom_kills(self, path: str, into: dict[str, int]) -> bool:
        """Ask the groups of all steps and tasks: version 1 counts where the process was.

        Returns:
            whether the group is there.
        """
        try:
            links = os.stat(path).st_nlink
        except OSError:
            self._listed.pop(path, None)
            return False
        known = self._listed.get(path)
        if known is None or known[0] != links or links < _HAS_LINKS:
            known = self._listed[path] = (links, raw.subdirectories(path) or [])
        there = [self._add_oom_kills(f"{path}/{name}", into) for name in known[1]]
        if not all(there):
            # Where one went, another may have come: the link count is the same then.
            names = raw.subdirectories(path) or []
            self._listed[path] = (links, names)
            for name in set(names) - set(known[1]):
                self._add_oom_kills(f"{path}/{name}", into)
        if not known[1]:  # Slurm leaves no process of a job in a group that has others in it
            kills = _pairs(self._files.read(f"{path}/memory.oom_control")).get(b"oom_kill")
            if kills is not None:  # since Linux 4.13
                into[path] = int(kills)
        return True


def counts_cpu(groups: Mapping[str, str]) -> bool:
    """Return whether a job's groups count CPU time."""
    return "" in groups or "cpuacct" in groups


def counts_memory(groups: Mapping[str, str]) -> bool:
    """Return whether a job's groups count memory; in version 2 it may be switched off."""
    if "" in groups:
        return os.path.exists(f"{groups['']}/memory.stat")
    return "memory" in groups


def count_cpus(text: str) -> int | None:
    """Return how many CPUs a list like `0-3,8` names; None for an empty one.

    >>> count_cpus("0-3,8")
    5
    """
    total = 0
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        total += int(last or first) - int(first) + 1
    return total


def _pairs(data: bytes) -> dict[bytes, bytes]:
    """Split lines of a name and a number."""
    words = data.split()
    return dict(zip(words[::2], words[1::2], strict=False))


def _number(data: bytes) -> int | None:
    text = data.strip()
    return int(text) if text.isdigit() else None


def _stalled(data: bytes) -> float | None:
    """Return seconds of `some`, which the kernel gives in microseconds at the line's end."""
    first = data.partition(b"\n")[0]
    _, found, total = first.rpartition(b"total=")
    return int(total) / 1e6 if found and first.startswith(b"some") and total.isdigit() else None


def _read(path: str) -> bytes:
    try:
        return raw.read(path) or b""
    except PermissionError:
        return b""


def _kinds(memory: Mapping[bytes, bytes], rss: bytes, cache: bytes, shmem: bytes) -> dict[str, int]:
    if rss not in memory or cache not in memory:
        return {}
    shared = int(memory.get(shmem, -1))  # before Linux 4.14 version 1 has no such line
    found = {"rss": int(memory[rss]), "cache": max(0, int(memory[cache]) - max(0, shared))}
    return found if shared < 0 else found | {"shmem": shared}
