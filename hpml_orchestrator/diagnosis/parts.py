"""What the time of a run consists of: its phases, and the parts of its steps on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hpml_orchestrator.diagnosis.model import RankFacts

COMPUTE = "compute"
PARTS = {
    "data_wait_seconds": "waiting for data",
    "transfer_seconds": "host to device",
    "wait_seconds": "waiting for slower ranks",
    "comm_seconds": "communication",
    "save_seconds": "saving",
    "evaluation_seconds": "evaluation",
}
"""The parts by the field of `RankFacts`; `compute` is what remains of the steps."""
BETWEEN_STEPS = ("saving", "evaluation")
SAMPLED = ("wait_seconds", "comm_seconds")  # measured in few steps


def rank_parts(rank: RankFacts) -> dict[str, float]:
    """Return the seconds of a rank by part, without the unknown ones; empty without any steps."""
    if not rank.step_seconds:
        return {}
    known = {
        name: value
        for field, name in PARTS.items()
        if (value := getattr(rank, field)) is not None and (field not in SAMPLED or fits(rank))
    }
    inside = sum(value for name, value in known.items() if name not in BETWEEN_STEPS)
    return {COMPUTE: max(0.0, rank.step_seconds - inside), **known}


def fits(rank: RankFacts) -> bool:
    """Whether the waiting of a rank fits into its steps.

    It is measured in few of them: a stall in one can stand for more than all steps.
    """
    return (rank.wait_seconds or 0.0) + (rank.data_wait_seconds or 0.0) <= (rank.step_seconds or 0)


def step_shares(ranks: Sequence[RankFacts]) -> dict[str, float]:
    """Return the parts of a step by name, as shares of its time: means of the ranks.

    Every report of a step's parts takes its figures from here.
    """
    shares: dict[str, list[float]] = {}
    for rank in ranks:
        for name, seconds in rank_parts(rank).items():
            if name not in BETWEEN_STEPS:
                shares.setdefault(name, []).append(min(1.0, seconds / (rank.step_seconds or 1.0)))
    return {name: fmean(shares[name]) for name in (*PARTS.values(), COMPUTE) if name in shares}


def own_seconds(rank: RankFacts) -> float | None:
    """Return the seconds of a rank's steps without its waiting for others; None if unknown.

    In data-parallel training all ranks' steps take equally long: the slow rank works while the
    others wait.
    """
    if rank.step_seconds is None or rank.wait_seconds is None:
        return None
    return max(0.0, rank.step_seconds - rank.wait_seconds)


def mean_parts(ranks: Sequence[RankFacts]) -> dict[str, float]:
    """Return the mean seconds by part, over the ranks that report it."""
    parts: dict[str, list[float]] = {}
    for rank in ranks:
        for name, seconds in rank_parts(rank).items():
            parts.setdefault(name, []).append(seconds)
    ordered = [COMPUTE, *PARTS.values()]
    return {name: fmean(parts[name]) for name in ordered if name in parts}


def samples_per_second(ranks: Sequence[RankFacts]) -> float | None:
    """Return the samples/s of all ranks together, within their steps; None if one is unknown."""
    rates = [
        rank.samples / rank.step_seconds if rank.samples and rank.step_seconds else None
        for rank in ranks
    ]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None
