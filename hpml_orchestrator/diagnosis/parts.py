"""What the time of a run consists of: its phases, and the parts of its steps on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from hpml_orchestrator.diagnosis.model import Facts, RankFacts

__all__ = [
    "BETWEEN_STEPS",
    "COMPUTE",
    "PARTS",
    "hours",
    "mean_parts",
    "own_seconds",
    "rank_parts",
    "samples_per_second",
    "shares",
]

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


def rank_parts(rank: RankFacts) -> dict[str, float]:
    """Return the seconds of a rank by part, without the unknown ones; empty without any steps."""
    if not rank.step_seconds:
        return {}
    known = {
        name: value for field, name in PARTS.items() if (value := getattr(rank, field)) is not None
    }
    inside = sum(value for name, value in known.items() if name not in BETWEEN_STEPS)
    return {COMPUTE: max(0.0, rank.step_seconds - inside), **known}


def own_seconds(rank: RankFacts) -> float | None:
    """Return the seconds of a rank's steps without what it waits for others or exchanges.

    In data-parallel training all ranks' steps take equally long: the slow rank works while the
    others wait. None if the waiting is unknown.
    """
    if rank.step_seconds is None or rank.wait_seconds is None:
        return None
    return max(0.0, rank.step_seconds - rank.wait_seconds - (rank.comm_seconds or 0.0))


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


def hours(facts: Facts) -> tuple[float, str] | None:
    """Return what the run cost, with its unit: GPU-hours, or core-hours without GPUs."""
    count, unit = (facts.gpu_count, "GPU-hours") if facts.gpu_count else (facts.core_count, "")
    if not count or facts.elapsed_seconds is None:
        return None
    return count * facts.elapsed_seconds / 3600, unit or "core-hours"


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return each part as a share of all."""
    total = sum(parts.values())
    return {name: seconds / total for name, seconds in parts.items()} if total > 0 else {}
