"""How much a scheduler takes at once: learnt from its configuration and from what it refuses.

Arrays have a largest size, and sites limit the jobs that a user may have submitted. Slurm does not
tell the second beforehand. So a refused array is halved, and when even one task is too many, the
next try is made when tasks have ended, or after 30 s, 60 s, … up to 10 minutes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, SchedulerUnavailable
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.ask import ask
from hpml_orchestrator.scheduler.slurm.records import limits_from, parse_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["MAX_TASKS", "Limits", "max_array_size"]

MAX_TASKS = 1000
"""Most tasks of one batch."""

_FIRST_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 600.0
_ARRAY_LIMIT = re.compile(r"invalid job array specification", re.IGNORECASE)
# Slurm names the limit in a line of its own; old versions do not.
_SUBMIT_LIMIT = re.compile(
    r"\b(?:QOS|Assoc)\w*Submit\w*Limit|^Batch job submission failed: Job violates accounting"
)


def max_array_size(environment: Mapping[str, str]) -> int:
    """Return the largest array that a batch may be, as the cluster's configuration says."""
    try:
        answer = ask(SubprocessRunner(), ["scontrol", "show", "config"], env=environment)
    except SchedulerUnavailable:
        return MAX_TASKS
    return min(MAX_TASKS, limits_from(parse_config(answer.stdout)).max_array_size)


@dataclass
class Limits:
    """What is known of the limits, in `limits.json`.

    Attributes:
        array: most tasks of one array; 0 while not known.
        ceiling: most tasks of this sweep that may be out together; None for no limit.
        retry_at: when to try again above the ceiling, seconds since the epoch.
        wait: seconds to wait after the next refusal.
        reason: the scheduler's, of the last refusal.
        batches: numbers of the refused batches that are taken into account.
    """

    array: int = 0
    ceiling: int | None = None
    retry_at: float = 0.0
    wait: float = _FIRST_WAIT_SECONDS
    reason: str = ""
    batches: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Limits:
        """Read the file; without one nothing is known."""
        try:
            record: dict[str, Any] = read_json(path)
        except NotFoundError:
            return cls()
        return cls(**{known.name: record[known.name] for known in fields(cls)})

    def write(self, path: Path) -> None:
        """Keep what is known."""
        write_json(path, asdict(self))

    def room(self, out: int, now: float) -> int:
        """Return how many tasks may be submitted now.

        Args:
            out: tasks of this sweep that are submitted and not over.
            now: seconds since the epoch.
        """
        if self.ceiling is None:
            return self.array
        if out < self.ceiling:
            return min(self.array, self.ceiling - out)
        return 1 if now >= self.retry_at else 0

    def refused(self, batch: int, tasks: int, reason: str, *, out: int, now: float) -> bool:
        """Learn from a batch of so many tasks that was refused while others were out.

        Returns:
            Whether it was for a limit, so that its points may be submitted again.
        """
        self.batches.append(batch)
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
