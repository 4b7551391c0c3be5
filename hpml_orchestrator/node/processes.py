"""The processes of a node's ranks: records of hpml-bind, process trees, and CPUs in use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.placement.model import VISIBLE_VARIABLES
from hpml_orchestrator.placement.verify import Process, Seen
from hpml_orchestrator.records.process import ProcessStat, live_processes, read_stat
from hpml_orchestrator.topology.cpulist import parse_list

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from hpml_orchestrator.records.schema import BindingRecord

_PROCESSES_MAX = 256
# A parent is working if it used this much CPU time, and at least a tenth of its child's.
_WORK_SECONDS, _WORK_PART = 1.0, 10
_CPUS = b"\nCpus_allowed_list:\t"
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class StartedRank:
    """A rank started by hpml-bind."""

    seen: Seen  # as recorded by hpml-bind
    start_ticks: int = -1  # start of its process in clock ticks after boot; -1 if unknown
    program: str = ""  # the first word of its command

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.seen.rank

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self.seen.pid


class RankRecords:
    """Reader of the lines that hpml-bind appends for each rank of a node.

    Args:
        path: the JSONL file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[StartedRank]:
        """Return the ranks in complete lines since the last call; often none."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return []
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return []
        # A rank may be in the middle of its line; the next call reads the rest.
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = []
        for line in complete.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if _names_a_process(record):
                records.append(_started_rank(record))
        return records


def _names_a_process(record: object) -> bool:
    return isinstance(record, dict) and all(
        type(record.get(name)) is int for name in ("rank", "local_rank", "pid")
    )


def is_alive(rank: StartedRank) -> bool:
    """Return whether the process of a rank is running."""
    stat = read_stat(rank.pid)
    return stat is not None and not stat.ended and stat.start_ticks == rank.start_ticks


def status_of(pid: int, proc_root: str = "/proc") -> dict[str, str]:
    """Return the fields of `/proc/PID/status`; empty if it cannot be read."""
    try:
        with open(f"{proc_root}/{pid}/status", encoding="utf-8", errors="replace") as stream:
            pairs = (line.partition(":") for line in stream)
            return {name: value.strip() for name, _, value in pairs}
    except OSError:
        return {}


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, from `/proc/PID/status`."""
    return bool(int(status_of(pid).get("SigCgt") or "0", 16) >> (number - 1) & 1)


def kill_families(ranks: Collection[StartedRank], number: int = signal.SIGKILL) -> None:
    """Send a signal to live ranks and all their descendants."""
    table = ProcessTable()
    # The pid alone is not enough: the kernel may have reused it.
    pids = {rank.pid for rank in ranks if table.lives(rank.pid, rank.start_ticks)}
    for pid in pids:
        for stat in table.family(pid, pids - {pid}):
            with contextlib.suppress(OSError):
                os.kill(stat.pid, number)


def _started_rank(record: BindingRecord) -> StartedRank:
    """Convert a rank's record; missing or damaged fields become unknown."""
    visible, threads, ticks = (record.get(name) for name in ("visible", "threads", "start_ticks"))
    seen = Seen(
        local_rank=record["local_rank"] or 0,
        rank=record["rank"],
        pid=record["pid"],
        inherited=_cpus(record.get("inherited")) or None,
        cpus=_cpus(record.get("cpus")),
        child_cpus=_cpus(record.get("child_cpus")) or None,
        visible=visible if isinstance(visible, str) else None,
        memory=str(record.get("memory") or ""),
        threads=threads if type(threads) is int else None,
        nic=str(record.get("nic") or ""),
        error=str(record.get("error") or ""),
        note=str(record.get("note") or ""),
    )
    program = str(record.get("program") or "")
    return StartedRank(seen, ticks if type(ticks) is int else -1, program)


def _cpus(value: object) -> tuple[int, ...]:
    return tuple(sorted(_numbers(value))) if isinstance(value, str) else ()


class ProcessTable:
    """A snapshot of all processes; processes that have ended since are omitted.

    Args:
        proc_root: where /proc is.

    Attributes:
        stats: live processes by pid.
    """

    def __init__(self, proc_root: str = "/proc") -> None:
        self._root = proc_root
        self._user = os.getuid()
        self.stats: dict[int, ProcessStat] = {}
        self._children: dict[int, list[int]] = {}
        for stat in live_processes(proc_root):
            self.stats[stat.pid] = stat
            self._children.setdefault(stat.parent, []).append(stat.pid)

    def lives(self, pid: int, start_ticks: int) -> bool:
        """Return whether the process with this pid and start is running (the pid may be reused)."""
        return pid in self.stats and self.stats[pid].start_ticks == start_ticks

    def family(self, pid: int, others: Collection[int] = ()) -> list[ProcessStat]:
        """Return a process and its descendants, parents first.

        Omit processes of other users, and `others` (other ranks) with their descendants.
        """
        family: list[ProcessStat] = []
        pending = [pid]
        while pending and len(family) < _PROCESSES_MAX:
            number = pending.pop(0)
            if number in self.stats and self._is_ours(number):
                family.append(self.stats[number])
                pending += [
                    child for child in self._children.get(number, ()) if child not in others
                ]
        return family

    def main_of(self, family: list[ProcessStat]) -> ProcessStat:
        """Return the rank's main process: the busiest one or the process that forked it.

        Start at the busiest process and go up. A helper (a loader worker, or a fork with the
        command line of its parent) belongs to its parent. A parent that used much CPU time is the
        main process and the child its helper. Any other parent is a wrapper (a shell, numactl, a
        profiler) that only waits, so stop below it.
        """
        worked = os.sysconf("SC_CLK_TCK") * _WORK_SECONDS
        known = {stat.pid: stat for stat in family}
        main = max(family, key=lambda stat: (stat.cpu_ticks, -family.index(stat)))
        while main is not family[0] and main.parent in known:
            command = self._read(main.pid, "cmdline")
            parent = known[main.parent]
            helper = b"multiprocessing" in command or command == self._read(parent.pid, "cmdline")
            works = parent.cpu_ticks >= max(worked, main.cpu_ticks / _WORK_PART)
            if not helper and not works:
                break
            main = parent
        return main

    def process(self, stat: ProcessStat) -> Process | None:
        """Return a process with its CPUs; None if it has ended or is not readable.

        Threads may be bound separately, so return the union of their CPUs.
        """
        cpus: set[str] = set()
        first = ""
        try:
            threads = os.listdir(f"{self._root}/{stat.pid}/task")
        except OSError:
            return None
        for thread in threads:
            status = self._read(stat.pid, "task", thread, "status")
            text = status.partition(_CPUS)[2].partition(b"\n")[0].decode("ascii", "replace")
            if text:
                cpus.add(text)
                first = text if thread == str(stat.pid) else first
        if not cpus:
            return None
        return Process(
            pid=stat.pid,
            name=stat.name,
            cpus=tuple(sorted(frozenset().union(*map(_numbers, cpus)))),
            first=tuple(sorted(_numbers(first))),
        )

    def environment(self, pid: int) -> dict[str, str]:
        """Return the initial variables of a process; empty if they cannot be read."""
        variables: dict[str, str] = {}
        for pair in self._read(pid, "environ").split(b"\0"):
            name, equals, value = pair.partition(b"=")
            if equals:
                variables.setdefault(os.fsdecode(name), os.fsdecode(value))
        return variables

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.stat(f"{self._root}/{pid}").st_uid == self._user
        except OSError:
            return False

    def _read(self, pid: int, *names: str) -> bytes:
        try:
            with open("/".join((self._root, str(pid), *names)), "rb") as stream:
                return stream.read()
        except OSError:
            return b""


def visible_of(environment: Mapping[str, str]) -> str | None:
    """Return the list of visible devices in an environment; None if it is not set."""
    return next((environment[name] for name in VISIBLE_VARIABLES if name in environment), None)


def openmp_of(environment: Mapping[str, str]) -> str:
    """Return the variable that makes OpenMP bind its threads; empty if none does."""
    for name in _OPENMP:
        value = environment.get(name, "")
        if value and not {"false", "none", "disabled"} & set(value.lower().split(",")):
            return f"{name}={value}"
    return ""


def _numbers(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_list(text))
    except ValueError:
        return frozenset()
