"""The local machine: its processes, cores, memory and GPUs."""

from __future__ import annotations

import glob
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.process import environment_of, live_processes, read_stat
from hpml_orchestrator.records.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.process import ProcessStat

SUPERVISOR_MARK = "HPML_LOCAL_SUPERVISOR"
"""Variable in a supervisor's own environment: it is never a part of the job around it."""

_PAUSE_SECONDS = 0.02


class Identity(NamedTuple):
    """A pid with its start time in clock ticks, which tells it from later processes of that pid."""

    pid: int
    start: int


def identity(pid: int) -> Identity:
    """Return the identity of a process; the start is -1 if no process has that pid."""
    process = read_stat(pid)
    return Identity(pid, process.start_ticks if process else -1)


def is_alive(who: Identity) -> bool:
    """Return whether that same process still runs; a zombie does not count."""
    process = read_stat(who.pid)
    return process is not None and process.start_ticks == who.start and not process.ended


def send(who: Identity, number: int) -> bool:
    """Signal that same process; return whether it was still there."""
    try:
        if is_alive(who):
            os.kill(who.pid, number)
            return True
    except (ProcessLookupError, PermissionError):
        pass
    return False


def descendants(root: int) -> set[Identity]:
    """Return all processes below `root`, except other supervisors and what is below those."""
    children: dict[int, list[ProcessStat]] = {}
    for process in live_processes():
        children.setdefault(process.parent, []).append(process)
    members: set[Identity] = set()
    parents = [root]
    while parents:
        for process in children.get(parents.pop(), ()):
            # A job may submit jobs. Their supervisors descend from it, but they outlive it, as
            # under Slurm.
            mark = f"{SUPERVISOR_MARK}=".encode()
            if not any(entry.startswith(mark) for entry in environment_of(process.pid)):
                members.add(Identity(process.pid, process.start_ticks))
                parents.append(process.pid)
    return members


def marked(variables: Iterable[str]) -> set[Identity]:
    """Return the processes that have all these `NAME=value` in their environment."""
    wanted = {os.fsencode(variable) for variable in variables}
    return {
        Identity(process.pid, process.start_ticks)
        for process in live_processes()
        if wanted <= set(environment_of(process.pid)) and process.pid != os.getpid()
    }


def kill_until_gone(
    find: Callable[[], Iterable[Identity]],
    *,
    patience_seconds: float,
    reap: Callable[[], None] = lambda: None,
) -> list[int]:
    """SIGKILL what `find` returns until it finds nothing; return the pids that survive."""
    until = time.monotonic() + patience_seconds
    while True:
        late = time.monotonic() > until  # before the search: this process may be paused after it
        left = list(find())
        # Search again after each round: a process that forks between the search and the kill leaves
        # a child that the first list does not have.
        for who in left:
            send(who, signal.SIGKILL)
        reap()
        if not left or late:
            return sorted(who.pid for who in left)
        time.sleep(_PAUSE_SECONDS)


# What this machine has, and what a job needs of it.

MAX_TASKS = 1000
"""Most tasks of an array on this machine."""


@dataclass(frozen=True)
class LocalMachine:
    """This machine: ids of its CPUs (hardware threads) and GPUs, its memory in MiB (0: unknown)."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]
    memory_mb: int


@dataclass(frozen=True)
class Needs:
    """What a job holds while it runs, and what Slurm would tell it of its request.

    Attributes:
        cpus, gpus: how many it holds.
        tasks: that its launcher is started as.
        memory_mb: None if the job does not say.
        seconds: its time limit.
    """

    cpus: int
    gpus: int
    tasks: int = 1
    cpus_per_task: int = 1
    memory_mb: int | None = None
    seconds: int = 3600


def cpu_ids() -> list[int]:
    """Return the CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0))


def gpu_ids() -> list[str]:
    """Return the NVIDIA GPUs of this machine as CUDA_VISIBLE_DEVICES would name them.

    If CUDA_VISIBLE_DEVICES of this process is set, it decides; like CUDA, read it up to the first
    invalid entry. Otherwise count the device files.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    ids: list[str] = []
    for entry in visible.split(","):
        device = entry.strip()
        if not (device.isdecimal() or device.startswith(("GPU-", "MIG-"))):
            break
        ids.append(device)
    return ids


def memory_mb() -> int:
    """Return the memory of this machine in MiB; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024**2
    except (OSError, ValueError):
        return 0


def this_machine() -> LocalMachine:
    """Return what this machine has, as far as this process may use it."""
    return LocalMachine(tuple(cpu_ids()), tuple(gpu_ids()), memory_mb())


def short_hostname() -> str:
    """Return the name of this machine without its domain."""
    return socket.gethostname().partition(".")[0] or "localhost"


def needs_of(job: Job, machine: LocalMachine) -> Needs:
    """Return what a job needs; `shortages` says whether the machine has it."""
    resources = job.resources
    cpus = resources.cores
    if "--overcommit" in resources.extra:  # ranks share CPUs
        cpus = min(cpus, len(machine.cpus))
    if resources.exclusive:
        cpus = max(cpus, len(machine.cpus))
    return Needs(
        cpus=cpus,
        gpus=resources.gpu_count,
        tasks=job.tasks_per_node,
        cpus_per_task=resources.cores // job.tasks_per_node,
        memory_mb=job.memory_mib if resources.node_memory else None,
        seconds=resources.time,
    )


def shortages(job: Job, machine: LocalMachine) -> Iterator[tuple[str, int | str, str]]:
    """Yield what a job asks for and this machine lacks: a name, what is here, and the request.

    What is here is a number, for memory a text such as `16G`.
    """
    resources, needs = job.resources, needs_of(job, machine)
    memory = needs.memory_mb or 0
    ranks = f"({resources.ranks} ranks of {resources.cpus_per_rank})"
    tasks = len(job.array.indices) if job.array else 0
    for name, asked, has, shown in (
        ("nodes", resources.nodes, 1, counted(resources.nodes, "node")),
        ("array", tasks, MAX_TASKS, counted(tasks, "array task")),
        ("gpus", needs.gpus, len(machine.gpus), counted(needs.gpus, "GPU")),
        ("cpus", needs.cpus, len(machine.cpus), f"{counted(needs.cpus, 'CPU')} {ranks}"),
        ("memory", memory, machine.memory_mb or memory, f"{size_text(memory)} of memory"),
    ):
        if asked > has:
            yield name, size_text(has) if name == "memory" else has, shown
