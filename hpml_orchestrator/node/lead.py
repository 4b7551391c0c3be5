"""How long before the time limit ranks are asked to stop, and ended."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.peers import Slowest
from hpml_orchestrator.records.run import Run

if TYPE_CHECKING:
    from hpml_orchestrator.records.run import Attempt

__all__ = ["end_margin", "lead_seconds", "slowest_of"]

_FIRST_LEAD_SECONDS = 300.0  # before any save was measured
_LEAD_MARGIN_SECONDS = 15.0
_LEAST_LEAD_SECONDS = 10.0
_LIMIT_PART = 4


def lead_seconds(configured: float | None, slowest: Slowest, limit: float | None) -> float:
    """Return how long before the time limit ranks are asked to stop.

    Args:
        configured: the job file's `lead`; None for automatic: the slowest save, the slowest step
            (ranks stop between two steps) and a margin.
        slowest: what ranks of this run have reported so far.
        limit: the job's time limit in seconds; None if unknown.
    """
    if configured is not None:
        return configured
    if slowest.save is None:
        lead = _FIRST_LEAD_SECONDS
    else:
        lead = slowest.save + (slowest.step or 0.0) + _LEAD_MARGIN_SECONDS
    most = math.inf if limit is None else limit / _LIMIT_PART
    return max(_LEAST_LEAD_SECONDS, min(lead, most))


def end_margin(lead: float) -> float:
    """Return how long before the time limit ranks that still live are ended.

    The script needs that time to requeue the job while it still runs.
    """
    return max(5.0, min(30.0, lead / 4))


def slowest_of(attempt: Attempt) -> Slowest:
    """Return the slowest save and step of all earlier attempts of the run."""
    slowest = Slowest()
    with contextlib.suppress(HpmlError, OSError):
        for earlier in Run(attempt.directory.parents[1]).attempts():
            ended = earlier.ended or {}
            figures = [ended.get(name) for name in ("slowest_save", "slowest_step")]
            known = [one if isinstance(one, (int, float)) else None for one in figures]
            slowest = slowest.over(Slowest(*known))
    return slowest
