"""How much may be submitted now: by the sweep's budget, and by what the scheduler takes.

Arrays have a largest size, and sites limit the jobs that a user may have submitted. Slurm does not
tell the second beforehand. So a refused array is halved until it fits; one task more is tried when
tasks have ended, or after five minutes.
"""

from __future__ import annotations

import math
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
    seconds: float = math.inf  # when to ask again at the latest
    over: bool = False  # whether none ever will be: the budget is used up


def allowance(
    plan: SweepPlan,
    limits: Limits,
    *,
    groups: Sequence[Sequence[Task]],
    out: Mapping[int, int],
    batches: Sequence[Batch],
    rows: Collection[Row],
    now: float,
) -> Allowance:
    """Return how many tasks of the first group may be submitted.

    Args:
        plan: the sweep's.
        limits: the scheduler's.
        groups: the tasks of each array that could be next, in order.
        out: how many tasks of each batch are submitted and not over, by the batch's number.
        batches: all so far, by number.
        rows: of what is over.
        now: seconds since the epoch.
    """
    sweep, size = plan.spec, len(groups[0])
    most, recent = (
        sweep.budget.submits_per_minute,
        [b.created for b in batches if b.created > now - 60],
    )
    if plan.backend == "slurm" and len(recent) >= most:
        reason = f"at most {counted(most, 'submission')} per minute"
        return Allowance(reason=reason, seconds=min(recent) + 60 - now)
    if sweep.seconds is not None and now - plan.created > sweep.seconds:
        return Allowance(reason=f"budget: {seconds_text(sweep.seconds)} are over", over=True)
    for unit in ("gpu", "core"):
        affordable, reason = _affordable(plan, unit, groups[0][0], out, batches, rows)
        if affordable < 1:
            return Allowance(reason=reason, over=not out)
        size = min(size, affordable)
    room = limits.room(sum(out.values()), now)
    if not room:
        left = max(0.0, limits.retry_at - now)
        reason = f"{limits.reason}; next try in {seconds_text(left)}"
        return Allowance(reason=reason, seconds=left)
    size = min(size, room)
    if sweep.parallel is None:
        return Allowance(size)
    running = sum(min(count, batches[key].throttle or count) for key, count in out.items())
    free = sweep.parallel - running
    if free < 1:
        return Allowance(reason=f"{sweep.parallel} at a time")
    if sweep.searches:
        return Allowance(min(size, free))
    return Allowance(size, throttle=min(size, max(1, free // len(groups))))


def _affordable(
    plan: SweepPlan,
    unit: str,
    task: Task,
    out: Mapping[int, int],
    batches: Sequence[Batch],
    rows: Collection[Row],
) -> tuple[int, str]:
    """Return how many such tasks the budget of GPU- or core-hours allows, and why no more."""
    budget = getattr(plan.spec.budget, f"{unit}_hours")
    hours = [getattr(shape, f"{unit}s") * shape.seconds / 3600 for shape in plan.shapes]
    cost = hours[task.point.shape]
    if budget is None or not cost:
        return MAX_TASKS, ""
    spent = sum(getattr(row, f"{unit}_hours") for row in rows)
    promised = sum(hours[batches[number].shape] * count for number, count in out.items())
    reason = f"budget: {spent:.3g} of {budget:g} {unit}-hours are spent"
    if out:
        reason += f", {promised:.3g} are promised to what is out"
    reason += f", and the next point may take {cost:.3g}"
    return int((budget - spent - promised) / cost + _ROUNDING), reason
