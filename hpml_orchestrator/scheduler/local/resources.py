"""Requests of a script, resources of this machine, and the Slurm variables of a job."""

from __future__ import annotations

import glob
import os
import re
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import SchedulerError, counted
from hpml_orchestrator.records.array import parse_array
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.records.units import parse_gpus, parse_mebibytes, parse_time_limit, read_gres
from hpml_orchestrator.scheduler.slurm.options import (
    SBATCH,
    HeaderError,
    header_words,
    read_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.scheduler.local.jobs import LocalJob

MAX_TASKS = 1000
"""Most tasks of an array on this machine."""

_DEFAULT_WARNING_SECONDS = 60


@dataclass(frozen=True)
class StopSignal:
    """`--signal=[B:]SIGNAL[@SECONDS]`: a warning before the time limit.

    Attributes:
        number: the signal.
        seconds: how long before the limit it is sent.
        batch_shell_only: `B:`, only the batch shell gets it; otherwise only the steps do.
    """

    number: int
    seconds: int
    batch_shell_only: bool


@dataclass(frozen=True)
class Directives:
    """What a script requests; None if not given.

    Attributes:
        time_limit_seconds: None for no limit.
        gpus: GPUs of the whole job from `--gpus`, `--gpus-per-node` or `--gres=gpu:`.
        memory_mb: memory of the node in MiB, from `--mem`; 0 is all of it.
        array: the tasks of a job array, as written; empty for a single job.
        written: option name -> value as written, for messages.
    """

    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus: int | None = None
    gpus_per_task: int | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    memory_per_gpu_mb: int | None = None
    time_limit_seconds: int | None = None
    stop_signal: StopSignal | None = None
    exclusive: bool = False
    overcommit: bool = False
    job_name: str = ""
    array: str = ""
    written: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class LocalMachine:
    """This machine: ids of its CPUs (hardware threads) and GPUs, its memory in MiB (0: unknown)."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]
    memory_mb: int


@dataclass(frozen=True)
class Needs:
    """How many CPUs and GPUs a job holds while it runs."""

    cpus: int
    gpus: int


def read_directives(script: str) -> Directives:
    r"""Return the requests of a script's `#SBATCH` header.

    Raises:
        SchedulerError: sbatch would refuse the header, or this machine cannot honour it.

    >>> read_directives("#!/bin/bash\n#SBATCH -n 2 --time=1:30 # both\n").time_limit_seconds
    90
    """
    # sbatch refuses it as well. A job that runs here must not fail later, when it goes to a
    # cluster.
    if not script.startswith("#!"):
        raise SchedulerError(
            "this does not look like a batch script",
            hint="its first line must be #! and the path of an interpreter, as sbatch asks",
        )
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    try:
        options, _ = read_options(list(header_words(script)), SBATCH)
    except HeaderError as error:
        raise SchedulerError(f"job.sh line {error.line}: {error}", hint=error.hint) from error
    for option in options:
        if option.name == "dependency":
            raise SchedulerError(
                f"{option.shown}: the local backend knows no such dependency",
                hint="name the other run in `after` of the job file, or by --after",
            )
        field, reader = _READERS.get(option.name, ("", str))
        try:
            value = reader(option.value)
        except ValueError as error:
            raise SchedulerError(
                f"{option.shown}: {error}",
                hint=f"correct the #SBATCH line with --{option.name} in job.sh",
            ) from error
        # other options mean nothing here; the submission names the output file
        if field and not (option.name == "gres" and value is None):
            values[field] = value
            written[field] = option.shown
    return Directives(**values, written=tuple(written.items()))


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < 1:
        raise ValueError(f"{text!r} is not a number above zero")
    return int(text)


def _nodes(text: str) -> int:
    """Return the minimum number of nodes of `2` or `1-4`."""
    least, dash, most = text.partition("-")
    if dash and _count(most) < _count(least):
        raise ValueError(f"{text!r}: the maximum is below the minimum")
    return _count(least)


def _gpus(text: str) -> int:
    return parse_gpus(text).count


def _gres(text: str) -> int | None:
    gpus = [count for name, _, count in read_gres(text) if name == "gpu"]
    return sum(gpus) if gpus else None


def _stop_signal(text: str) -> StopSignal:
    body, at, seconds = text.partition("@")
    flags, colon, name = body.upper().rpartition(":")
    if colon and not set(flags) <= {"B", "R"}:
        raise ValueError(f"{flags!r} is neither B nor R")
    if at and not re.fullmatch(r"\d+", seconds, re.ASCII):
        raise ValueError(f"{seconds!r} is not a number of seconds")
    numbers = {number.name.removeprefix("SIG"): int(number) for number in signal.Signals}
    number = numbers.get(name.removeprefix("SIG"), 0)
    if re.fullmatch(r"\d{1,2}", name, re.ASCII):
        number = int(name)
    if not 0 < number < signal.NSIG:
        raise ValueError(f"{name!r} is not a signal")
    return StopSignal(number, int(seconds) if at else _DEFAULT_WARNING_SECONDS, "B" in flags)


_READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "nodes": ("nodes", _nodes),
    "ntasks": ("ntasks", _count),
    "ntasks-per-node": ("ntasks_per_node", _count),
    "cpus-per-task": ("cpus_per_task", _count),
    "cpus-per-gpu": ("cpus_per_gpu", _count),
    "gpus": ("gpus", _gpus),
    "gpus-per-node": ("gpus", _gpus),
    "gres": ("gpus", _gres),
    "gpus-per-task": ("gpus_per_task", _gpus),
    "mem": ("memory_mb", parse_mebibytes),
    "mem-per-cpu": ("memory_per_cpu_mb", parse_mebibytes),
    "mem-per-gpu": ("memory_per_gpu_mb", parse_mebibytes),
    "time": ("time_limit_seconds", parse_time_limit),
    "signal": ("stop_signal", _stop_signal),
    "job-name": ("job_name", str),
    "exclusive": ("exclusive", lambda _: True),
    "overcommit": ("overcommit", lambda _: True),
    "array": ("array", lambda text: str(parse_array(text))),
}
"""Option -> field of `Directives` and the reader of its value; other options mean nothing here."""


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


def short_hostname() -> str:
    """Return the name of this machine without its domain."""
    return socket.gethostname().partition(".")[0] or "localhost"


def needs_of(asked: Directives, machine: LocalMachine) -> Needs:
    """Return the CPUs and GPUs of a job.

    Raises:
        SchedulerError: this machine does not have them; names the directive and what it has.
    """
    tasks = asked.ntasks or asked.ntasks_per_node or 1
    nodes = asked.nodes or 1
    if asked.ntasks and asked.ntasks_per_node:
        # Slurm adds nodes until the tasks fit, so a script may ask for two nodes without naming
        # them.
        nodes = max(nodes, -(-asked.ntasks // asked.ntasks_per_node))
    if nodes > 1:
        names = ["nodes"] if (asked.nodes or 1) > 1 else ["ntasks", "ntasks_per_node"]
        _refuse(asked, names, f"{nodes} nodes", "one node")
    gpus = max(asked.gpus or 0, (asked.gpus_per_task or 0) * tasks)
    if gpus > len(machine.gpus):
        name = "gpus" if gpus == asked.gpus else "gpus_per_task"
        _refuse(asked, [name], counted(gpus, "GPU"), counted(len(machine.gpus), "GPU"))
    cpus = max(tasks * (asked.cpus_per_task or 1), gpus * (asked.cpus_per_gpu or 0))
    if asked.overcommit:
        cpus = min(cpus, len(machine.cpus))
    if cpus > len(machine.cpus):
        names = ["ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu"]
        _refuse(asked, names, counted(cpus, "CPU"), counted(len(machine.cpus), "CPU"))
    # After the checks above: --exclusive takes what there is, and so never asks for too much.
    if asked.exclusive:
        cpus = len(machine.cpus)
    for name, memory in (
        ("memory_mb", asked.memory_mb or 0),
        ("memory_per_cpu_mb", (asked.memory_per_cpu_mb or 0) * cpus),
        ("memory_per_gpu_mb", (asked.memory_per_gpu_mb or 0) * gpus),
    ):
        if machine.memory_mb and memory > machine.memory_mb:
            _refuse(asked, [name], f"{memory} MiB of memory", f"{machine.memory_mb} MiB")
    return Needs(cpus=cpus, gpus=gpus)


def _refuse(asked: Directives, names: list[str], wanted: str, available: str) -> None:
    written = dict(asked.written)
    directives = " ".join(written[name] for name in names if name in written)
    raise SchedulerError(
        f"{directives} asks for {wanted}; this machine ({short_hostname()}) has {available}",
        hint="ask for less, or submit it to a Slurm cluster",
    )


def slurm_variables(job: LocalJob, cluster: str) -> dict[str, str]:
    """Return the variables of a one-node Slurm job, for a job that has its CPUs and GPUs."""
    request, cpus, gpus = job.request, job.status.cpus, job.status.gpus
    asked, started = request.directives, job.status.started or 0.0
    tasks = asked.ntasks or asked.ntasks_per_node
    host = short_hostname()
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job.number),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"), host),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), 0),
        **dict.fromkeys(("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"), len(cpus)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
        "SLURM_JOB_NAME": request.name,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_TASKS_PER_NODE": tasks or 1,
        "SLURM_SUBMIT_DIR": request.directory,
        "SLURM_SUBMIT_HOST": request.host,
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_USER": user_name(os.getuid()),
        "SLURM_JOB_START_TIME": int(started),
        "SLURM_RESTART_COUNT": job.status.restarts or None,
        "SLURM_MEM_PER_NODE": asked.memory_mb,
        "SLURM_MEM_PER_CPU": asked.memory_per_cpu_mb,
        "SLURM_MEM_PER_GPU": asked.memory_per_gpu_mb,
        **{
            f"SLURM_{name.upper()}": getattr(asked, name)
            for name in ("ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus_per_task")
        },
    }
    if gpus:
        values["SLURM_GPUS_ON_NODE"] = values["SLURM_GPUS_PER_NODE"] = len(gpus)
        values["SLURM_JOB_GPUS"] = values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if asked.time_limit_seconds is not None:
        values["SLURM_JOB_END_TIME"] = int(started + asked.time_limit_seconds)
    indices = request.indices
    if indices:
        values["SLURM_ARRAY_JOB_ID"] = job.directory.name
        values["SLURM_ARRAY_TASK_ID"] = job.index
        values["SLURM_ARRAY_TASK_COUNT"] = len(indices)
        values["SLURM_ARRAY_TASK_MIN"] = indices[0]
        values["SLURM_ARRAY_TASK_MAX"] = indices[-1]
        values["SLURM_ARRAY_TASK_STEP"] = indices[1] - indices[0] if len(indices) > 1 else 1
    return {name: str(value) for name, value in values.items() if value is not None}
