"""What the control groups of a job counted, in version 1 and 2 alike."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpml_exporters.core.procfs import read_or_empty, subdirectories

__all__ = ["Usage", "count_cpus", "counts_cpu", "counts_memory", "read_usage"]

_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # version 1 has no word for it, only a number near the largest one
_PRESSURES = ("cpu", "memory", "io")


@dataclass
class Usage:
    """Figures of one job in one hierarchy; what is not counted is missing or None.

    Attributes:
        counters: by the group that counted, what is counted (cpu, pressure, oom) and its label
            (mode or resource): seconds, or processes killed.
        memory: bytes by kind: rss, cache, shmem, which do not overlap.
        limit: bytes.
        peak: bytes.
        cpus: number of them.
    """

    counters: dict[tuple[str, str, str], float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    limit: int | None = None
    peak: int | None = None
    cpus: int | None = None


def read_usage(groups: Mapping[str, str]) -> Usage:
    """Return what the groups of a job counted.

    Args:
        groups: one of `JobSeen.groups`.
    """
    return _version_2(groups[""]) if "" in groups else _version_1(groups)


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


def _version_2(path: str) -> Usage:
    cpu = _pairs(read_or_empty(f"{path}/cpu.stat"))
    usage = Usage(
        # Empty unless Slurm set it; what is in effect would be all CPUs of the machine.
        cpus=count_cpus(read_or_empty(f"{path}/cpuset.cpus").decode()),
        # `file` contains shmem.
        memory=_kinds(_pairs(read_or_empty(f"{path}/memory.stat")), b"anon", b"file", b"shmem"),
    )
    for mode in ("user", "system"):
        if (counted := cpu.get(f"{mode}_usec".encode())) is not None:
            usage.counters[path, "cpu", mode] = int(counted) / 1e6
    if usage.memory:
        usage.limit = _number(read_or_empty(f"{path}/memory.max"))
        usage.peak = _number(read_or_empty(f"{path}/memory.peak"))
        kills = _pairs(read_or_empty(f"{path}/memory.events")).get(b"oom_kill")
        if kills is not None:
            usage.counters[path, "oom", ""] = int(kills)
    for resource in _PRESSURES:
        # The first line is `some avg10=… total=<microseconds>`.
        line = read_or_empty(f"{path}/{resource}.pressure").partition(b"\n")[0]
        stalled = _number(line.rpartition(b"total=")[2])
        if stalled is not None:
            usage.counters[path, "pressure", resource] = stalled / 1e6
    return usage


def _version_1(groups: Mapping[str, str]) -> Usage:
    usage = Usage()
    if path := groups.get("cpuacct", ""):
        cpu = _pairs(read_or_empty(f"{path}/cpuacct.stat"))
        for mode in ("user", "system"):
            if (counted := cpu.get(mode.encode())) is not None:
                usage.counters[path, "cpu", mode] = int(counted) / _TICKS
    if path := groups.get("cpuset", ""):
        usage.cpus = count_cpus(read_or_empty(f"{path}/cpuset.cpus").decode())
    if path := groups.get("memory", ""):
        memory = _pairs(read_or_empty(f"{path}/memory.stat"))
        usage.memory = _kinds(memory, b"total_rss", b"total_cache", b"total_shmem")
        limit = _number(read_or_empty(f"{path}/memory.limit_in_bytes"))
        usage.limit = limit if limit is not None and limit < _NO_LIMIT else None
        usage.peak = _number(read_or_empty(f"{path}/memory.max_usage_in_bytes"))
        for group in _leaves(path):
            kills = _pairs(read_or_empty(f"{group}/memory.oom_control")).get(b"oom_kill")
            if kills is not None:  # since Linux 4.13
                usage.counters[group, "oom", ""] = int(kills)
    return usage


def _leaves(group: str) -> Iterator[str]:
    """Yield the groups without others in them: version 1 counts kills where the process was."""
    children = subdirectories(group)
    if not children:
        yield group
    for name in children:
        yield from _leaves(f"{group}/{name}")


def _pairs(data: bytes) -> dict[bytes, bytes]:
    """Split lines of a name and a number."""
    words = data.split()
    return dict(zip(words[::2], words[1::2], strict=False))


def _number(data: bytes) -> int | None:
    text = data.strip()
    return int(text) if text.isdigit() else None


def _kinds(memory: Mapping[bytes, bytes], rss: bytes, cache: bytes, shmem: bytes) -> dict[str, int]:
    if rss not in memory or cache not in memory:
        return {}
    shared = int(memory.get(shmem, -1))  # before Linux 4.14 version 1 has no such line
    found = {"rss": int(memory[rss]), "cache": max(0, int(memory[cache]) - max(0, shared))}
    return found if shared < 0 else found | {"shmem": shared}
