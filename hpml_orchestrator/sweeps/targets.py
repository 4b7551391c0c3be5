"""Times to a target accuracy, recorded by the runs or computed from their evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import MEASURED, TIMED_OUT, Target
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.rows import PointRow, is_time_to_target
from hpml_orchestrator.sweeps.statistics import Estimate

_LEAST_SECONDS = 1e-3  # times are above zero


def missed(row: PointRow, figure: str) -> bool:
    """Return whether a figure is the time to a target that a run did not reach."""
    # A program reports the figure as null, or at least its target.
    tried = figure in row.result or row.target_accuracy is not None
    over = row.state in TIMED_OUT or (row.state == MEASURED and tried)
    return is_time_to_target(figure) and row.metric is None and over


def seconds_to_target(rows: Iterable[PointRow], figure: str) -> tuple[Estimate | None, list[bool]]:
    """Return the median of a figure that is the time to a target, and which runs reached it.

    Runs that missed it are censored. There is no median if a complete run does not report it.
    """
    tried = [row for row in rows if row.state == MEASURED or missed(row, figure)]
    reached = [row.metric is not None for row in tried]
    if not tried or not all(row.metric is not None or missed(row, figure) for row in tried):
        return None, reached
    times = [max(_LEAST_SECONDS, row.metric or until_end(row)) for row in tried]
    return statistics.time_to_accuracy(times, reached), reached


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


def until_end(row: PointRow) -> float:
    """Return how long a run trained, or took: a lower bound of a time that it did not reach."""
    took = max(1.0, (row.ended or 0.0) - (row.started or 0.0))
    return row.training_seconds or row.total_seconds or took


def times_to(rows: Sequence[PointRow], aim: float) -> list[tuple[float, bool]]:
    """Return the seconds until each run reached an accuracy, or ended without, and whether it did.

    Only complete runs and timeouts of which this is known are included.
    """
    known = [row for row in rows if _has_tried(row) and _is_timed(row, aim)]
    times = [(row, _seconds_to(row, aim)) for row in known]
    return [(time or until_end(row), time is not None) for row, time in times]


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
