"""Times to a target accuracy, recorded by the runs or computed from their evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import MEASURED, TIMED_OUT, Target
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.rows import PointRow

_LEAST_SECONDS = 1e-3  # times are above zero


def aim_of(plan: SweepPlan, rows: Sequence[PointRow]) -> float | None:
    """Return the accuracy that reported times refer to; None if the runs have no such times.

    That is the sweep file's, else the one for which the program measured its times.
    """
    wanted = plan.spec.target_accuracy
    told = {row.target_accuracy for row in rows if row.target_accuracy is not None}
    if wanted is not None and (wanted in told or any(row.evaluations for row in rows)):
        return wanted
    return told.pop() if len(told) == 1 else None


def target_of(plan: SweepPlan, rows: Sequence[PointRow], aim: float | None) -> Target | None:
    """Return the time to accuracy of all runs that could reach it: complete ones and timeouts."""
    tried = [row for row in rows if _has_tried(row)]
    if aim is None:
        return None
    known = [row for row in tried if _is_timed(row, aim)]
    if not known:
        return None
    ended, reached = zip(*times_to(rows, aim), strict=True)
    first = min((row.queued or row.started or plan.created for row in rows), default=plan.created)
    return Target(
        accuracy=aim,
        beforehand=plan.spec.target_accuracy == aim and plan.created <= first,
        every_epochs=next((row.evaluation_every for row in known if row.evaluation_every), None),
        reached=sum(reached),
        unknown=len(tried) - len(known),
        seconds=statistics.time_to_accuracy(ended, reached),
    )


def times_to(rows: Sequence[PointRow], aim: float) -> list[tuple[float, bool]]:
    """Return the seconds until each run reached an accuracy, or ended without, and whether it did.

    Only complete runs and timeouts of which this is known are included.
    """
    known = [row for row in rows if _has_tried(row) and _is_timed(row, aim)]
    times = [_seconds_to(row, aim) for row in known]
    ended = [
        time
        or row.training_seconds
        or row.total_seconds
        or max(1.0, (row.ended or 0.0) - (row.started or 0.0))
        for row, time in zip(known, times, strict=True)
    ]
    return [(end, time is not None) for end, time in zip(ended, times, strict=True)]


def _has_tried(row: PointRow) -> bool:
    return row.state == MEASURED or row.state in TIMED_OUT


def _is_timed(row: PointRow, aim: float) -> bool:
    """Return whether it is known when a run reached an accuracy, or that it did not.

    A run that was killed at its time limit and reported nothing counts as not reaching it.
    """
    # Leaving such runs out would drop the slowest ones and make the median time too short.
    silent = row.state in TIMED_OUT and row.target_accuracy is None
    return row.target_accuracy == aim or bool(row.evaluations) or silent


def _seconds_to(row: PointRow, aim: float) -> float | None:
    if row.target_accuracy == aim:
        return row.seconds_to_accuracy
    times = (seconds for seconds, accuracy in row.evaluations if accuracy >= aim)
    return next((max(seconds, _LEAST_SECONDS) for seconds in times), None)
