"""The progress of an attempt: its last checkpoint, the cost of saving, and the nodes to avoid."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.records.feed import is_number
from hpml_orchestrator.records.run import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable

NO_STACKS = "no stacks: it wrote none in time"
"""What the file of a node's stacks says of a rank that does not react."""

_UNUSABLE = re.compile(r"down|drain|fail|error|unknown|future|inval|maint|\S*\*", re.IGNORECASE)
_FIRST_LEAD_SECONDS = 300.0  # before any save was measured
_LEAD_MARGIN_SECONDS = 15.0
_LEAST_LEAD_SECONDS = 10.0
_LIMIT_PART = 4
_DEPTH = 3
_LOOK_SECONDS = 10.0  # limit for directories with many files
_CLOCK_SLACK_SECONDS = 2.0  # clocks of file servers differ


class TrainingProgress(NamedTuple):
    """The progress that the ranks of an attempt reported; None where they did not."""

    step: int | None = None  # of the last checkpoint
    stopping: bool = False  # whether a rank stopped as it was asked
    channel: bool = False  # whether any rank reported anything
    slowest_save: float | None = None  # seconds
    slowest_step: float | None = None  # seconds
    saved_at: float | None = None  # when the last checkpoint was reported, since the epoch


def progress_of(attempt: Attempt) -> TrainingProgress:
    """Read the progress of an attempt."""
    steps: list[int] = []
    saves: list[float] = []
    durations: list[float] = []
    saved: list[float] = []
    stopping = channel = False
    for event in attempt.milestones():
        channel = channel or event.rank is not None
        stopping = stopping or event.event == "stopping"
        if event.event == "checkpoint":
            saved.append(event.time)
            if (step := _number(event.data.get("step"))) is not None:
                steps.append(int(step))
            saves += filter(None, [_number(event.data.get("seconds"))])
        elif event.event == "step":
            count = _number(event.data.get("steps_total"))
            seconds = _number(event.data.get("step_seconds_total"))
            if count and seconds:
                durations.append(seconds / count)
    return TrainingProgress(
        max(steps, default=None),
        stopping,
        channel,
        max(saves, default=None),
        max(durations, default=None),
        max(saved, default=None),
    )


def lead_seconds(
    configured: float | None,
    limit: float | None,
    *,
    save: float | None = None,
    step: float | None = None,
) -> float:
    """Return how long before the time limit ranks are asked to stop.

    Args:
        configured: the job file's `lead`; None for automatic: the slowest save, the slowest step
            (ranks stop between two steps) and a margin.
        limit: the job's time limit in seconds; None if unknown.
        save: the slowest that ranks of the run have reported so far, in seconds.
        step: the same of steps.
    """
    if configured is not None:
        return configured
    lead = _FIRST_LEAD_SECONDS if save is None else save + (step or 0.0) + _LEAD_MARGIN_SECONDS
    # A job of a few minutes must not stop right after its start.
    most = math.inf if limit is None else limit / _LIMIT_PART
    return max(_LEAST_LEAD_SECONDS, min(lead, most))


def end_margin(lead: float) -> float:
    """Return how long before the time limit ranks that still live are ended.

    The script needs that time to requeue the job while it still runs.
    """
    return max(5.0, min(30.0, lead / 4))


def nodes_to_avoid(
    attempt: Attempt, ask: Callable[[list[str]], str], say: Callable[[str], None]
) -> list[str]:
    """Return the nodes that the next attempt should not get, by name.

    Slurm accepts a list of excluded nodes that leaves too few, and the job then waits for ever. So
    nodes are left out only if the partition has enough others that can start jobs. `ask` returns
    the output of a command of Slurm's, empty if it fails; `say` prints a notice.
    """
    suspects = _suspects(attempt)
    if not suspects:
        return []
    begun = attempt.started.data if attempt.started else {}
    where = [f"--partition={begun['partition']}"] if begun.get("partition") else []
    listed = ask(["sinfo", "--noheader", "--Node", *where, "--format=%N %T"])
    pairs = (line.partition(" ") for line in listed.splitlines())
    usable = {name for name, _, state in pairs if not _UNUSABLE.match(state.strip())}
    for earlier in attempt.directory.parent.glob("*/next.json"):  # the job may still exclude those
        usable.difference_update((Attempt(earlier.parent).next or {}).get("exclude", ()))
    if len(usable - suspects) >= int(_number(begun.get("node_count")) or 1):
        return sorted(suspects)
    names = ",".join(sorted(suspects))
    say(f"the next attempt may get {names} again: its partition has too few other usable nodes")
    return []


def _suspects(attempt: Attempt) -> set[str]:
    """Return nodes whose agent failed and, after a hang, nodes whose ranks caused it."""
    names = {str(marker["node"]) for marker in attempt.markers("failed") if marker.get("node")}
    if (attempt.stop_request() or {}).get("reason") != "hang":
        return names
    reached: dict[str, dict[int, float]] = {}
    for event in attempt.milestones():
        steps = _number(event.data.get("steps_total")) if event.event == "step" else None
        if steps is not None and event.rank is not None:
            reached.setdefault(event.node, {})[event.rank] = steps
    # The ranks that hang are behind: the others got further before they had to wait for them.
    slowest = {node: min(ranks.values()) for node, ranks in reached.items()}
    most = max(slowest.values(), default=0.0)
    behind = {node for node, steps in slowest.items() if steps < most}
    if not behind:
        # Where all stand at the same step, the rank that hangs is the one that cannot write its
        # stacks: ranks that wait for it in a collective can.
        files = [*attempt.directory.glob("stacks/*.txt")]
        silent = {one.stem for one in files if NO_STACKS in one.read_text("utf-8", "replace")}
        behind = silent if len(silent) < len(files) else set()
    return names | behind


def written_since(directory: str, since: float) -> bool:
    """Return whether a file below a directory is newer than a time; search for 10 s at most."""
    until = time.monotonic() + _LOOK_SECONDS
    # A full walk of a shared file system could take longer than the job has left.
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


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None
