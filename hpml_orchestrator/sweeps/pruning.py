"""Stop trials early: what they have reached so far, and the file that asks a run to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.records.files import read_json, write_json, write_text
from hpml_orchestrator.runs.state import run_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpml_orchestrator.records.store import Submission

__all__ = ["ask_to_stop", "evaluations", "stopped_points"]

_FILE = "stops.json"
_PATIENCE_SECONDS = 60.0


def evaluations(task: Submission, metric: str) -> list[tuple[int, float]]:
    """Return step (the epoch, where it is told) and value of a run's evaluations so far.

    Args:
        task: one task of an array.
        metric: a figure of the result; evaluations may call `test_accuracy` just `accuracy`.
    """
    attempt = run_of(task).newest()
    values: dict[int, float] = {}
    for event in attempt.milestones() if attempt else ():
        data = event.data
        value = data.get(metric, data.get(metric.removeprefix("test_")))
        if event.event == "evaluation" and not data.get("final") and value is not None:
            step = data.get("epoch", data.get("step", len(values) + 1))
            values[int(step)] = float(value)
    return sorted(values.items())


def stopped_points(directory: Path) -> dict[int, float]:
    """Return when each point of a sweep was first asked to stop, seconds since the epoch."""
    try:
        record = read_json(directory / _FILE)
    except NotFoundError:
        return {}
    return {int(number): moment for number, moment in record["points"].items()}


def ask_to_stop(directory: Path, tasks: Mapping[int, Submission], *, now: float) -> set[int]:
    """Ask runs to stop at their next step, and return the points that have not for a minute.

    Args:
        directory: the sweep's.
        tasks: the run of each point, by its number.
        now: seconds since the epoch.
    """
    asked = stopped_points(directory)
    for number, task in tasks.items():
        attempt = run_of(task).newest()
        if attempt is not None:
            write_text(attempt.directory / "stop", "")
            asked.setdefault(number, now)
    write_json(directory / _FILE, {"points": asked})
    return {number for number in tasks if now - asked.get(number, now) > _PATIENCE_SECONDS}
