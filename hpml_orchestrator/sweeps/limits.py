"""How much may be submitted now: by the sweep's budget, and by what the scheduler takes.

Arrays have a largest size, and sites limit the jobs that a user may have submitted. Slurm does not
tell the second beforehand. So a refused array is halved, and when even one task is too many, the
next try is made when tasks have ended, or after 30 s, 60 s, … up to 10 minutes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
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

__all__ = ["MAX_TASKS", "Allowance", "Limits", "allowance", "max_array_size"]

MAX_TASKS = 1000
"""Most tasks of one batch."""

_MINUTE_SECONDS = 60.0
_ROUNDING = 1e-9
_FIRST_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 600.0
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
    """What is known of the scheduler's limits.

    Attributes:
        array: most tasks of one array; 0 while not known.
        ceiling: most tasks of this sweep that may be out together; None for no limit.
        retry_at: when to try again above the ceiling, seconds since the epoch.
        wait: seconds to wait after the next refusal.
        reason: the scheduler's, of the last refusal.
        batches: numbers of the batches that were refused.
    """

    array: int = 0
    ceiling: int | None = None
    retry_at: float = 0.0
    wait: float = _FIRST_WAIT_SECONDS
    reason: str = ""
    batches: list[int] = field(default_factory=list)

    def room(self, out: int, now: float) -> int:
        """Return how many tasks may be submitted now, while so many of the sweep are out."""
        if self.ceiling is None:
            return self.array
        if out < self.ceiling:
            return min(self.array, self.ceiling - out)
        return 1 if now >= self.retry_at else 0

    def refused(self, batch: Batch, reason: str, *, out: int, now: float) -> bool:
        """Learn from a batch that was refused while so many tasks were out.

        Returns:
            Whether it was for a limit, so that its points may be submitted again.
        """
        tasks = len(batch.tasks)
        self.batches.append(batch.number)
        self.reason = reason.partition(";")[0]
        if tasks > 1 and _ARRAY_LIMIT.search(reason):
            self.array = tasks // 2
            return True
        if not _SUBMIT_LIMIT.search(reason):
            return False
        self.ceiling = out + tasks // 2
        self.retry_at = now + self.wait
        if tasks == 1:
            self.wait = min(2 * self.wait, _LONGEST_WAIT_SECONDS)
        return True

    def accepted(self, *, out: int) -> None:
        """Learn that a batch was accepted while others were out: above the ceiling it is gone."""
        self.wait = _FIRST_WAIT_SECONDS
        if self.ceiling is not None and out >= self.ceiling:
            self.ceiling = None


@dataclass(frozen=True)
class Allowance:
    """How much may be submitted now.

    Attributes:
        tasks: of the first group; 0 for none.
        throttle: how many of them may run at once; None for as many as fit.
        reason: why none may be.
        seconds: when to ask again at the latest.
        over: whether none ever will be: the budget is used up.
    """

    tasks: int = 0
    throttle: int | None = None
    reason: str = ""
    seconds: float = math.inf
    over: bool = False


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
        out: how many tasks of each batch are submitted and not over.
        batches: all so far, by number.
        rows: of what is over.
        now: seconds since the epoch.
    """
    sweep, size = plan.spec, len(groups[0])
    minute_ago, most = now - _MINUTE_SECONDS, sweep.budget.submits_per_minute
    recent = [batch.created for batch in batches if batch.created > minute_ago]
    if plan.backend == "slurm" and len(recent) >= most:
        reason = f"at most {counted(most, 'submission')} per minute"
        return Allowance(reason=reason, seconds=min(recent) - minute_ago)
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
