"""How many tasks the scheduler accepts.

Slurm reports the largest size of an array, but not how many jobs a user may have submitted. So a
refused array is halved until it fits, and the rest of the room is filled in the same way; after
five minutes one more task is tried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask
from hpml_orchestrator.scheduler.slurm.records import limits_from, parse_config

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TASKS = 1000
"""Most tasks of one batch."""

_RETRY_SECONDS = 300.0
_FIRST_WAIT_SECONDS = 30.0  # for room that was there before; twice as long after each refusal
_ARRAY_LIMIT = re.compile(r"invalid job array specification", re.IGNORECASE)
# Slurm names the limit in a separate line; old versions do not name it.
_SUBMIT_LIMIT = re.compile(
    r"\b(?:QOS|Assoc)\w*Submit\w*Limit|^Batch job submission failed: Job violates accounting"
)


def max_array_size(backend: str, environment: Mapping[str, str]) -> int:
    """Return the largest array for a batch, from the cluster's configuration."""
    if backend != "slurm":
        return MAX_TASKS
    try:
        answer = ask(SubprocessRunner(), ["scontrol", "show", "config"], env=environment)
    except SchedulerUnavailable:
        return MAX_TASKS
    # MaxArraySize bounds the array's index rather than its number of tasks. Every batch counts
    # from 0, so here the two agree.
    return min(MAX_TASKS, limits_from(parse_config(answer.stdout)).max_array_size)


@dataclass
class SweepLimits:
    """What is known of the scheduler's limits."""

    array: int = 0  # most tasks of one array; 0 while not known
    ceiling: int | None = None  # most tasks of this sweep that may be out; None for no limit
    fits: int = 0  # most of them that were out at once since the first refusal
    wait: float = _FIRST_WAIT_SECONDS  # before the next attempt above the ceiling
    retry_at: float = 0.0  # when that is due, seconds since the epoch
    reason: str = ""  # the scheduler's, of the last refusal

    def room(self, out: int, now: float) -> int:
        """Return how many tasks may be submitted now, if `out` tasks of the sweep are active."""
        if self.ceiling is None:
            return self.array
        if out >= self.ceiling:
            return 1 if now >= self.retry_at else 0
        # Between what was accepted before and what was refused, the limit is found by halving.
        known = min(self.fits, self.ceiling) - out
        return min(self.array, known if known > 0 else (self.ceiling - out + 1) // 2)

    def refused(self, tasks: int, reason: str, *, out: int, now: float) -> None:
        """Learn from a batch that was refused while `out` other tasks were active."""
        self.reason = reason.partition(";")[0]
        if tasks > 1 and _ARRAY_LIMIT.search(reason):
            self.array = tasks // 2
        elif _SUBMIT_LIMIT.search(reason):
            # The limit counts all jobs of the user or account, so it leaves more or less room as
            # other jobs come and go. That is why a ceiling is tried again and not kept. A number
            # that fitted before will soon fit again: Slurm may still count a task that has ended.
            self.ceiling = out + tasks - 1
            self.retry_at = now + (self.wait if self.ceiling < self.fits else _RETRY_SECONDS)
            self.wait = min(2 * self.wait, _RETRY_SECONDS)

    def accepted(self, tasks: int, *, out: int) -> None:
        """Learn that a batch was accepted while `out` tasks were active."""
        if self.ceiling is None:
            return
        if out + tasks > self.ceiling:
            self.ceiling = self.fits if out + tasks <= self.fits else None
        self.fits, self.wait = max(self.fits, out + tasks), _FIRST_WAIT_SECONDS


def is_limit(reason: str, tasks: int) -> bool:
    """Return whether a batch of this size was refused for a limit, so that fewer may fit."""
    return bool((tasks > 1 and _ARRAY_LIMIT.search(reason)) or _SUBMIT_LIMIT.search(reason))
