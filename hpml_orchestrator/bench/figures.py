"""Figures of `hpml bench`: how the parts repeat, print and bind what they measure."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from hpml_orchestrator.topology.cpulist import parse_list

__all__ = [
    "ANSWER",
    "LEAST_REPEATS",
    "MIB",
    "REPEATS",
    "Unmeasured",
    "answer",
    "cpu_flags",
    "cpu_model",
    "domains",
    "figure",
    "repeated",
]

MIB = 1 << 20
REPEATS = 15
LEAST_REPEATS = 3
ANSWER = "hpml-bench: "
"""Begins the lines of a part's output that are answers."""

_SECONDS = 1.0  # for the repeats of one figure


class Unmeasured(Exception):  # noqa: N818 - not a fault
    """A part cannot be measured here, which is nobody's fault."""


def answer(**fields: Any) -> None:
    """Print an answer at once, so that it counts even if the part hangs after it."""
    sys.stdout.write(f"\n{ANSWER}{json.dumps(fields)}\n")
    sys.stdout.flush()


def figure(name: str, rates: list[float], unit: str, ranks: int | None = None) -> None:
    """Print the median of a figure's repeats, and the scatter of the middle ones around it."""
    ordered = sorted(rates)
    middle = ordered[len(ordered) // 4 : -(len(ordered) // 4) or None]
    value = statistics.median(ordered)
    spread = (middle[-1] - middle[0]) / 2 / value
    made = {"value": value, "unit": unit, "spread": round(spread, 5), "ranks": ranks}
    answer(figures={name: made})


def repeated(work: Callable[[], object], amount: float, seconds: float = _SECONDS) -> list[float]:
    """Return the rates of several repeats, each of as many calls as fill its share of the time."""
    work()  # warm up
    begin = time.perf_counter()
    work()
    once = max(time.perf_counter() - begin, 1e-9)
    calls = max(1, int(seconds / REPEATS / once))
    rates = []
    begin_all = time.perf_counter()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        rates.append(amount * calls / (time.perf_counter() - begin))
        if len(rates) >= LEAST_REPEATS and time.perf_counter() - begin_all > 4 * seconds:
            break
    return rates


def cpu_model() -> str:
    """Return what the processor calls itself."""
    return _cpuinfo("model name") or platform.machine()


def cpu_flags() -> set[str]:
    """Return what the processor can do, such as `avx512_bf16`."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _cpuinfo(wanted: str) -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return " ".join(value.split())
    return ""


def domains() -> dict[int, list[int]]:
    """Return the CPUs of each NUMA domain that this process may use, one per core."""
    allowed, found = os.sched_getaffinity(0), {}
    for path in glob.glob("/sys/devices/system/node/node[0-9]*/cpulist"):
        number = int(os.path.basename(os.path.dirname(path))[4:])
        with open(path, encoding="utf-8") as stream:
            cpus = _one_per_core(allowed.intersection(parse_list(stream.read())))
        if cpus:
            found[number] = cpus
    return dict(sorted(found.items())) or {0: _one_per_core(allowed)}


def _one_per_core(cpus: set[int]) -> list[int]:
    """Return the first CPU of each core."""
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="utf-8") as stream:
                cores.setdefault(stream.read().strip(), cpu)
        except OSError:
            cores[str(cpu)] = cpu
    return sorted(cores.values())
