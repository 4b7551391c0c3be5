"""Job arrays of the local backend: one job per task, with ids one after the other.

The array's id is that of its first task, whose directory appears last: a submission that dies half
way has made no job. Until then the others are not seen (`Home.load`), and `Home.heal` removes what
such a death left.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.arrays import parse_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.scheduler.local.jobs import Home, Job
    from hpml_orchestrator.scheduler.model import JobStatus, SubmitRequest

__all__ = ["array_of", "finder", "publish", "telling"]

MAX_TASKS = 1000


def array_of(expression: str) -> tuple[tuple[int, ...], int | None]:
    """Return the tasks of an `--array` and their limit; no tasks for a job that is no array.

    Raises:
        SchedulerError: it has more tasks than this backend takes.
    """
    if not expression:
        return (), None
    indices, limit = parse_tasks(expression)
    if len(indices) > MAX_TASKS:
        raise SchedulerError(
            f"--array={expression[:60]} asks for {len(indices)} tasks; the local backend takes "
            f"{MAX_TASKS} at once",
            hint="ask for fewer, or submit it to a Slurm cluster",
        )
    return indices, limit


def publish(
    home: Home,
    record: Mapping[str, Any],
    environment: Mapping[str, str],
    request: SubmitRequest,
    *,
    indices: Sequence[int],
    limit: int | None,
) -> Job:
    """Write all tasks of an array and return the first, which carries the array's id.

    Needs the lock, under which nobody else takes a number.
    """
    first = home.next_number()
    shared = {
        "id": first,
        "count": len(indices),
        "min": indices[0],
        "max": indices[-1],
        "step": indices[1] - indices[0] if len(indices) > 1 else 1,
        "limit": limit,
    }
    for position in range(len(indices) - 1, -1, -1):
        array: dict[str, Any] = {**shared, "index": indices[position]}
        if position == 0:
            array["indices"] = list(indices)
        output = os.fspath(request.task_output(indices[position]))
        job = home.publish(
            {**record, "output": output, "array": array}, environment, number=first + position
        )
    return job


def finder(home: Home) -> Callable[[str], list[int]]:
    """Return a function from an id to the numbers of the jobs behind it.

    Behind the id of an array are all of its tasks, behind `7_3` the one of index 3. Each array is
    read once.
    """
    positions: dict[str, dict[int, int]] = {}

    def numbers_of(job_id: str) -> list[int]:
        base, _, task = job_id.partition("_")
        if not base.isdecimal() or (task and not task.isdecimal()):
            return []
        if base not in positions:
            job = home.load(base)
            array = job.record.get("array") if job is not None else None
            indices: list[int] = (array or {}).get("indices") or []
            positions[base] = {index: position for position, index in enumerate(indices)}
        found = positions[base]
        if not task:
            return [int(base) + position for position in range(max(1, len(found)))]
        return [int(base) + found[int(task)]] if int(task) in found else []

    return numbers_of


def telling(job_id: str, statuses: Sequence[JobStatus]) -> JobStatus:
    """Return the status that says most: of one that runs, else waits, else did not end well."""
    return replace(min(statuses, key=_rank), job_id=job_id)


def _rank(status: JobStatus) -> int:
    if status.state.over:
        return 2 + (status.state.value == "COMPLETED")
    return int(status.state.waiting)
