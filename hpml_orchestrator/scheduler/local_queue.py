"""Whose turn it is on this machine: the order of the jobs that wait, and what each would get.

Jobs start in the order of their ids. Tasks of an array have ids of their own, one after the other;
those over the array's limit (`%2`) step aside and let later jobs pass.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.local_jobs import Job

__all__ = ["line", "starts"]


def line(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that wait and may start as soon as there is room, in order.

    Args:
        jobs: all that are not over, in order.
    """
    full = _full_arrays(jobs)
    return [job for job in jobs if not job.holds_slots and job.array_id not in full]


def starts(job: Job, jobs: Sequence[Job]) -> tuple[list[int], list[str]] | str:
    """Return the CPUs and GPUs that a waiting job gets now, or why it has to wait.

    Args:
        job: the one that waits.
        jobs: all that are not over, in order.
    """
    if job.array_id in _full_arrays(jobs):
        limit = job.record["array"]["limit"]
        return f"Priority: {limit} task{'s' * (limit != 1)} of the array run already, as it asks"
    before = [other for other in line(jobs) if other.number < job.number]
    if before:
        return f"Priority: job {before[-1].shown_id} is before it"
    taken_cpus = {cpu for other in jobs if other.holds_slots for cpu in other.record["cpus"]}
    taken_gpus = {gpu for other in jobs if other.holds_slots for gpu in other.record["gpus"]}
    machine, needs = job.record["machine"], job.record["needs"]
    cpus = [cpu for cpu in machine["cpus"] if cpu not in taken_cpus]
    gpus = [gpu for gpu in machine["gpus"] if gpu not in taken_gpus]
    if len(cpus) >= needs["cpus"] and len(gpus) >= needs["gpus"]:
        return cpus[: needs["cpus"]], gpus[: needs["gpus"]]
    short = [
        f"{needs[kind]} {kind.upper()[:-1]}s wanted, {len(free)} of {len(machine[kind])} free"
        for kind, free in (("cpus", cpus), ("gpus", gpus))
        if len(free) < needs[kind]
    ]
    running = ", ".join(other.shown_id for other in jobs if other.holds_slots)
    return f"Resources: {'; '.join(short)} (running: {running})"


def _full_arrays(jobs: Sequence[Job]) -> set[int]:
    """Return the arrays of which as many tasks run as may run at once."""
    limits: dict[int, int] = {}
    running: Counter[int] = Counter()
    for job in jobs:
        array = job.record.get("array")
        if array and array["limit"] and job.holds_slots:
            limits[array["id"]] = array["limit"]
            running[array["id"]] += 1
    return {array_id for array_id, limit in limits.items() if running[array_id] >= limit}
