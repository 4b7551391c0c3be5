"""Compare a job with this machine, where the local backend would run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding
from hpml_orchestrator.scheduler.local.resources import (
    MAX_TASKS,
    Machine,
    cpu_ids,
    gpu_ids,
    memory_mb,
    short_hostname,
)
from hpml_orchestrator.script.render import memory_mebibytes
from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job

__all__ = ["check_local", "this_machine"]

_ELSEWHERE = "or submit it to a Slurm cluster"


def this_machine() -> Machine:
    """Return what the local backend has."""
    return Machine(tuple(cpu_ids()), tuple(gpu_ids()), memory_mb())


def check_local(job: Job, machine: Machine) -> list[Finding]:
    """Return what a job asks for and this machine does not have."""
    resources = job.resources
    host = f"this machine ({short_hostname()})"
    found = []

    def over(code: str, field: str, value: object, message: str, limit: object, hint: str) -> None:
        finding = Finding(
            "error", code, field, value, message, limit, f"ask for {hint}, {_ELSEWHERE}"
        )
        found.append(finding)

    if resources.nodes > 1:
        message = f"the job asks for {resources.nodes} nodes; {host} is one"
        over("local.nodes", "resources.nodes", resources.nodes, message, 1, "one node")
    tasks = len(job.tasks.indices) if job.tasks is not None else 0
    if tasks > MAX_TASKS:
        message = f"the array has {tasks} tasks; the local backend takes {MAX_TASKS} at once"
        over("local.array", "array", job.array, message, MAX_TASKS, "fewer tasks at a time")
    gpus = len(machine.gpus)
    if resources.gpu_count > gpus:
        over(
            "local.gpus",
            "resources.gpus",
            resources.gpus,
            f"the job asks for {_plural(resources.gpu_count, 'GPU')}; {host} has "
            f"{_plural(gpus, 'GPU')}",
            gpus,
            "fewer GPUs",
        )
    cpus = resources.ranks * resources.cpus_per_rank
    if cpus > len(machine.cpus):
        over(
            "local.cpus",
            "resources.cpus_per_rank",
            resources.cpus_per_rank,
            f"the job asks for {_plural(cpus, 'CPU')} ({resources.ranks} ranks of "
            f"{resources.cpus_per_rank}); {host} has {_plural(len(machine.cpus), 'CPU')}",
            len(machine.cpus),
            "fewer ranks or CPUs",
        )
    memory = memory_mebibytes(job) if resources.memory else 0
    if machine.memory_mb and memory > machine.memory_mb:
        over(
            "local.memory",
            "resources.memory",
            resources.memory,
            f"the job asks for {size_text(memory)} of memory; {host} has "
            f"{size_text(machine.memory_mb)}",
            size_text(machine.memory_mb),
            "less memory",
        )
    return found


def _plural(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
