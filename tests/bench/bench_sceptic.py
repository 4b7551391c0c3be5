"""What a sweep's report says of simulated sweeps whose truth is known: coverage, errors and power.

    python tests/bench/bench_sceptic.py [--sweeps N] [--fits N] [--jobs N] [--only TEXT]

Each cell simulates N strong-scaling sweeps (default 2,000) of K scales and n repeats, and builds
their reports. Runs scatter by 5 %, skewed (a gamma distribution), and by cell:

    independent  nothing else
    block        a common factor of each repeat, 20 %
    drift        the cluster becomes slower, by 33 % from the first run to the last
    slow         one run in ten takes three times as long

Coverage: scales that follow T = 200 s (0.05 + 0.95/P), and the share of the intervals in the report
that hold the true value. Medians are compared with the median of the scatter, which is taken from
100,000 draws. Under drift there is no such median, so only ratios are judged.

Errors: all scales are equal. Counted are sweeps in which a sentence of the answer, or a verdict of
the table, says that one is faster or slower than another, and those in which it recommends a scale
that is more than 5 % slower than the best.

Power: the last scale takes 10 or 30 % less time than the others, which are equal. Counted are the
sweeps whose answer says that it is faster than the baseline.

Goals: intervals of 93 to 97 % (wider ones are marked, and fail nothing), errors of 5 % at most.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpml_orchestrator.sweeps import report as reports
from hpml_orchestrator.sweeps.facts import FittedModel, SweepFacts
from hpml_orchestrator.sweeps.plan import Point
from hpml_orchestrator.sweeps.statistics import Estimate
from tests.unit.sweeps.sweep_rows import completed, plan_of

KINDS = ("independent", "block", "drift", "slow")
REPEATS, COUNTS = (6, 10), (2, 5, 20)
SCATTER, BLOCKS, DRIFT, SLOW, TIMES = 0.05, 0.2, 0.33, 0.1, 3.0
SHAPE = 4.0  # of the gamma distribution: a skewness of 1
SERIAL, SECONDS = 0.05, 200.0
MARGIN = 1.05
LOW, HIGH, ERRORS = 0.93, 0.97, 0.05
DRAWS = 100_000

Array: TypeAlias = NDArray[np.float64]
Told: TypeAlias = Counter[str]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kind of sweep, and what is true in it."""

    truth: str  # `law`, `equal`, `10 %` or `30 %`
    kind: str
    repeats: int
    count: int  # of scales
    fits: bool = False

    @property
    def scales(self) -> list[int]:
        """The scales: powers of two, or all up to 20."""
        several = self.count > 5
        return [place + 1 if several else 2**place for place in range(self.count)]

    def seconds(self) -> Array:
        """Return the time of each scale without any scatter."""
        if self.truth == "law":
            return np.array([SECONDS * (SERIAL + (1 - SERIAL) / scale) for scale in self.scales])
        times = np.full(self.count, 100.0)
        if self.truth != "equal":
            times[-1] *= 1 - float(self.truth.split()[0]) / 100
        return times


def scatter(cell: Cell, rng: np.random.Generator, order: Array) -> Array:
    """Return the factor of each run, by repeat and scale, if they run in this order."""
    shape = order.shape
    spread = rng.gamma(SHAPE, size=shape)
    factors = 1 + SCATTER * (spread - SHAPE) / math.sqrt(SHAPE)
    if cell.kind == "block":
        factors *= rng.lognormal(0, BLOCKS, size=(shape[0], 1))
    if cell.kind == "drift":
        factors *= 1 + DRIFT * order / (order.size - 1)
    if cell.kind == "slow":
        factors[rng.random(shape) < SLOW] *= TIMES
    return np.asarray(factors)


def sweep(cell: Cell, rng: np.random.Generator) -> SweepFacts:
    """Simulate a sweep, repeat after repeat, and return the report of it."""
    within = np.array([rng.permutation(cell.count) for _ in range(cell.repeats)])
    order = (within + cell.count * np.arange(cell.repeats)[:, None]).astype(np.float64)
    times = cell.seconds() * scatter(cell, rng, order)
    points, rows = [], []
    for repeat in range(cell.repeats):
        for place, scale in enumerate(cell.scales):
            point = Point(
                int(order[repeat, place]), 0, scale=scale, repeat=repeat, batch_global=512
            )
            accuracy = 0.96 + 0.002 * float(rng.standard_normal())
            points.append(point)
            rows.append(
                completed(point, {"training": float(times[repeat, place])}, accuracy=accuracy)
            )
    plan = plan_of("strong", points, unit="nodes", baseline=cell.scales[0])
    return reports.build(plan, rows)


def holds(estimate: Estimate | None, truth: float) -> Iterable[bool]:
    """Yield whether the interval holds the truth, if there is one."""
    if estimate is not None and estimate.interval is not None:
        yield bool(estimate.interval.low <= truth <= estimate.interval.high)


def covered(cell: Cell, report: SweepFacts, middle: float) -> Iterable[tuple[str, bool]]:
    """Yield each interval of a report by name, and whether it holds the truth."""
    times = dict(zip(cell.scales, cell.seconds(), strict=True))
    first = cell.scales[0]
    for one in report.settings:
        scale = one.scale or 1
        if cell.kind != "drift":
            yield from (("seconds", ok) for ok in holds(one.seconds, times[scale] * middle))
        if scale == first or one.speedup is None:
            continue
        truth = times[first] / times[scale]
        yield from (("speedup", ok) for ok in holds(one.speedup, truth))
        yield from (("efficiency", ok) for ok in holds(one.speedup.efficiency, truth / scale))
        yield from (("serial fraction", ok) for ok in holds(one.serial_fraction, SERIAL))
    for fit in report.fits:
        if fit.model == "Amdahl":
            if cell.kind != "drift":
                truth = SECONDS * middle
                yield from (("T1 (fit)", ok) for ok in holds(fit.parameters["T1"], truth))
            yield from (("f (fit)", ok) for ok in holds(fit.parameters["f"], SERIAL))
            if fit.lack_of_fit is not None:
                yield "true law not rejected", fit.lack_of_fit >= ERRORS


_SCALE = re.compile(r"(\d+) nodes?")
_FASTEST = re.compile(r"^(\d+) nodes? (?:is|are) the fastest of \d+ scales( by the medians)?: ")
_ALONE = re.compile(r"^(\d+) nodes? (?:is|are) the fastest, with ")
_SHOWN = re.compile(r"^Shown to be faster than \d+ nodes?: (.*)\.$")
_SLOWER = re.compile(r"([^:;]*) (?:is|are) slower than \d+ nodes?")
_RECOMMENDED = re.compile(r"^Recommended: (\d+) nodes?")


def claims(cell: Cell, answer: Sequence[str]) -> Iterable[tuple[int, int]]:
    """Yield what the sentences claim: pairs of scales of which the first is the faster one."""
    base = cell.scales[0]
    for sentence in answer:
        if found := _FASTEST.match(sentence):
            best = int(found[1])
            yield best, base
            yield from ((best, one) for one in cell.scales if not found[2] and one != best)
        if found := _ALONE.match(sentence):
            yield from ((int(found[1]), one) for one in cell.scales if one != int(found[1]))
        if found := _SHOWN.match(sentence):
            yield from ((int(scale), base) for scale in _SCALE.findall(found[1]))
        for listed in _SLOWER.findall(sentence):
            yield from ((base, int(scale)) for scale in _SCALE.findall(listed))


def judged(cell: Cell, report: SweepFacts) -> Iterable[str]:
    """Yield what the report of one sweep says that is false, or is true and wanted."""
    times = dict(zip(cell.scales, cell.seconds().tolist(), strict=True))
    base, last = cell.scales[0], cell.scales[-1]
    said = set(claims(cell, report.answer))
    if any(times[one] >= times[other] for one, other in said):
        yield "false words"
    fastest = report.settings[report.best or 0].scale or 0
    verdicts = [
        pair if verdict == "faster" else pair[::-1]
        for one in report.settings
        for verdict, pair in (
            (one.against_baseline, (one.scale or 0, base)),
            (one.against_best, (one.scale or 0, fastest)),
        )
        if verdict in ("faster", "slower")
    ]
    if any(times[one] >= times[other] for one, other in verdicts):
        yield "false verdicts"
    for found in filter(None, map(_RECOMMENDED.match, report.answer)):
        yield "recommended"
        if times[int(found[1])] > MARGIN * min(times.values()):
            yield "wrongly recommended"
    if (last, base) in said:
        yield "found"


def no_fits(_: SweepFacts) -> list[FittedModel]:
    """Fit nothing."""
    return []


def one_cell(cell: Cell, sweeps: int, seed: int) -> tuple[Cell, dict[str, Told], Told, float]:
    """Simulate a cell; return its intervals by name, what the sweeps say, and the seconds."""
    rng = np.random.default_rng([seed, cell.repeats, cell.count, KINDS.index(cell.kind)])
    draws = dataclasses.replace(cell, repeats=DRAWS, count=1)
    middle = float(np.median(scatter(draws, rng, np.zeros((DRAWS, 1)))))
    began = time.perf_counter()
    intervals: dict[str, Told] = defaultdict(Counter)
    said: Told = Counter()
    # Fits take longest, and only some cells of the law judge them.
    with contextlib.nullcontext() if cell.fits else patch.object(reports, "fits_of", no_fits):
        for _ in range(sweeps):
            report = sweep(cell, rng)
            if cell.truth == "law":
                for name, held in covered(cell, report, middle):
                    intervals[name].update(printed=1, held=int(held))
            else:
                said.update(judged(cell, report))
    return cell, dict(intervals), said, time.perf_counter() - began


def table(cells: Iterable[tuple[Cell, dict[str, Told], Told, float]], sweeps: int) -> list[str]:
    """Print a line for each cell as it ends; return the goals that were missed."""
    missed = []
    for cell, intervals, said, seconds in cells:
        name = f"{cell.truth:<6}{cell.kind:<12} n={cell.repeats:<3}K={cell.count:<3}"
        parts = []
        for kind, told in intervals.items():
            share = told["held"] / told["printed"]
            # A share of a few thousand intervals is itself uncertain: three standard errors.
            error = 3 * math.sqrt(LOW * (1 - LOW) / told["printed"])
            mark = " MISSED" if share < LOW - error else " (wide)" if share > HIGH + error else ""
            parts.append(f"{kind} {share:.1%}{mark}")
            missed += [f"{name} {kind}"] if "MISSED" in mark else []
        for kind in (
            ()
            if cell.truth == "law"
            else ("false words", "false verdicts", "wrongly recommended", "found")
        ):
            share = said[kind] / sweeps
            wrong = kind != "found" and share > ERRORS + 3 * math.sqrt(
                ERRORS * (1 - ERRORS) / sweeps
            )
            parts.append(f"{kind} {share:.1%}{' MISSED' if wrong else ''}")
            missed += [f"{name} {kind}"] if wrong else []
        print(f"{name} {', '.join(parts)}  ({seconds:.0f} s)", flush=True)
    return missed


def main() -> int:
    """Simulate and print; the status is 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweeps", type=int, default=2000, help="of each cell")
    parser.add_argument("--fits", type=int, default=500, help="of each cell that judges fits")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells such as `law block n=6`")
    options = parser.parse_args()
    print(f"kernel    {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(f"sweeps    {options.sweeps} of each cell, {options.fits} where models are fitted")
    cells = [
        Cell(truth, kind, repeats, count, fits)
        for truth, fits in (
            ("law", False),
            ("law", True),
            ("equal", False),
            ("10 %", False),
            ("30 %", False),
        )
        for kind in KINDS
        for repeats in REPEATS
        for count in COUNTS
        if not fits or count == 5
    ]
    words = options.only.split()
    cells = [
        one
        for one in cells
        if all(
            word
            in f"{one.truth} {one.kind} n={one.repeats} K={one.count} {'fits' * one.fits}".split()
            for word in words
        )
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        done = pool.map(
            one_cell,
            cells,
            [options.fits if cell.fits else options.sweeps for cell in cells],
            [options.seed] * len(cells),
        )
        missed = table(done, options.sweeps)
    print(f"\ngoals: {'MISSED: ' + '; '.join(missed) if missed else 'reached'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
