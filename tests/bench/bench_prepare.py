"""Preparing an array of 10,000 tasks, as ratios to `mkdir` and to one pickle per task.

    python tests/bench/bench_prepare.py [RUNS] [DIR]

All take turns in one run, in fresh directories below DIR (default: a temporary one); each figure is
the median of RUNS (default 5). `mkdir` is a directory per task. The pickles are written as
submitit's map_array does, which is not called itself. Goal: in less time than either.
"""

from __future__ import annotations

import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.script.render import Capabilities

TASKS = 10_000
JOB = f'{{name: many, array: 0-{TASKS - 1}, command: [echo, "{{array.index}}"]}}\n'


def by_hpml(place: Path) -> None:
    """Render the job and write its submission and runs."""
    path = place / "many.yaml"
    path.write_text(JOB, "utf-8")
    rendered = render_job(load_job(path), Capabilities(sys.executable))
    environment = dict(os.environ)
    prepare(Store(place), rendered, cluster="c", argv=["hpml"], environment=environment)


def by_mkdir(place: Path) -> None:
    """Make one directory per task."""
    for index in range(TASKS):
        os.mkdir(f"{place}/{index}")


def by_pickle(place: Path) -> None:
    """Write one pickle per task: to a temporary name, then renamed."""
    for index in range(TASKS):
        with open(f"{place}/{index}.tmp", "wb") as stream:
            pickle.dump({"function": print, "arguments": (index,)}, stream)
        os.rename(f"{place}/{index}.tmp", f"{place}/{index}.pkl")


def main() -> int:
    """Measure and print; the status is 1 when a goal is missed."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    parent = sys.argv[2] if len(sys.argv) > 2 else None
    ways: dict[str, Callable[[Path], None]] = {
        "mkdir": by_mkdir,
        "a pickle per task": by_pickle,
        "hpml prepare": by_hpml,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(runs + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(dir=parent) as directory:
                begin = time.perf_counter()
                way(Path(directory))
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - begin)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}")
    print(f"kernel    {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(f"runs      {runs} of each, interleaved; {TASKS} tasks; median (least to most), s\n")
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, median in medians.items():
        spread = f"{min(times[name]):.2f}-{max(times[name]):.2f}"
        print(f"{name:<20}{median:>7.2f}  {spread:>12}  {median / medians['mkdir']:>6.2f} x mkdir")
    reached = medians["hpml prepare"] == min(medians.values())
    print(f"\ngoal: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
