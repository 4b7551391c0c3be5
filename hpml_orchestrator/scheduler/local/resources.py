"""What a job needs of this machine, whether it has it, and the Slurm variables that say so."""

from __future__ import annotations

import glob
import os
import pwd
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.scheduler.local.directives import Directives

__all__ = [
    "Machine",
    "Needs",
    "cpu_ids",
    "gpu_ids",
    "memory_mb",
    "needs_of",
    "short_hostname",
    "slurm_variables",
]

# Left in the environment of a job; every other SLURM_* is of some job around the submission.
_KEPT = frozenset({"SLURM_CONF"})


@dataclass(frozen=True)
class Machine:
    """What this machine has: ids of its CPUs (hardware threads) and GPUs, its memory in MiB."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]
    memory_mb: int


@dataclass(frozen=True)
class Needs:
    """Slots that a job takes while it runs."""

    cpus: int
    gpus: int


def cpu_ids() -> list[int]:
    """Return the CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0))


def gpu_ids() -> list[str]:
    """Return the NVIDIA GPUs of this machine as CUDA_VISIBLE_DEVICES would name them.

    CUDA_VISIBLE_DEVICES of this process decides where it is set (like CUDA, up to the first
    entry that is none); otherwise the device files are counted.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    found: list[str] = []
    for entry in visible.split(","):
        word = entry.strip()
        if not (word.isdecimal() or word.startswith(("GPU-", "MIG-"))):
            break
        found.append(word)
    return found


def memory_mb() -> int:
    """Return the memory of this machine in MiB; 0 where it is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemTotal:"):
                    return int(line.split()[1]) // 1024
    except OSError:
        pass
    return 0


def short_hostname() -> str:
    """Return the name of this machine without its domain."""
    return socket.gethostname().partition(".")[0] or "localhost"


def needs_of(asked: Directives, machine: Machine) -> Needs:
    """Return the slots of a job.

    Raises:
        SchedulerError: this machine cannot have them; names the directive and what there is.
    """
    written = dict(asked.written)
    if (asked.nodes or 1) > 1:
        raise _refusal(
            written["nodes"], f"{asked.nodes} nodes", "one node", "ask for one node, or submit it"
        )
    tasks = asked.ntasks or asked.ntasks_per_node or 1
    if asked.ntasks and asked.ntasks_per_node and asked.ntasks > asked.ntasks_per_node:
        nodes = -(-asked.ntasks // asked.ntasks_per_node)
        raise _refusal(
            f"{written['ntasks']} with {written['ntasks_per_node']}",
            f"{nodes} nodes",
            "one node",
            "lower --ntasks, or submit it",
        )
    per_task = (asked.gpus_per_task or 0) * tasks
    gpus = max(asked.gpus or 0, per_task)
    if gpus > len(machine.gpus):
        name = "gpus" if (asked.gpus or 0) >= per_task else "gpus_per_task"
        raise _refusal(
            written[name],
            _plural(gpus, "GPU"),
            _plural(len(machine.gpus), "GPU"),
            "ask for fewer GPUs, or submit it",
        )
    cpus = max(tasks * (asked.cpus_per_task or 1), gpus * (asked.cpus_per_gpu or 0))
    if cpus > len(machine.cpus):
        names = ("ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu")
        raise _refusal(
            " ".join(written[name] for name in names if name in written),
            _plural(cpus, "CPU"),
            _plural(len(machine.cpus), "CPU"),
            "lower --ntasks or --cpus-per-task, or submit it",
        )
    if asked.exclusive:
        cpus = len(machine.cpus)
    _check_memory(asked, machine, cpus, gpus)
    return Needs(cpus=cpus, gpus=gpus)


def slurm_variables(
    job: Mapping[str, Any], *, cpus: Sequence[int], gpus: Sequence[str], started: float
) -> dict[str, str]:
    """Return the variables of a one-node Slurm job.

    Args:
        job: the job's record.
        cpus: ids of the CPUs that it got.
        gpus: ids of the GPUs that it got.
        started: seconds since the epoch.
    """
    asked = job["directives"]
    tasks = asked["ntasks"] or asked["ntasks_per_node"]
    host = short_hostname()
    job_id = job["job_id"]
    values: dict[str, object] = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_JOB_NAME": job["name"],
        "SLURM_CLUSTER_NAME": job["cluster"],
        "SLURM_NNODES": 1,
        "SLURM_JOB_NUM_NODES": 1,
        "SLURM_NODELIST": host,
        "SLURM_JOB_NODELIST": host,
        "SLURMD_NODENAME": host,
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_GTIDS": 0,
        "SLURM_TASKS_PER_NODE": tasks or 1,
        "SLURM_CPUS_ON_NODE": len(cpus),
        "SLURM_JOB_CPUS_PER_NODE": len(cpus),
        "SLURM_SUBMIT_DIR": job["directory"],
        "SLURM_SUBMIT_HOST": job["host"],
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_USER": _user(),
        "SLURM_JOB_START_TIME": int(started),
    }
    if tasks:
        values["SLURM_NTASKS"] = values["SLURM_NPROCS"] = tasks
    optional = {
        "SLURM_NTASKS_PER_NODE": asked["ntasks_per_node"],
        "SLURM_CPUS_PER_TASK": asked["cpus_per_task"],
        "SLURM_CPUS_PER_GPU": asked["cpus_per_gpu"],
        "SLURM_GPUS_PER_TASK": asked["gpus_per_task"],
        "SLURM_MEM_PER_NODE": asked["memory_mb"],
        "SLURM_MEM_PER_CPU": asked["memory_per_cpu_mb"],
        "SLURM_MEM_PER_GPU": asked["memory_per_gpu_mb"],
    }
    values.update({name: value for name, value in optional.items() if value is not None})
    if gpus:
        values["SLURM_GPUS_ON_NODE"] = values["SLURM_GPUS_PER_NODE"] = len(gpus)
        values["SLURM_JOB_GPUS"] = values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if asked["time_limit_seconds"] is not None:
        values["SLURM_JOB_END_TIME"] = int(started + asked["time_limit_seconds"])
    array = job.get("array")
    if array:
        values["SLURM_ARRAY_JOB_ID"] = array["id"]
        values["SLURM_ARRAY_TASK_ID"] = array["index"]
        for name in ("count", "min", "max", "step"):
            values[f"SLURM_ARRAY_TASK_{name.upper()}"] = array[name]
    if job["restarts"]:
        values["SLURM_RESTART_COUNT"] = job["restarts"]
    return {name: str(value) for name, value in values.items()}


def without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a Slurm job around the submission."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SLURMD_", "HPML_LOCAL_"))
    }


def _check_memory(asked: Directives, machine: Machine, cpus: int, gpus: int) -> None:
    wanted = {
        "memory_mb": asked.memory_mb or 0,
        "memory_per_cpu_mb": (asked.memory_per_cpu_mb or 0) * cpus,
        "memory_per_gpu_mb": (asked.memory_per_gpu_mb or 0) * gpus,
    }
    for name, amount in wanted.items():
        if machine.memory_mb and amount > machine.memory_mb:
            raise _refusal(
                dict(asked.written)[name],
                f"{amount} MiB of memory",
                f"{machine.memory_mb} MiB",
                "ask for less memory, or submit it",
            )


def _refusal(directive: str, wanted: str, there: str, hint: str) -> SchedulerError:
    return SchedulerError(
        f"{directive} asks for {wanted}; this machine ({short_hostname()}) has {there}",
        hint=f"{hint} to a Slurm cluster",
    )


def _plural(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
