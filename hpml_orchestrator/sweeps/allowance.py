"""How much may be submitted now, given the sweep's budget and the scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.sweeps.limits import MAX_TASKS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hpml_orchestrator.sweeps.batches import Batch, Task
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import PointRow
    from hpml_orchestrator.sweeps.table import Table

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Allowance:
    """How much may be submitted now."""

    tasks: int = 0  # of the first group; 0 for none
    throttle: int | None = None  # how many of them may run at once; None for as many as fit
    reason: str = ""  # why no task may be submitted
    over: bool = False  # whether none ever will be, because the budget is used up


def allowance(
    plan: SweepPlan,
    table: Table,
    batches: Sequence[Batch],
    *,
    groups: Sequence[Sequence[Task]],
    now: float,
) -> Allowance:
    """Return how many tasks of the first group may be submitted, given the active `batches`.

    `groups` are the tasks of each array that could be next, in order.
    """
    sweep, size = plan.spec, len(groups[0])
    # Sites limit how often a user may call sbatch, 10 times a minute for instance; the local
    # backend has no such limit.
    recent = sum(batch.created > now - 60 for batch in batches)
    if plan.backend == "slurm" and recent >= sweep.budget.submits_per_minute:
        most = counted(sweep.budget.submits_per_minute, "submission")
        return Allowance(reason=f"at most {most} per minute")
    if sweep.seconds is not None and now - plan.created > sweep.seconds:
        return Allowance(reason=f"budget: {seconds_text(sweep.seconds)} are over", over=True)
    out = [(batch, len(batch.indices(table.active))) for batch in batches]
    for unit in ("gpu", "core"):
        affordable, reason = _affordable(plan, unit, groups[0][0], out, table.finished.values())
        # Active starts are charged until their time limit. When one ends sooner, the difference
        # becomes free, so only a sweep without active starts has used up its budget.
        if affordable < 1:
            return Allowance(reason=reason, over=not table.active)
        size = min(size, affordable)
    room = table.limits.room(len(table.active), now)
    if not room:
        left = seconds_text(max(0.0, table.limits.retry_at - now))
        when = (
            "the next points follow as soon as one ends" if table.active else f"next try in {left}"
        )
        return Allowance(reason=f"{table.limits.reason}; {when}")
    size = min(size, room)
    if sweep.parallel is None:
        return Allowance(size)
    # A throttled array occupies at most as many slots as its throttle, however many tasks it has.
    free = sweep.parallel - sum(min(count, batch.throttle or count) for batch, count in out)
    if free < 1:
        return Allowance(reason=f"{sweep.parallel} at a time")
    if sweep.searches:
        # A search learns from results. Tasks that only wait in the queue would be chosen too
        # early, so it submits no more than can run, and needs no throttle.
        return Allowance(min(size, free))
    # Slurm throttles each array by itself, so the arrays to come share the free slots among them.
    # None gets less than one, or its tasks would never start.
    return Allowance(size, throttle=min(size, max(1, free // len(groups))))


def _affordable(
    plan: SweepPlan,
    unit: str,
    task: Task,
    out: Sequence[tuple[Batch, int]],
    rows: Collection[PointRow],
) -> tuple[int, str]:
    budget = getattr(plan.spec.budget, f"{unit}_hours")
    # `exclusive` and whole cores allocate more than the job requests
    given = max([1.0, *(row.allocated or 1.0 for row in rows)]) if unit == "core" else 1.0
    hours = [getattr(shape, f"{unit}s") * given * shape.seconds / 3600 for shape in plan.shapes]
    cost = hours[task.point.shape]
    if budget is None or not cost:
        return MAX_TASKS, ""
    spent = sum(getattr(row, f"{unit}_hours") for row in rows)
    # Every active task counts until its time limit. Only so can the sweep not exceed its budget,
    # whatever its runs do.
    promised = sum(hours[batch.shape] * count for batch, count in out)
    reason = (
        f"budget: of {budget:g} {unit}-hours {spent:.3g} are spent and {promised:.3g} promised to "
        f"what is out; the next point may take {cost:.3g}"
    )
    return int((budget - spent - promised) / cost + _ROUNDING), reason
