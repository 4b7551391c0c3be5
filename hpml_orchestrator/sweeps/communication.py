"""What methods of communication cost at equal accuracy, and below which bandwidth each one wins."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import numpy as np

from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.statistics import (
    CONFIDENCE,
    MIN_REPEATS,
    Estimate,
    Interval,
    log_medians,
    time_to_accuracy,
)

BASELINE = "allreduce"
"""The method that the others are compared with."""

_DRAWS = 2000
_NEEDED = {"bytes_sent", "comm_seconds", "world_size", "target_accuracy", "train_seconds"}


@dataclass(frozen=True)
class MethodCost:
    """One method with one number of ranks at one bandwidth."""

    method: str
    ranks: int  # that trained
    mbit: float | None  # bandwidth of each rank's link in Mbit/s; None if it was not limited
    runs: int  # that ended
    reached: int  # runs that reached the target accuracy
    bytes_sent: float  # by one rank until the end of the run, median
    steps: float | None  # to the target, median of the runs that reached it; None without any
    comm_seconds: float  # a rank's wait for the others, median
    predicted: float | None  # seconds on the wire by a cost model, median; None if not reported
    interface_bytes: float | None  # that the rank's interface sent, headers included; as above
    seconds: Estimate  # to the target accuracy; runs that missed it are censored
    times: tuple[float, ...]  # seconds to the target of the runs that reached it
    seeds: tuple[float, ...] = ()  # of these runs, in the same order; empty if not reported


@dataclass(frozen=True)
class Crossover:
    """The bandwidth below which a method reaches the target sooner than the baseline.

    Attributes:
        mbit: in Mbit/s, interpolated between two measured ones; None if it is outside of the
            measured range, or there is 1 run of each.
        interval: 95 %, from 6 runs of each on; an end outside of the measured range is 0 or
            infinite.
        text: the result in words.
    """

    method: str
    ranks: int
    mbit: float | None
    interval: Interval | None
    text: str


Cell: TypeAlias = tuple[float, MethodCost, MethodCost]
"""A bandwidth in Mbit/s, the method there, and the baseline there."""


@dataclass(frozen=True)
class Communication:
    """The section of a report; `target` is the accuracy that the times belong to."""

    target: float
    costs: tuple[MethodCost, ...]
    crossovers: tuple[Crossover, ...]


def communication(rows: Iterable[PointRow]) -> Communication | None:
    """Compare the methods of communication that the runs of a sweep used.

    A run belongs to it if its result has `method`, `bytes_sent`, `comm_seconds`, `world_size` and
    `target_accuracy`; `bandwidth_mbit` is optional. None without such runs, with one method only,
    or if they had different targets: then the times cannot be compared.
    """
    groups: dict[tuple[str, int, float | None], list[Mapping[str, float]]] = defaultdict(list)
    targets = set()
    for row in rows:
        method, told = row.result.get("method"), numbers(dict(row.result))
        if isinstance(method, str) and told.keys() >= _NEEDED:
            key = method, int(told["world_size"]), told.get("bandwidth_mbit") or None
            groups[key].append(told)
            targets.add(told["target_accuracy"])
    # Methods compare only at equal accuracy: a lower target is reached sooner.
    if len(targets) != 1 or len({method for method, _, _ in groups}) < 2:  # noqa: PLR2004
        return None
    order = sorted(groups, key=lambda key: (key[1], key[2] or math.inf, key[0] != BASELINE, key[0]))
    costs = tuple(_cost(*key, groups[key]) for key in order)
    return Communication(targets.pop(), costs, tuple(_crossovers(costs)))


def _cost(
    method: str, ranks: int, mbit: float | None, runs: Sequence[Mapping[str, float]]
) -> MethodCost:
    def values(name: str) -> list[float]:
        return [run[name] for run in runs if name in run]

    def middle(name: str) -> float | None:
        return median(found) if (found := values(name)) else None

    times = values("seconds_to_accuracy")
    # A run that missed the target counts as censored at its end. Without it, a method that often
    # fails would look fast.
    missed = [run["train_seconds"] for run in runs if "seconds_to_accuracy" not in run]
    seeds = [run["seed"] for run in runs if {"seconds_to_accuracy", "seed"} <= run.keys()]
    return MethodCost(
        method,
        ranks,
        mbit,
        runs=len(runs),
        reached=len(times),
        bytes_sent=median(values("bytes_sent")),
        steps=middle("steps_to_accuracy"),
        comm_seconds=median(values("comm_seconds")),
        predicted=middle("predicted_seconds"),
        interface_bytes=middle("interface_bytes"),
        seconds=time_to_accuracy([*times, *missed], [True] * len(times) + [False] * len(missed)),
        times=tuple(times),
        seeds=tuple(seeds) if len(seeds) == len(times) else (),
    )


def _crossovers(costs: Sequence[MethodCost]) -> Iterable[Crossover]:
    shaped = {(one.method, one.ranks, one.mbit): one for one in costs if one.mbit is not None}
    pairs = dict.fromkeys((method, ranks) for method, ranks, _ in shaped if method != BASELINE)
    for method, ranks in pairs:
        mine = {mbit for name, number, mbit in shaped if (name, number) == (method, ranks)}
        base = {mbit for name, number, mbit in shaped if (name, number) == (BASELINE, ranks)}
        cells = [
            (mbit, shaped[method, ranks, mbit], shaped[BASELINE, ranks, mbit])
            for mbit in sorted(mine & base)
            if mbit is not None
        ]
        # A time to the target that some runs never reached has no mean in logs.
        cells = [cell for cell in cells if all(one.reached == one.runs for one in cell[1:])]
        if len(cells) < 2:  # noqa: PLR2004 - between two bandwidths
            text = "unknown: it needs two bandwidths at which all runs reach the target"
            yield Crossover(method, ranks, None, None, text)
        elif min(one.runs for cell in cells for one in cell[1:]) == 1:
            of_all = all(one.runs == 1 for cell in cells for one in cell[1:])
            text = f"unknown: 1 run of {'each' if of_all else 'some'}"
            yield Crossover(method, ranks, None, None, text)
        else:
            yield _crossover(method, ranks, cells)


def _crossover(method: str, ranks: int, cells: Sequence[Cell]) -> Crossover:
    """Return where the ratio of the median times to the target crosses 1.

    Both axes are logarithmic. The interval holds the central 95 % of the crossings of a bootstrap.
    A seed makes a training easy or hard, whatever the method and the bandwidth. So if all runs have
    the same seeds, a draw weighs the seeds, equally for all of these medians (Rubin 1981). Else
    each median varies by itself, as in `speedup`.
    """
    bandwidths = np.array([mbit for mbit, _, _ in cells])
    ratios = np.array([math.log(median(one.times) / median(base.times)) for _, one, base in cells])
    found = float(_crossings(bandwidths, ratios[None, :])[0])
    interval, fewest = None, min(one.runs for cell in cells for one in cell[1:])
    if fewest >= MIN_REPEATS:
        is_paired = _have_same_seeds([one for cell in cells for one in cell[1:]])
        drawn = _paired_draws(cells) if is_paired else _independent_draws(cells)
        how = "bootstrap, paired by seed" if is_paired else "smoothed bootstrap"
        tail = (1 - CONFIDENCE) / 2
        # Crossings may be 0 or infinite. np.quantile would interpolate between two infinities and
        # return NaN, so the ends are taken from the sorted draws.
        crossings = np.sort(_crossings(bandwidths, drawn))
        low, high = (float(crossings[round(part * (_DRAWS - 1))]) for part in (tail, 1 - tail))
        interval = Interval(low, high, how)
    least, most = (f"{mbit:g} Mbit/s" for mbit in (bandwidths[0], bandwidths[-1]))
    if math.isinf(found):
        text, crossing = f"sooner at every measured bandwidth, up to {most}", None
    elif not found:
        text, crossing = f"not sooner at any measured bandwidth, down to {least}", None
    else:
        text, crossing = f"sooner below {found:.3g} Mbit/s", found
    if not all(ratios[:-1] <= ratios[1:]) and len({*np.sign(ratios)}) > 1:
        text += "; the order changes more than once or not steadily, so measure more bandwidths"
    if fewest < MIN_REPEATS:
        text = f"not sure, from {fewest} runs of each: {text}"
    return Crossover(method, ranks, crossing, interval, text)


def _have_same_seeds(costs: Sequence[MethodCost]) -> bool:
    seeds = {tuple(sorted(one.seeds)) for one in costs}
    # A seed that occurs twice in a cell cannot be paired: which of its two runs belongs to which
    # is arbitrary.
    return len(seeds) == 1 and all(0 < len(one.seeds) == len({*one.seeds}) for one in costs)


def _independent_draws(cells: Sequence[Cell]) -> np.ndarray:
    # The seed is fixed so that the same runs always give the same interval.
    random = np.random.default_rng(0)
    columns = [
        random.choice(log_medians(np.array(one.times)), _DRAWS)
        - random.choice(log_medians(np.array(base.times)), _DRAWS)
        for _, one, base in cells
    ]
    return np.stack(columns, axis=1)


def _paired_draws(cells: Sequence[Cell]) -> np.ndarray:
    count = len(cells[0][1].seeds)
    # With 1 (Rubin's) instead of 1 - 2 / n, 6 seeds cover the crossing in 87 to 94 % of simulated
    # sweeps; so it is 90 to 95 %. Independent draws cover 100 %, with intervals 5 times as wide.
    weights = np.random.default_rng(0).dirichlet(np.full(count, 1 - 2 / count), _DRAWS)

    def medians(cost: MethodCost) -> np.ndarray:
        times = np.log([time for _, time in sorted(zip(cost.seeds, cost.times, strict=True))])
        order = np.argsort(times)
        times, ordered = times[order], weights[:, order]
        # Each run sits in the middle of its weight; the median has half of all weight below it.
        below = np.cumsum(ordered, axis=1) - ordered / 2
        after = np.clip((below < 0.5).sum(axis=1), 1, count - 1)  # noqa: PLR2004 - the median
        rows = np.arange(_DRAWS)
        first, last = below[rows, after - 1], below[rows, after]
        share = np.clip((0.5 - first) / (last - first), 0, 1)
        lower, upper = times[after - 1], times[after]
        return np.asarray(lower + share * (upper - lower))

    return np.stack([medians(one) - medians(base) for _, one, base in cells], axis=1)


def _crossings(bandwidths: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Return for each row of log ratios, by bandwidth, the first bandwidth at which it is 0.

    It is 0 if the row begins with a ratio that is not negative, and infinite if none follows.
    """
    answers = np.full(len(ratios), math.inf)
    logs = np.log(bandwidths)
    for place in range(len(bandwidths) - 1, 0, -1):  # backwards, so that the lowest one remains
        before, after = ratios[:, place - 1], ratios[:, place]
        crosses = (before < 0) & (after >= 0)
        share = np.where(crosses, before / np.where(crosses, before - after, 1.0), 0.0)
        between = np.exp(logs[place - 1] + share * (logs[place] - logs[place - 1]))
        answers = np.where(crosses, between, answers)
    return np.where(ratios[:, 0] >= 0, 0.0, answers)
