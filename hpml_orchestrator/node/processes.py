"""The live processes of a node's ranks, out of /proc: their families, and where they run."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.placement.cpulist import cpu_numbers
from hpml_orchestrator.placement.proof import Process, Seen
from hpml_orchestrator.placement.visible import VISIBLE_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = [
    "THREADS_MAX",
    "Entry",
    "Look",
    "RankRecords",
    "entry_of",
    "is_alive",
    "openmp_of",
    "seen_of_record",
    "start_of",
    "visible_of",
]

THREADS_MAX = 64
"""Threads that are read of one process beside its first, while all of them run on the same CPUs."""

_PROCESSES_MAX = 256
_WORK_SECONDS, _WORK_PART = 1.0, 10  # CPU time, and its part of a child's, from which one works
_READ_BYTES = 16_384
_ENVIRONMENT_BYTES = 4 * 1024**2
_CPUS = b"\nCpus_allowed_list:\t"
# Fields of /proc/PID/stat behind the name: state, parent, CPU time of user and kernel, start.
_STATE, _PARENT, _USER, _KERNEL, _START = 0, 1, 11, 12, 19
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Entry:
    """One process in the kernel's table.

    Attributes:
        pid: its number.
        parent: its parent's.
        start_ticks: when it began, in clock ticks after boot: tells a number used again.
        busy_ticks: CPU time that it has used, in clock ticks.
        name: what the kernel calls it.
    """

    pid: int
    parent: int
    start_ticks: int
    busy_ticks: int
    name: str


class Look:
    """One look at all processes; what has ended since is left out as if it had never been there.

    Args:
        proc_root: where /proc is.
    """

    def __init__(self, proc_root: str = "/proc") -> None:
        self._root = proc_root
        self._user = os.getuid()
        self.entries: dict[int, Entry] = {}
        self._children: dict[int, list[int]] = {}
        for name in os.listdir(proc_root):
            if name.isdecimal():
                one = entry_of(int(name), proc_root)
                if one is not None:
                    self.entries[one.pid] = one
                    self._children.setdefault(one.parent, []).append(one.pid)

    def find(self, pid: int, start_ticks: int) -> Optional[Entry]:  # noqa: UP045
        """Return the process of that number and start; None for another that uses its number."""
        one = self.entries.get(pid)
        return one if one is not None and one.start_ticks == start_ticks else None

    def family(self, pid: int, strangers: Collection[int] = ()) -> list[Entry]:
        """Return a process and those that descend from it, parents first.

        Processes of other users are left out, and so are `strangers` with all that descends from
        them: other ranks.
        """
        found: list[Entry] = []
        pending = [pid]
        while pending and len(found) < _PROCESSES_MAX:
            number = pending.pop(0)
            one = self.entries.get(number)
            if one is None or not self._is_ours(number):
                continue
            found.append(one)
            pending += [child for child in self._children.get(number, ()) if child not in strangers]
        return found

    def main_of(self, family: list[Entry]) -> Entry:
        """Return the process that does the work: the busiest one, or which has forked that.

        A wrapper (a shell, numactl, a profiler) is none: it starts another program, and waits.
        One that has worked a good deal itself is none of those, but has a helper that works more.
        What was forked without a program of its own, as loader workers are, belongs to the one
        that did so, which is asked for by its command line.
        """
        worked = os.sysconf("SC_CLK_TCK") * _WORK_SECONDS
        known = {one.pid: one for one in family}
        main = max(family, key=lambda one: (one.busy_ticks, -family.index(one)))
        while main is not family[0] and main.parent in known:
            command = self._read(main.pid, "cmdline")
            above = known[main.parent]
            helper = b"multiprocessing" in command or command == self._read(above.pid, "cmdline")
            works = above.busy_ticks >= max(worked, main.busy_ticks / _WORK_PART)
            if not helper and not works:
                break
            main = above
        return main

    def process(self, one: Entry) -> Optional[Process]:  # noqa: UP045
        """Return where a process runs; None where it has ended or may not be looked at.

        Threads that are bound one by one must all be read: a part of them has a part of the CPUs.
        """
        cpus: set[str] = set()
        first = ""
        some, rest = self._threads(one.pid)
        for threads in (some, rest):
            for thread in threads:
                text = _cpus_of(self._read(one.pid, "task", str(thread), "status"))
                if text:
                    cpus.add(text)
                    first = text if thread == one.pid else first
            if len(cpus) < 2:  # noqa: PLR2004 - all alike
                break
        if not cpus:
            return None
        return Process(
            pid=one.pid,
            name=one.name,
            cpus=tuple(sorted(frozenset().union(*(_numbers(text) for text in cpus)))),
            first=tuple(sorted(_numbers(first))),
        )

    def environment(self, pid: int) -> dict[str, str]:
        """Return the variables that a process began with; empty where they cannot be read."""
        found: dict[str, str] = {}
        for pair in self._read(pid, "environ", limit=_ENVIRONMENT_BYTES).split(b"\0"):
            name, equals, value = pair.partition(b"=")
            if equals:
                found.setdefault(os.fsdecode(name), os.fsdecode(value))
        return found

    def _threads(self, pid: int) -> tuple[list[int], list[int]]:
        """The first thread and some others, evenly over all; and the rest.

        OpenMP's come late, the driver's early.
        """
        try:
            threads = sorted(map(int, os.listdir(f"{self._root}/{pid}/task")))
        except OSError:
            return [], []
        others = [one for one in threads if one != pid]
        count = min(len(others), THREADS_MAX)
        some = [others[place * len(others) // count] for place in range(count)]
        return [pid, *some], sorted(set(others).difference(some))

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.stat(f"{self._root}/{pid}").st_uid == self._user
        except OSError:
            return False

    def _read(self, pid: int, *names: str, limit: int = _READ_BYTES) -> bytes:
        return _read("/".join((self._root, str(pid), *names)), limit)


def entry_of(pid: int, proc_root: str = "/proc") -> Optional[Entry]:  # noqa: UP045
    """Return one process of the kernel's table; None when it has ended, a zombie too."""
    text = _read(f"{proc_root}/{pid}/stat")
    begin, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 2 :].split()
    if len(fields) <= _START or fields[_STATE] in (b"Z", b"X"):
        return None
    return Entry(
        pid,
        int(fields[_PARENT]),
        int(fields[_START]),
        int(fields[_USER]) + int(fields[_KERNEL]),
        os.fsdecode(text[begin + 1 : end]),
    )


def visible_of(environment: dict[str, str]) -> Optional[str]:  # noqa: UP045
    """Return the list of visible devices in an environment; None where it is not set."""
    return next((environment[name] for name in VISIBLE_VARIABLES if name in environment), None)


def openmp_of(environment: dict[str, str]) -> str:
    """Return the variable that has OpenMP bind its threads; empty where there is none."""
    for name in _OPENMP:
        value = environment.get(name, "")
        if value and not {"false", "none", "disabled"} & set(value.lower().split(",")):
            return f"{name}={value}"
    return ""


def _read(path: str, limit: int = _READ_BYTES) -> bytes:
    """Return a file of /proc, up to a limit in bytes; empty where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, limit)  # the kernel gives such a file in one piece
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _cpus_of(status: bytes) -> str:
    begin = status.find(_CPUS)
    if begin < 0:
        return ""
    begin += len(_CPUS)
    return status[begin : status.find(b"\n", begin)].decode("ascii", "replace")


@functools.lru_cache(maxsize=4096)
def _numbers(text: str) -> frozenset[int]:
    """The CPUs of a list; most threads of a node have one of a few."""
    try:
        return frozenset(cpu_numbers(text))
    except ValueError:
        return frozenset()


_READ_BYTES = 8 * 1024**2


class RankRecords:
    """A node's file of ranks, which grows.

    Args:
        path: the JSONL file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records of complete lines that came since the last call; often none."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return []
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read(_READ_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and _is_rank(record):
                found.append(record)
        return found


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the process of a rank's record still runs."""
    process = entry_of(record["pid"])
    return process is not None and process.start_ticks == start_of(record)


def start_of(record: dict[str, Any]) -> int:
    """Return when a rank's process began, in clock ticks after boot; -1 where that is unknown."""
    ticks = record.get("start_ticks")
    return ticks if type(ticks) is int else -1


def seen_of_record(record: dict[str, Any]) -> Seen:
    """Return what a rank's own record tells; what is missing or damaged is unknown."""
    child = record.get("child_cpus")
    inherited = record.get("inherited")
    visible, threads = record.get("visible"), record.get("threads")
    return Seen(
        local_rank=record["local_rank"],
        rank=record["rank"],
        pid=record["pid"],
        inherited=_cpus(inherited) or None,
        cpus=_cpus(record.get("cpus")),
        child_cpus=_cpus(child) or None,
        visible=visible if isinstance(visible, str) else None,
        memory=str(record.get("memory") or ""),
        threads=int(str(threads)) if str(threads).isdecimal() else None,
        nic=str(record.get("nic") or ""),
        error=str(record.get("error") or ""),
        note=str(record.get("note") or ""),
    )


def _is_rank(record: dict[str, Any]) -> bool:
    numbers = [record.get(name) for name in ("rank", "local_rank", "pid")]
    return all(type(one) is int and one >= 0 for one in numbers)


def _cpus(text: Any) -> tuple[int, ...]:
    """Return the CPUs of a list, or of the numbers that records of version 1 had."""
    try:
        if isinstance(text, list):
            return tuple(sorted({int(one) for one in text}))
        return cpu_numbers(text) if isinstance(text, str) else ()
    except (ValueError, TypeError, OverflowError):
        return ()
