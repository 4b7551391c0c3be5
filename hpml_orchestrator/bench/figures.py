"""Figures of `hpml bench`: how the parts repeat, print and bind what they measure."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence

from hpml_orchestrator.topology.model import parse_list

MIB = 1 << 20
REPEATS = 15
LEAST_REPEATS = 3
ANSWER = "hpml-bench: "
"""Begins the lines of a part's output that are answers."""

_SECONDS = 1.0  # for the repeats of one figure
# The period of CPU quotas (Linux: cpu.max, 100 ms by default): a repeat that is shorter may pass
# between two pauses, and the best ones would not show that the node is throttled.
_REPEAT_SECONDS = 0.1
_PARTS = 4


Tracks = Sequence[Sequence[float]]


class Unmeasured(Exception):  # noqa: N818 - not a fault
    """A part cannot be measured here, though nothing is broken."""


def answer(**fields: object) -> None:
    """Print an answer at once, so that it counts even if the part hangs after it."""
    sys.stdout.write(f"\n{ANSWER}{json.dumps(fields)}\n")
    sys.stdout.flush()


def figure(name: str, tracks: Tracks, unit: str, ranks: int | None = None) -> None:
    """Print a figure and its spread.

    Other processes, hypervisors and interrupts only ever add time, so that the fastest repeats are
    nearest to what the hardware can do, and differ less between runs than the median (Chen and
    Revels 2016, "Robust benchmarking in noisy environments"; STREAM reports the fastest repeat as
    well). The figure is the rate that a tenth of the repeats reach, since the very fastest ones
    may fall between two pauses that a CPU quota causes, or gain while a neighbour pauses.

    The spread is half of the range of the same estimate in the best three of four successive parts
    of the repeats. It does not include the scatter of single repeats, nor one part that is lower;
    it does include disturbance or throttling that lasts for half of the time.

    Args:
        name: of the figure.
        tracks: rates of the repeats, in the order of time, for each thread that worked by itself
            at the same time; the figure is their sum.
        unit: of the rates.
        ranks: that took part.
    """
    value = sum(map(_best_tenth, tracks))
    parts = sorted(sum(map(_best_tenth, part)) for part in zip(*map(_parts, tracks)))  # noqa: B905
    best = parts[-3:]
    spread = (best[-1] - best[0]) / 2 / value
    made = {"value": value, "unit": unit, "spread": round(spread, 5), "ranks": ranks}
    answer(figures={name: made})


def _best_tenth(rates: Sequence[float]) -> float:
    return sorted(rates)[-1 - (len(rates) - 1) // 10]


def _parts(rates: Sequence[float]) -> list[Sequence[float]]:
    number = min(_PARTS, len(rates))
    ends = [len(rates) * (index + 1) // number for index in range(number)]
    return [rates[begin:end] for begin, end in zip([0, *ends], ends)]  # noqa: B905 - Python 3.9


def repeated(work: Callable[[], object], amount: float, seconds: float = _SECONDS) -> list[float]:
    """Return the rates of repeats, each of as many calls as fill the time of a repeat."""
    work()  # warm up
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < LEAST_REPEATS or time.perf_counter() < end:
        calls, took, begin = 0, 0.0, time.perf_counter()
        while took < _REPEAT_SECONDS:
            work()
            calls += 1
            took = time.perf_counter() - begin
        rates.append(amount * calls / took)
    return rates


def cpu_model() -> str:
    """Return the model name of the processor."""
    return _cpuinfo("model name") or platform.machine()


def cpu_flags() -> set[str]:
    """Return the processor's feature flags, such as `avx512_bf16`."""
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
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="utf-8") as stream:
                cores.setdefault(stream.read().strip(), cpu)
        except OSError:
            cores[str(cpu)] = cpu
    return sorted(cores.values())
