"""Whose turn it is on this machine: the order of the jobs that wait, and what each would get.

Jobs start in the order of their ids. Tasks of an array have ids of their own, one after the other;
those over the array's limit (`%2`), and jobs that wait for others, let later jobs pass.
"""

from __future__ import annotations

import bisect
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.local.arrays import finder
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.local.jobs import Home, Job

__all__ = ["Queue", "hold"]


class Queue:
    """The jobs of a machine that are not over, looked at once.

    Args:
        jobs: all of them, in order.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._holders = [job for job in jobs if job.holds_slots]
        full = self._full_arrays()
        self._held = {job.number for job in jobs if job.held}
        self.line = [
            job for job in jobs if not (job.holds_slots or job.held or job.array_id in full)
        ]
        """The jobs that wait and may start as soon as there is room, in order."""

    def starts(self, job: Job) -> tuple[list[int], list[str]] | str:
        """Return the CPUs and GPUs that a waiting job gets now, or why it has to wait."""
        if job.number in self._held:
            return "Dependency"
        array = job.record.get("array")
        if array and job.array_id in self._full_arrays():
            limit = array["limit"]
            return f"Priority: the array runs {limit} task{'s' * (limit != 1)} at once"
        before = bisect.bisect_left(self._numbers, job.number)
        if before:
            return f"Priority: job {self.line[before - 1].shown_id} is before it"
        taken_cpus = {cpu for other in self._holders for cpu in other.record["cpus"]}
        taken_gpus = {gpu for other in self._holders for gpu in other.record["gpus"]}
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
        running = ", ".join(other.shown_id for other in self._holders)
        return f"Resources: {'; '.join(short)} (running: {running})"

    @cached_property
    def _numbers(self) -> list[int]:
        return [job.number for job in self.line]

    def _full_arrays(self) -> set[int]:
        """Return the arrays of which as many tasks run as may run at once."""
        running = Counter(job.array_id for job in self._holders)
        limits = {
            job.array_id: job.record["array"]["limit"] for job in self._holders if job.array_id
        }
        return {one for one, limit in limits.items() if limit and running[one] >= limit}


def hold(home: Home, jobs: Sequence[Job]) -> None:
    """Mark the jobs that wait for others, by how those others are now."""
    known: dict[tuple[str, str], bool | None] = {}
    numbers_of = finder(home)

    def ended(job_id: str, end: str) -> bool | None:
        """Return whether it ended as wanted; None while it is not over."""
        others = [home.load(number) for number in numbers_of(job_id)]
        states = [job.state for job in others if job is not None]
        if not all(state.over for state in states):
            return None
        well = all(state is JobState.COMPLETED for state in states)
        return end == "any" or (bool(states) and well == (end == "ok"))

    for job in jobs:
        answers = set()
        for job_id, end in job.record.get("after", ()) if job.state.waiting else ():
            if (job_id, end) not in known:
                known[job_id, end] = ended(job_id, end)
            answers.add(known[job_id, end])
        job.held, job.doomed = not answers <= {True}, False in answers
