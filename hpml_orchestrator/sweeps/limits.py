"""How much may be submitted now: by the sweep's budget, and by what the scheduler takes.

Slurm tells the largest size of an array, but not how many jobs a user may have submitted. So a
refused array is halved until it fits; one task more is tried after five minutes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerUnavailable, counted
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.ask import ask
from hpml_orchestrator.scheduler.slurm.records import limits_from, parse_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpml_orchestrator.sweeps.batches import Batch, Task
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import Row
    from hpml_orchestrator.sweeps.table import Table

__all__ = ["MAX_TASKS", "Allowance", "Limits", "allowance", "is_limit", "max_array_size"]

MAX_TASKS = 1000
"""Most tasks of one batch."""

_ROUNDING = 1e-9
_RETRY_SECONDS = 300.0
_ARRAY_LIMIT = re.compile(r"invalid job array specification", re.IGNORECASE)
# Slurm names the limit in a line of its own; old versions do not.
_SUBMIT_LIMIT = re.compile(
    r"\b(?:QOS|Assoc)\w*Submit\w*Limit|^Batch job submission failed: Job violates accounting"
)


def max_array_size(backend: str, environment: Mapping[str, str]) -> int:
    """Return the largest array that a batch may be, as the cluster's configuration says."""
    if backend != "slurm":
        return MAX_TASKS
    try:
        answer = ask(SubprocessRunner(), ["scontrol", "show", "config"], env=environment)
    except SchedulerUnavailable:
        return MAX_TASKS
    return min(MAX_TASKS, limits_from(parse_config(answer.stdout)).max_array_size)


@dataclass
class Limits:
    """What is known of the scheduler's limits."""

    array: int = 0  # most tasks of one array; 0 while not known
    ceiling: int | None = None  # most tasks of this sweep that may be out; None for no limit
    retry_at: float = 0.0  # when to try one more than that, seconds since the epoch
    reason: str = ""  # the scheduler's, of the last refusal

    def room(self, out: int, now: float) -> int:
        """Return how many tasks may be submitted now, while so many of the sweep are out."""
        if self.ceiling is None:
            return self.array
        if out < self.ceiling:
            return min(self.array, self.ceiling - out)
        return 1 if now >= self.retry_at else 0

    def refused(self, tasks: int, reason: str, *, out: int, now: float) -> None:
        """Learn from a batch of so many tasks that was refused while others were out."""
        self.reason = reason.partition(";")[0]
        if tasks > 1 and _ARRAY_LIMIT.search(reason):
            self.array = tasks // 2
        elif _SUBMIT_LIMIT.search(reason):
            self.ceiling, self.retry_at = out + tasks // 2, now + _RETRY_SECONDS

    def accepted(self, *, out: int) -> None:
        """Learn that a batch was accepted while others were out: above the ceiling it is gone."""
        if self.ceiling is not None and out >= self.ceiling:
            self.ceiling = None


def is_limit(reason: str, tasks: int) -> bool:
    """Return whether so many tasks were refused for a limit, and fewer may be accepted."""
    return bool((tasks > 1 and _ARRAY_LIMIT.search(reason)) or _SUBMIT_LIMIT.search(reason))


@dataclass(frozen=True)
class Allowance:
    """How much may be submitted now."""

    tasks: int = 0  # of the first group; 0 for none
    throttle: int | None = None  # how many of them may run at once; None for as many as fit
    reason: str = ""  # why none may be
    over: bool = False  # whether none ever will be: the budget is used up


def allowance(
    plan: SweepPlan,
    table: Table,
    batches: Sequence[Batch],
    *,
    groups: Sequence[Sequence[Task]],
    now: float,
) -> Allowance:
    """Return how many tasks of the first group may be submitted, while some of `batches` are out.

    `groups` are the tasks of each array that could be next, in order.
    """
    sweep, size = plan.spec, len(groups[0])
    recent = sum(batch.created > now - 60 for batch in batches)
    if plan.backend == "slurm" and recent >= sweep.budget.submits_per_minute:
        most = counted(sweep.budget.submits_per_minute, "submission")
        return Allowance(reason=f"at most {most} per minute")
    if sweep.seconds is not None and now - plan.created > sweep.seconds:
        return Allowance(reason=f"budget: {seconds_text(sweep.seconds)} are over", over=True)
    out = [(batch, len(batch.indices(table.out))) for batch in batches]
    for unit in ("gpu", "core"):
        affordable, reason = _affordable(plan, unit, groups[0][0], out, table.over.values())
        if affordable < 1:
            return Allowance(reason=reason, over=not table.out)
        size = min(size, affordable)
    room = table.limits.room(len(table.out), now)
    if not room:
        left = seconds_text(max(0.0, table.limits.retry_at - now))
        return Allowance(reason=f"{table.limits.reason}; next try in {left}")
    size = min(size, room)
    if sweep.parallel is None:
        return Allowance(size)
    free = sweep.parallel - sum(min(count, batch.throttle or count) for batch, count in out)
    if free < 1:
        return Allowance(reason=f"{sweep.parallel} at a time")
    if sweep.searches:
        return Allowance(min(size, free))
    return Allowance(size, throttle=min(size, max(1, free // len(groups))))


def _affordable(
    plan: SweepPlan,
    unit: str,
    task: Task,
    out: Sequence[tuple[Batch, int]],
    rows: Collection[Row],
) -> tuple[int, str]:
    """Return how many such tasks the budget of GPU- or core-hours allows, and why no more."""
    budget = getattr(plan.spec.budget, f"{unit}_hours")
    # whole nodes (`exclusive`) and whole cores are more than what a job asks for
    given = max([1.0, *(row.allocated or 1.0 for row in rows)]) if unit == "core" else 1.0
    hours = [getattr(shape, f"{unit}s") * given * shape.seconds / 3600 for shape in plan.shapes]
    cost = hours[task.point.shape]
    if budget is None or not cost:
        return MAX_TASKS, ""
    spent = sum(getattr(row, f"{unit}_hours") for row in rows)
    promised = sum(hours[batch.shape] * count for batch, count in out)
    reason = (
        f"budget: of {budget:g} {unit}-hours {spent:.3g} are spent and {promised:.3g} promised to "
        f"what is out; the next point may take {cost:.3g}"
    )
    return int((budget - spent - promised) / cost + _ROUNDING), reason
