"""What this machine has, what a job needs of it, and the Slurm variables of a job."""

from __future__ import annotations

import glob
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.records.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.local.jobs import LocalJob

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


def shortages(job: Job, machine: LocalMachine) -> Iterator[tuple[str, int, str]]:
    """Yield what a job asks for and this machine lacks: a name, what is here, and the request."""
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
            yield name, has, shown


def slurm_variables(job: LocalJob, cluster: str) -> dict[str, str]:
    """Return the variables of a one-node Slurm job, for a job that has its CPUs and GPUs."""
    request, needs, status = job.request, job.request.needs, job.status
    started = int(status.started or 0)
    host = short_hostname()
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job.number),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"), host),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), 0),
        **dict.fromkeys(("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"), len(status.cpus)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), needs.tasks),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), needs.tasks),
        "SLURM_CPUS_PER_TASK": needs.cpus_per_task,
        "SLURM_MEM_PER_NODE": needs.memory_mb,
        "SLURM_JOB_NAME": request.name,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_SUBMIT_DIR": request.directory,
        "SLURM_SUBMIT_HOST": request.host,
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_USER": user_name(os.getuid()),
        "SLURM_JOB_START_TIME": started,
        "SLURM_JOB_END_TIME": started + needs.seconds,
        "SLURM_RESTART_COUNT": status.restarts or None,
    }
    if gpus := status.gpus:
        values |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), len(gpus))
        values |= dict.fromkeys(("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"), ",".join(gpus))
    if indices := request.indices:
        values |= {
            "SLURM_ARRAY_JOB_ID": job.directory.name,
            "SLURM_ARRAY_TASK_ID": job.index,
            "SLURM_ARRAY_TASK_COUNT": len(indices),
            "SLURM_ARRAY_TASK_MIN": indices[0],
            "SLURM_ARRAY_TASK_MAX": indices[-1],
            "SLURM_ARRAY_TASK_STEP": indices[1] - indices[0] if len(indices) > 1 else 1,
        }
    return {name: str(value) for name, value in values.items() if value is not None}
