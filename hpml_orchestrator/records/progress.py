"""The progress of an attempt: its last checkpoint, what saving cost, and which nodes held it up."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hpml_orchestrator.records.run import Attempt

__all__ = ["Progress", "nodes_to_avoid", "progress_of", "written_since"]

_DEPTH = 3
_LOOK_SECONDS = 10.0  # on a file system with many files
_CLOCK_SLACK_SECONDS = 2.0  # clocks of file servers differ


class Progress(NamedTuple):
    """What the ranks of an attempt reported.

    Attributes:
        step: of the last checkpoint; None if none was reported with its step.
        stopping: whether a rank stopped as it was asked.
        channel: whether any rank reported anything.
        slowest_save, slowest_step: seconds; None if unknown.
    """

    step: int | None = None
    stopping: bool = False
    channel: bool = False
    slowest_save: float | None = None
    slowest_step: float | None = None


def progress_of(attempt: Attempt) -> Progress:
    """Read the progress of an attempt."""
    steps: list[int] = []
    saves: list[float] = []
    durations: list[float] = []
    stopping = channel = False
    for event in attempt.milestones():
        channel = channel or event.rank is not None
        stopping = stopping or event.event == "stopping"
        if event.event == "checkpoint":
            if (step := _number(event.data.get("step"))) is not None:
                steps.append(int(step))
            saves += filter(None, [_number(event.data.get("seconds"))])
        elif event.event == "step":
            count = _number(event.data.get("steps_total"))
            seconds = _number(event.data.get("step_seconds_total"))
            if count and seconds:
                durations.append(seconds / count)
    return Progress(
        max(steps, default=None),
        stopping,
        channel,
        max(saves, default=None),
        max(durations, default=None),
    )


def nodes_to_avoid(attempt: Attempt) -> list[str]:
    """Return the nodes that the next attempt should not get, by name.

    Those whose agent failed, and after a hang those whose ranks are behind the others in steps.
    """
    names = {str(marker["node"]) for marker in attempt.markers("failed") if marker.get("node")}
    if (attempt.stop_request() or {}).get("reason") == "hang":
        reached: dict[str, dict[int, float]] = {}
        for event in attempt.milestones():
            steps = _number(event.data.get("steps_total")) if event.event == "step" else None
            if steps is not None and event.rank is not None:
                reached.setdefault(event.node, {})[event.rank] = steps
        slowest = {node: min(ranks.values()) for node, ranks in reached.items()}
        most = max(slowest.values(), default=0.0)
        names.update(node for node, steps in slowest.items() if steps < most)
    return sorted(names)


def written_since(directory: str, since: float) -> bool:
    """Return whether a file below a directory is newer than a time, by a short look at it."""
    until = time.monotonic() + _LOOK_SECONDS
    depth = directory.rstrip("/").count("/") + _DEPTH
    for path, folders, files in os.walk(directory):
        if path.count("/") >= depth:
            folders.clear()
        for name in files:
            with contextlib.suppress(OSError):
                if Path(path, name).stat().st_mtime >= since - _CLOCK_SLACK_SECONDS:
                    return True
        if time.monotonic() > until:
            return False
    return False


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None
