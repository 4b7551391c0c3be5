"""How far a sweep is, what it has cost and how long it will take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import Row

__all__ = ["Progress", "progress_of"]


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Attributes:
        counts: number of points by the state of their last start.
        done, total: points that are over, and all that are not excluded.
        gpu_hours, core_hours: spent so far, by what is over.
        eta_seconds: until all points are over; None where not known.
        waits_for: what the sweep waits for, in a sentence; empty where nothing holds it up.
        finished: whether nothing more will happen by itself.
        next_tick_seconds: when to look again.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    done: int = 0
    total: int = 0
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    eta_seconds: float | None = None
    waits_for: str = ""
    finished: bool = False
    next_tick_seconds: float = 0.0


def progress_of(
    plan: SweepPlan, rows: Iterable[Row], *, stopped: str, now: float, waits_for: str = ""
) -> Progress:
    """Return the progress that the rows of a sweep show.

    Args:
        plan: the sweep's.
        rows: every start of every point.
        stopped: why nothing more is submitted; empty where the sweep goes on.
        now: seconds since the epoch.
        waits_for: as in `Progress`.
    """
    rows = list(rows)
    last = {row.point: row for row in sorted(rows, key=lambda row: row.start)}
    search = plan.sweep["search"]["trials"] * plan.spec.count if plan.spec.searches else 0
    planned = [row for row in last.values() if row.state != "EXCLUDED"]
    total = max(search, len(planned))
    done = sum(row.over for row in planned)
    out = any(row.job_id and not row.over for row in rows)
    return Progress(
        counts=dict(Counter(row.state for row in last.values())),
        done=done,
        total=total,
        gpu_hours=sum(row.gpu_hours for row in rows),
        core_hours=sum(row.core_hours for row in rows),
        eta_seconds=_eta(plan, rows, total - done, now),
        waits_for=stopped or waits_for,
        finished=done == total or bool(stopped and not out),
    )


def _eta(plan: SweepPlan, rows: Iterable[Row], left: int, now: float) -> float | None:
    """Return the seconds until all is over, if points go on as those that ended did.

    A point takes as long as others of its shape; as many run side by side as did so far.
    """
    shapes = {point.number: point.shape for point in plan.points}
    took: dict[int, list[float]] = defaultdict(list)
    begun = now
    for row in rows:
        if row.over and row.started and row.ended:
            took[shapes.get(row.point, 0)].append(row.ended - row.started)
            begun = min(begun, row.started)
    whole = sum(map(sum, took.values()))
    if not left or not whole or now <= begun:
        return 0.0 if not left else None
    mean = whole / sum(map(len, took.values()))
    usual = {shape: sum(times) / len(times) for shape, times in took.items()}
    rest = 0.0
    for row in rows:
        if not row.over:
            left -= 1
            elapsed = now - row.started if row.started else 0.0
            rest += max(0.0, usual.get(shapes.get(row.point, 0), mean) - elapsed)
    rest += max(0, left) * mean  # points that a search has not chosen yet
    return rest * (now - begun) / whole
