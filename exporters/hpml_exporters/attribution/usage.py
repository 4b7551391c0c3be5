"""What the control groups of a job counted, in version 1 and 2 alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpml_exporters.attribution import raw

__all__ = ["Listed", "Usage", "count_cpus", "counts_cpu", "counts_memory", "usage_of"]

_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # version 1 has no word for it, only a number near the largest one
_RESOURCES = ("cpu", "memory", "io")


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


Listed = dict[str, tuple[int, list[str]]]
"""Directories in a directory, with its link count at that time."""


def usage_of(groups: Mapping[str, str], listed: Listed | None = None) -> Usage:
    """Return what the groups of a job counted.

    Args:
        groups: as in `JobSeen.groups`.
        listed: kept from one reading to the next, so that steps are listed only when they change.
    """
    return (
        _version_2(groups[""])
        if "" in groups
        else _version_1(groups, {} if listed is None else listed)
    )


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


def _read(path: str) -> bytes:
    try:
        return raw.read(path) or b""
    except PermissionError:
        return b""


def _pairs(path: str) -> dict[bytes, int]:
    """Read lines of a name and a number."""
    words = _read(path).split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=False))


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _stalled(path: str) -> float | None:
    """Return seconds of `some`, which the kernel gives in microseconds at the line's end."""
    first = _read(path).partition(b"\n")[0]
    _, found, total = first.rpartition(b"total=")
    return int(total) / 1e6 if found and first.startswith(b"some") and total.isdigit() else None


def _version_2(path: str) -> Usage:
    usage = Usage()
    cpu = _pairs(f"{path}/cpu.stat")
    if b"user_usec" in cpu and b"system_usec" in cpu:
        usage.cpu_seconds = {"user": cpu[b"user_usec"] / 1e6, "system": cpu[b"system_usec"] / 1e6}
    memory = _pairs(f"{path}/memory.stat")
    if memory:
        # `file` has shmem in it.
        usage.memory = _kinds(memory, b"anon", b"file", b"shmem")
        usage.limit = _number(f"{path}/memory.max")  # the word max: no limit
        usage.peak = _number(f"{path}/memory.peak")
        kills = _pairs(f"{path}/memory.events").get(b"oom_kill")
        usage.oom_kills = {} if kills is None else {path: kills}
    for resource in _RESOURCES:
        stalled = _stalled(f"{path}/{resource}.pressure")
        if stalled is not None:
            usage.pressure[resource] = stalled
    # Empty unless Slurm set it; what is in effect would be all CPUs of the machine.
    usage.cpus = count_cpus(_read(f"{path}/cpuset.cpus").decode("ascii", "replace").strip())
    return usage


def _version_1(groups: Mapping[str, str], listed: Listed) -> Usage:
    usage = Usage()
    if "cpuacct" in groups:
        cpu = _pairs(f"{groups['cpuacct']}/cpuacct.stat")
        if b"user" in cpu and b"system" in cpu:
            usage.cpu_seconds = {
                "user": cpu[b"user"] / _TICKS,
                "system": cpu[b"system"] / _TICKS,
            }
    if "memory" in groups:
        path = groups["memory"]
        memory = _pairs(f"{path}/memory.stat")
        if memory:
            usage.memory = _kinds(memory, b"total_rss", b"total_cache", b"total_shmem")
            limit = _number(f"{path}/memory.limit_in_bytes")
            usage.limit = limit if limit is not None and limit < _NO_LIMIT else None
            usage.peak = _number(f"{path}/memory.max_usage_in_bytes")
            _add_oom_kills(path, listed, usage.oom_kills)
    if "cpuset" in groups:
        text = _read(f"{groups['cpuset']}/cpuset.cpus").decode("ascii", "replace").strip()
        usage.cpus = count_cpus(text)
    return usage


def _kinds(memory: Mapping[bytes, int], rss: bytes, cache: bytes, shmem: bytes) -> dict[str, int]:
    if rss not in memory or cache not in memory:
        return {}
    shared = memory.get(shmem)  # before Linux 4.14 version 1 has no such line
    found = {"rss": memory[rss], "cache": max(0, memory[cache] - (shared or 0))}
    return found if shared is None else found | {"shmem": shared}


def _add_oom_kills(path: str, listed: Listed, into: dict[str, int]) -> None:
    """Ask the groups of all steps and tasks: version 1 counts where the process was."""
    kills = _pairs(f"{path}/memory.oom_control").get(b"oom_kill")
    if kills is None:  # before Linux 4.13, or gone
        listed.pop(path, None)
        listed.pop(path.rpartition("/")[0], None)
        return
    into[path] = kills
    try:
        links = os.stat(path).st_nlink
    except OSError:
        return
    known = listed.get(path)
    if known is None or known[0] != links or links < 2:  # noqa: PLR2004 - the count is no count
        known = listed[path] = (links, raw.subdirectories(path) or [])
    for name in known[1]:
        _add_oom_kills(f"{path}/{name}", listed, into)
