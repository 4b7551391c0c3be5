"""What the control groups of a job counted, in version 1 and 2 alike."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.core.procfs import read_or_empty, subdirectories
from hpml_exporters.jobs import metrics

_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # version 1 has no word for it, only a number near the largest one
_PRESSURES = ("cpu", "memory", "io")


@dataclass
class JobUsage:
    """Figures of one job in one hierarchy; figures without a counter are missing.

    Attributes:
        counters: by the group that counted, the metric, and its label or none.
        memory: bytes by kind: rss, cache, shmem, which do not overlap.
        levels: by metric: CPUs, limit and peak of memory.
    """

    counters: dict[tuple[str, MetricSpec, str], float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    levels: dict[MetricSpec, int] = field(default_factory=dict)

    def set(self, spec: MetricSpec, level: int | None) -> None:
        """Note a level, if there is one."""
        if level is not None:
            self.levels[spec] = level


def read_usage(groups: Mapping[str, str]) -> JobUsage:
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


def _version_2(path: str) -> JobUsage:
    cpu = _pairs(f"{path}/cpu.stat")
    # `file` contains shmem.
    usage = JobUsage(memory=_kinds(_pairs(f"{path}/memory.stat"), b"anon", b"file", b"shmem"))
    # Not cpuset.cpus.effective: where Slurm sets no CPUs, it lists those of the whole machine.
    usage.set(metrics.CPUS, _cpus(f"{path}/cpuset.cpus"))
    for mode in ("user", "system"):
        if (counted := cpu.get(f"{mode}_usec".encode())) is not None:
            usage.counters[path, metrics.CPU_SECONDS, mode] = int(counted) / 1e6
    if usage.memory:
        usage.set(metrics.MEMORY_LIMIT, _number(read_or_empty(f"{path}/memory.max")))
        usage.set(metrics.MEMORY_PEAK, _number(read_or_empty(f"{path}/memory.peak")))
        _add_kills(usage, path, "memory.events")
    for resource in _PRESSURES:
        # The first line is `some avg10=… total=<microseconds>`.
        line = read_or_empty(f"{path}/{resource}.pressure").partition(b"\n")[0]
        stalled = _number(line.rpartition(b"total=")[2])
        if stalled is not None:
            usage.counters[path, metrics.PRESSURE, resource] = stalled / 1e6
    return usage


def _version_1(groups: Mapping[str, str]) -> JobUsage:
    usage = JobUsage()
    if path := groups.get("cpuacct"):
        cpu = _pairs(f"{path}/cpuacct.stat")
        for mode in ("user", "system"):
            if (counted := cpu.get(mode.encode())) is not None:
                usage.counters[path, metrics.CPU_SECONDS, mode] = int(counted) / _TICKS
    if path := groups.get("cpuset"):
        usage.set(metrics.CPUS, _cpus(f"{path}/cpuset.cpus"))
    if path := groups.get("memory"):
        memory = _pairs(f"{path}/memory.stat")
        usage.memory = _kinds(memory, b"total_rss", b"total_cache", b"total_shmem")
        limit = _number(read_or_empty(f"{path}/memory.limit_in_bytes"))
        usage.set(metrics.MEMORY_LIMIT, limit if limit and limit < _NO_LIMIT else None)
        peak = read_or_empty(f"{path}/memory.max_usage_in_bytes")
        usage.set(metrics.MEMORY_PEAK, _number(peak))
        for group in _leaves(path):
            _add_kills(usage, group, "memory.oom_control")  # since Linux 4.13
    return usage


def _add_kills(usage: JobUsage, group: str, name: str) -> None:
    kills = _pairs(f"{group}/{name}").get(b"oom_kill")
    if kills is not None:
        usage.counters[group, metrics.OOM_EVENTS, ""] = int(kills)


def _leaves(group: str) -> Iterator[str]:
    """Yield the innermost groups: version 1 counts a kill only where the process was."""
    children = subdirectories(group)
    if not children:
        yield group
    for name in children:
        yield from _leaves(f"{group}/{name}")


def _cpus(path: str) -> int | None:
    """Return how many CPUs a list like `0-3,8` names; None for an empty one."""
    total = 0
    for part in read_or_empty(path).decode().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        total += int(last or first) - int(first) + 1
    return total


def _pairs(path: str) -> dict[bytes, bytes]:
    words = read_or_empty(path).split()
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
