"""Time to plan a node of 16 GPUs and 256 cores, and to write and read its plan file.

    python tests/bench/bench_placement.py [RUNS]

Median of RUNS (default 200) in one warm process, wall clock. Goal: a plan in less than 5 ms; the
worst of the nodes counts. Reading the topology is not part of it, nor is starting Python.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

from hpml_orchestrator.placement.planfile import find, write
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

GOAL_MS = 5.0
CORES, GPUS, THREADS = 256, 16, 2


def machine(domains: int, places: list[int | None], *, told: bool = True) -> Topology:
    """Two sockets with this total of domains; one network card for each GPU."""
    per = CORES // domains

    def distance(one: int, other: int) -> int:
        return 10 if one == other else 12 if one * 2 // domains == other * 2 // domains else 32

    return Topology(
        "by hand",
        tuple(
            Core(core, core * 2 // CORES, core // per, (core, core + CORES))
            for core in range(CORES)
        ),
        tuple(
            Domain(
                one,
                tuple(range(one * per, (one + 1) * per)),
                2**36,
                tuple((other, distance(one, other)) for other in range(domains)) if told else (),
            )
            for one in range(domains)
        ),
        tuple(
            Gpu(number, f"GPU{number}", f"0000:{number:02x}:00.0", f"GPU-{number}", domain=place)
            for number, place in enumerate(places)
        ),
        tuple(Nic(f"mlx5_{number}", domain=place) for number, place in enumerate(places)),
    )


def milliseconds(work: Callable[[], object], runs: int) -> list[float]:
    """Return the wall-clock times of this number of runs, after an uncounted one."""
    work()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> int:
    """Measure and print; the status is 1 when the goal is missed."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    half = machine(16, [2 * (number // 2) for number in range(GPUS)])
    lonely = machine(16, [number % 2 * 8 for number in range(GPUS)], told=False)
    unknown = machine(8, [None if number % 3 else number // 2 for number in range(GPUS)])
    text = write(plan(half, GPUS))
    works: dict[str, tuple[bool, Callable[[], object]]] = {
        "plan, 2 domains": (True, lambda: plan(machine_2, GPUS)),
        "plan, 16 domains, half lend": (True, lambda: plan(half, GPUS)),
        "plan, 16 domains, 14 lend": (True, lambda: plan(lonely, GPUS)),
        "plan, 8 domains, GPUs unknown": (True, lambda: plan(unknown, GPUS)),
        "plan, half of the CPUs allowed": (
            True,
            lambda: plan(half, GPUS, allowed_cpus=range(0, CORES * THREADS, 2)),
        ),
        "write the plan file": (False, lambda: write(made)),
        "find a rank's line and its CPUs": (False, lambda: parse_list(find(text, 15)["cpus"])),
    }
    machine_2 = machine(2, [number // 8 for number in range(GPUS)])
    made = plan(half, GPUS)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}")
    print(f"kernel    {platform.system()} {platform.release()}")
    print(f"python    {platform.python_implementation()} {platform.python_version()}")
    print(f"node      {GPUS} GPUs, {CORES} cores of {THREADS} threads, one rank per GPU")
    print(f"runs      {runs} of each, warm; median (least to most), ms\n")
    worst = 0.0
    for name, (counts, work) in works.items():
        times = milliseconds(work, runs)
        median = statistics.median(times)
        worst = max(worst, median) if counts else worst
        print(f"{name:<34}{median:>8.3f}   ({min(times):.3f} to {max(times):.3f})")
    reached = worst < GOAL_MS
    print(f"\nslowest plan {worst:.2f} ms; goal {GOAL_MS:g}: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
