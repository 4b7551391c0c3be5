"""Does `hpml bench` repeat, and does it name a node that is 10 % slower?

    python tests/bench/bench_nodes.py [RUNS]

Measures processors and memory of this machine RUNS times (default 6), in turn as it is and with a
CPU quota of 90 %, by a cgroup, which needs root. Goals on an idle machine: figures repeat within
3 %, and the throttled node is named in each run. The cgroup has the highest weight, but other
processes still disturb: their share of the CPUs is printed, and from 10 % on nothing is judged.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from hpml_orchestrator.bench.job import place_program
from hpml_orchestrator.bench.measure import ANSWER, foreign_seconds
from hpml_orchestrator.bench.results import Measurement, Rate, judge
from hpml_orchestrator.records.texts import rate_text

QUOTA = 0.9
PERIOD_MICROSECONDS = 100_000  # the default of Linux
PARTS = ("cpu", "host")
FIGURES = ("cpu.matmul.float32", "host.memory.domain0")
CGROUPS = Path("/sys/fs/cgroup")


class Group:
    """A cgroup, of version 2 or 1, with the highest weight and perhaps a CPU quota."""

    def __init__(self) -> None:
        self.is_second = (CGROUPS / "cgroup.controllers").exists()
        home = CGROUPS if self.is_second else CGROUPS / "cpu"
        self.path = home / f"hpml-bench-{os.getpid()}"

    def __enter__(self) -> Self:
        self.path.mkdir()
        if self.is_second:
            (self.path / "cpu.weight").write_text("10000")
        else:
            (self.path / "cpu.shares").write_text("262144")
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        return self

    def __exit__(self, *_: object) -> None:
        self.path.rmdir()

    def limit(self, share: float) -> None:
        """Give its processes that share of this machine's CPUs."""
        quota = int(share * len(os.sched_getaffinity(0)) * PERIOD_MICROSECONDS)
        if self.is_second:
            text = f"{quota if share < 1 else 'max'} {PERIOD_MICROSECONDS}"
            (self.path / "cpu.max").write_text(text)
        else:
            (self.path / "cpu.cfs_quota_us").write_text(str(quota if share < 1 else -1))

    def enter(self) -> None:
        """Put the calling process into it."""
        (self.path / "cgroup.procs").write_text("0")


def measure(program: Path, node: str, run: str, group: Group) -> Measurement:
    """Measure some parts as a job does, as a node of that name."""
    figures: dict[str, Rate] = {}
    begin, before = time.monotonic(), foreign_seconds()
    for part in PARTS:
        done = subprocess.run(
            [sys.executable, str(program), "--part", part],
            check=True,
            capture_output=True,
            text=True,
            preexec_fn=group.enter,
        )
        for line in done.stdout.splitlines():
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))["figures"]
                figures |= {name: Rate(**value) for name, value in answer.items()}
    took = (time.monotonic() - begin) * (os.cpu_count() or 1)
    load = (foreign_seconds() - before) / took
    return Measurement(node, "here", run, time.time(), load=load, figures=figures)


def report(title: str, made: list[Measurement]) -> dict[str, Any]:
    """Print the median of each figure over the runs, and the range of the runs."""
    found: dict[str, Any] = {}
    for name in FIGURES:
        values = [one.figures[name].value for one in made if name in one.figures]
        if not values:
            continue
        median = statistics.median(values)
        apart = (max(values) - min(values)) / median
        own = max(one.figures[name].spread for one in made if name in one.figures)
        unit = made[0].figures[name].unit if name in made[0].figures else ""
        print(
            f"{title:<10} {name:<22} {rate_text(median, unit):>14}  runs {apart:.1%}, own {own:.1%}"
        )
        found[name] = {"median": median, "range": apart, "own": own}
    return found


def main() -> None:
    """Measure in turn, print the figures and how often the slow node was named."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    print("load before:", ", ".join(f"{load:.2f}" for load in os.getloadavg()))
    with tempfile.TemporaryDirectory() as temporary, Group() as group:
        program = place_program(Path(temporary))
        plain, slow, named = [], [], dict.fromkeys(FIGURES, 0)
        for index in range(runs):
            group.limit(1)
            plain.append(measure(program, "normal", f"run{index}", group))
            group.limit(QUOTA)
            slow.append(measure(program, "slow", f"run{index}", group))
            verdict = judge([plain[-1], slow[-1]], plain[:-1])
            outliers = {(one.node, one.name) for one in verdict.outliers}
            for name in FIGURES:
                named[name] += ("slow", name) in outliers
            shares = f"{plain[-1].load:.0%} and {slow[-1].load:.0%}"
            print(f"run {index}: others used {shares}, outliers {sorted(outliers)}")
        result = {"normal": report("normal", plain), "slow": report("slow", slow)}
    print(f"slow node named in {named} of {runs} runs; load {os.getloadavg()[0]:.2f}")
    print(json.dumps({"runs": runs, "named": named, **result}))


if __name__ == "__main__":
    main()
