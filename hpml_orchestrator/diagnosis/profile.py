"""Sum up what the ranks of a run wrote into its directory by `--profile`.

These are traces of torch.profiler, and the Python functions of other steps.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from hpml_orchestrator.diagnosis.critical_path import CriticalPath, find_critical_path
from hpml_orchestrator.diagnosis.timeline import RankTimeline, read_timeline
from hpml_orchestrator.errors import counted

DIRECTORY = "profile"
"""Where traces lie in a run's directory; one per rank, named ``trace-rank0.json.gz``.

Beside them is ``functions-rank0.json``, of cProfile.
"""

_PATTERN = "trace-rank*.json.gz"
_SMALL_BYTES = 8 * 2**20  # of all traces, packed: these are read in a few seconds
_MOST_TRACES = 4  # of larger ones: ranks do the same work
_MOST_JSON_BYTES = 2**20
_LEAST_SHARE = 0.005  # of a step, for a function to be shown
_MOST_BYTES = 2**30  # of one trace, unpacked
_COLLECTIVES = ("nccl", "gloo:", "mpi:")  # kernels of NCCL; spans that the other backends record
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]


class _TraceEvent(TypedDict, total=False):
    name: str
    ph: str  # X: an event that takes time
    ts: float  # when it began, in microseconds
    dur: float
    cat: str


class ProfileError(Exception):
    """A trace cannot be read; the message names the file and the reason."""


@dataclass(frozen=True)
class FunctionCost:
    """A Python function, with what it calls in C; without the Python functions that it calls."""

    name: str
    place: str  # file and line
    seconds: float  # per step
    share: float  # of the step


@dataclass(frozen=True)
class PythonProfile:
    """What a rank's thread did in some steps under cProfile; seconds are per step."""

    rank: int
    steps: int
    step_seconds: float
    python_seconds: float
    operators_seconds: float  # in PyTorch's operators; a backward pass waits for other ranks, too
    waiting_seconds: float
    functions: tuple[FunctionCost, ...]  # those that cost most

    def text(self) -> str:
        """Return its parts in one line."""
        parts = {
            "Python": self.python_seconds,
            "PyTorch's operators": self.operators_seconds,
            "waiting": self.waiting_seconds,
        }
        shares = [f"{name} {seconds / self.step_seconds:.0%}" for name, seconds in parts.items()]
        steps = f"{counted(self.steps, 'step')} of {1000 * self.step_seconds:.3g} ms"
        return f"rank {self.rank} in {steps} with cProfile: {', '.join(shares)}"

    def lines(self, most: int) -> list[str]:
        """Return a line for each of the functions that cost most."""
        return [
            f"{1000 * one.seconds:7.2f} ms {one.share:4.0%}  {one.name}  {one.place}"
            for one in self.functions[:most]
            if one.share >= _LEAST_SHARE
        ]


@dataclass(frozen=True)
class TraceProfile:
    """Shares of the profiled steps' time (0 to 1), as means over the ranks that were read."""

    steps: int  # profiled steps per rank
    ranks: tuple[int, ...]  # of the traces that were read, in order
    traces: int  # how many ranks left a trace
    device: str  # `GPU` if the traces have kernels, otherwise `CPU`
    step_seconds: float  # mean duration of a step; with the profiler, so longer than without it
    compute: float  # kernels that are not collectives; without a GPU, PyTorch's operators
    communication: float  # collectives, including the wait for other ranks in them
    overlap: float  # compute and communication at the same time; counted in both
    copies: float  # between host and GPU; 0 without a GPU
    idle: float  # none of the three: Python, sleeping, launching kernels
    # The wait for the next batch, if the training marks it as `hpml.data`; else None
    data: float | None
    path: CriticalPath | None = None  # of several ranks
    python: PythonProfile | None = None

    def text(self) -> str:
        """Return the profile in one line."""
        parts = [f"compute {self.compute:.0%}"]
        if self.communication:
            parts.append(
                f"communication {self.communication:.0%} ({self.overlap / self.communication:.0%} "
                "of it during compute)"
            )
        if self.copies:
            parts.append(f"copies {self.copies:.0%}")
        parts.append(f"idle {self.idle:.0%}")
        waiting = "" if self.data is None else f"; waiting for data {self.data:.0%}"
        some = f"{len(self.ranks)} of {self.traces}" if len(self.ranks) < self.traces else "all"
        ranks = "1 rank" if self.traces == 1 else f"{some} ranks"
        steps = f"{counted(self.steps, 'step')} of {1000 * self.step_seconds:.3g} ms"
        return f"{self.device} in {steps}, {ranks}: {', '.join(parts)}{waiting}"


def read_profile(directory: Path) -> TraceProfile | None:
    """Return the profile of the traces in a directory; None if there are none.

    Raises:
        ProfileError: a trace is damaged, too large, or has no steps.
    """
    found = sorted(directory.glob(_PATTERN), key=_rank)
    if not found:
        return None
    chosen = found
    if sum(path.stat().st_size for path in found) > _SMALL_BYTES:
        # Traces are taken at equal distances, so that they come from different nodes.
        every = max(1, len(found) // _MOST_TRACES)
        chosen = found[::every][:_MOST_TRACES]
    read = [_read_trace(path) for path in chosen]
    traces = [shares for shares, _ in read]
    path = find_critical_path([timeline for _, timeline in read])
    ranks = [part.rank for part in path.parts if part.rank is not None] if path else []

    def mean(name: str) -> float:
        return fmean(trace[name] for trace in traces)

    return TraceProfile(
        steps=int(min(trace["steps"] for trace in traces)),
        ranks=tuple(_rank(path) for path in chosen),
        traces=len(found),
        device="GPU" if any(trace["device"] for trace in traces) else "CPU",
        step_seconds=mean("seconds") / mean("steps"),
        data=mean("data") if all(trace["marked"] for trace in traces) else None,
        path=path,
        # Of the rank that the others wait for, if there is one.
        python=next(filter(None, (_read_functions(directory, one) for one in (*ranks, 0))), None),
        **{name: mean(name) for name in ("compute", "communication", "overlap", "copies", "idle")},
    )


def _rank(path: Path) -> int:
    digits = path.name.removeprefix("trace-rank").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _read_trace(path: Path) -> tuple[dict[str, float], RankTimeline]:
    try:
        with gzip.open(path) as packed:
            content = packed.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ProfileError(f"{path} has more than 1 GiB: profile fewer steps")
        trace = json.loads(content)
        del content
        events = trace["traceEvents"]
        shares = _sum_up([event for event in events if event.get("ph") == "X"], path)
        return shares, read_timeline(_rank(path), events, is_whole=_meets_all(trace))
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ProfileError(f"{path} is not a trace of torch.profiler: {error}") from error


def _meets_all(trace: dict[str, Any]) -> bool:
    """Whether each collective is one of all ranks: those of groups cannot be told apart."""
    known = trace.get("distributedInfo", {})
    sizes = [group.get("pg_size") for group in known.get("pg_config", ())]
    return all(size == known.get("world_size") for size in sizes)


def _read_functions(directory: Path, rank: int) -> PythonProfile | None:
    """Return a rank's Python functions; None without them, or if the file is damaged."""
    path = directory / f"functions-rank{rank}.json"
    try:
        with path.open("rb") as stream:
            found = json.loads(stream.read(_MOST_JSON_BYTES))
        steps, whole = int(found["steps"]), float(found["seconds"])
        functions = [
            FunctionCost(
                str(one["name"]),
                f"{_short(str(one['file']))}:{int(one['line'])}",
                float(one["seconds"]) / steps,
                float(one["seconds"]) / whole,
            )
            for one in found["functions"]
        ]
        names = ("seconds", "python_seconds", "operators_seconds", "waiting_seconds")
        step, python, operators, waiting = (float(found[name]) / steps for name in names)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None
    return PythonProfile(rank, steps, step, python, operators, waiting, tuple(functions))


def _short(file: str) -> str:
    """Return a file's path in its package, or its name."""
    for directory in ("/site-packages/", "/dist-packages/"):
        if directory in file:
            return file.rpartition(directory)[2]
    return os.path.join(*Path(file).parts[-2:]) if "/lib/python" in file else Path(file).name


def _sum_up(events: list[_TraceEvent], path: Path) -> dict[str, float]:
    """Return shares of the time from the first step's begin to the last one's end, on one rank."""

    def spans(chosen: list[_TraceEvent]) -> list[Span]:
        return _union([(float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in chosen])

    steps = [one for one in events if one["name"] == "hpml.step" and not _on_device(one)]
    if not steps:  # a training that does not mark its steps: those of the profiler's schedule
        steps = [one for one in events if str(one["name"]).startswith("ProfilerStep#")]
        steps = [one for one in steps if not _on_device(one)]
    if not steps:
        raise ProfileError(f"{path} has no steps: call the profiler's step() after each one")
    kernels = [one for one in events if one.get("cat") in _DEVICE]
    work = kernels or [one for one in events if one.get("cat") in ("cpu_op", "user_annotation")]
    begin, end = spans(steps)[0][0], spans(steps)[-1][1]
    if kernels:  # a GPU works on when the program has issued the last step
        end = max(end, spans(kernels)[-1][1])
    window = [(begin, end)]
    named = [(str(one["name"]).lower(), one) for one in work]
    collective = [one for name, one in named if name.startswith(_COLLECTIVES)]
    copied = [one for one in work if one.get("cat") == "gpu_memcpy"]
    # c10d's operators only start a collective; annotations span Python code, which is not work.
    computing = [
        one
        for name, one in named
        if not name.startswith((*_COLLECTIVES, "c10d::"))
        and one.get("cat") in ("kernel", "gpu_memset", "cpu_op")
    ]
    compute, communication, copies = (
        _intersection(spans(chosen), window) for chosen in (computing, collective, copied)
    )
    data = [one for one in events if one["name"] == "hpml.data" and not _on_device(one)]
    if (total := end - begin) <= 0:
        raise ProfileError(f"{path} has no steps that took any time")
    return {
        "steps": len(steps),
        "seconds": total / 1e6,
        "device": bool(kernels),
        "compute": _length(compute) / total,
        "communication": _length(communication) / total,
        "overlap": _length(_intersection(compute, communication)) / total,
        "copies": _length(copies) / total,
        # The three overlap (a collective runs while a kernel computes), so their sum would exceed
        # the time; only their union tells when the device was idle.
        "idle": 1 - _length(_union([*compute, *communication, *copies])) / total,
        "data": _length(_intersection(spans(data), window)) / total,
        "marked": bool(data),
    }


def _on_device(event: _TraceEvent) -> bool:
    return str(event.get("cat", "")).startswith("gpu_")


def _union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _intersection(first: list[Span], second: list[Span]) -> list[Span]:
    """Return the time that two lists of spans, each as `_union` returns it, have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        # The span that ends first cannot meet any later one of the other list.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)
