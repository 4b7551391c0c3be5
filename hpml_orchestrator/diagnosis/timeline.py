"""What one rank did in the steps that torch.profiler traced: operators, collectives and layers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Event = Mapping[str, Any]  # of a trace

# Those that end on all ranks at once; a broadcast's sender does not wait for the others.
_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "barrier": "barrier",
}
_STARTERS = ("c10d::", "c10d_functional::", "_c10d_functional::", "record_param_comms", "gloo:")
_GRADIENT = "torch::autograd::AccumulateGrad"  # DistributedDataParallel's hooks run and wait in it
_EVALUATE = "autograd::engine::evaluate_function: "


class Operation(NamedTuple):
    """What the thread that trains does, or a GPU."""

    begin: float  # all times are microseconds
    end: float
    name: str
    layer: int = 0  # the how many-th of its name in a step's forward pass; 0: has no gradient


class Collective(NamedTuple):
    """A collective on one rank, from when this rank is ready."""

    begin: float
    end: float
    kind: str
    lane: object  # the thread or stream that runs it


@dataclass(frozen=True)
class RankTimeline:
    """The profiled steps of one rank, by its own clock."""

    rank: int
    steps: Sequence[tuple[float, float]]
    end: float  # of the last step; of a GPU's work if that is later
    operations: Sequence[Operation]  # in order, not overlapping
    collectives: Sequence[Collective]  # in order of their begin
    data: Sequence[tuple[float, float]] = ()  # waits for data
    marks: Sequence[float] = ()  # when the thread did something else than wait
    on_gpu: bool = False
    begins: Sequence[float] = field(init=False)  # of the operations

    def __post_init__(self) -> None:
        object.__setattr__(self, "begins", [one.begin for one in self.operations])


def read_timeline(rank: int, events: Sequence[Event], *, is_whole: bool = True) -> RankTimeline:
    """Return what the critical path needs of a trace.

    Args:
        rank: that wrote the trace.
        is_whole: whether all ranks take part in each collective; otherwise none is returned.
        events: of the trace, with at least one that takes time; steps are `hpml.step`, or those of
            the profiler.
    """
    timed = [one for one in events if one.get("ph") == "X"]
    host = [one for one in timed if not str(one.get("cat", "")).startswith("gpu_")]
    steps = [one for one in host if one["name"] == "hpml.step"]
    steps = steps or [one for one in host if str(one["name"]).startswith("ProfilerStep#")]
    thread = steps[0].get("tid")
    kernels = [one for one in timed if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    collectives, work, marks = [], [], []
    for one in kernels or host:
        name, (begin, end) = str(one["name"]), _span(one)
        if kind := _kind(name, kernels=bool(kernels)):
            if is_whole:
                collectives.append(Collective(begin, end, kind, one.get("tid")))
        elif kernels or (one.get("cat") == "cpu_op" and one.get("tid") == thread):
            if not name.startswith(_STARTERS) and _GRADIENT not in name:
                work.append(Operation(begin, end, name))
        elif one.get("cat") == "user_annotation" and one.get("tid") == thread:
            marks += [begin, end]
    spans = sorted(map(_span, steps))
    operations = _outermost(work)
    if kernels:
        operations = [one._replace(name=_kernel(one.name)) for one in operations]
    else:
        operations = _with_layers(operations, spans, events)
    end = max([spans[-1][1], *(one.end for one in operations if kernels)])
    waits = sorted(_span(one) for one in host if one["name"] == "hpml.data")
    ordered = sorted(collectives, key=lambda one: one[:2])
    return RankTimeline(rank, spans, end, operations, ordered, waits, sorted(marks), bool(kernels))


def _with_layers(
    operations: list[Operation],
    steps: Sequence[tuple[float, float]],
    events: Sequence[Event],
) -> list[Operation]:
    """Number the operators that have a gradient, and name backward ones after them.

    A trace has an arrow from each operator of the forward pass to that of the backward pass.
    """
    begins, step_begins = [one.begin for one in operations], [begin for begin, _ in steps]
    arrows: dict[object, dict[str, int]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            place = bisect_right(begins, float(event["ts"])) - 1
            if place >= 0 and float(event["ts"]) <= operations[place].end:
                arrows.setdefault(event.get("id"), {})[str(event["ph"])] = place
    pairs = sorted((one["s"], one["f"]) for one in arrows.values() if {"s", "f"} <= one.keys())
    seen: Counter[tuple[int, str]] = Counter()
    named = [one._replace(name=_operator(one.name)) for one in operations]
    for forward, backward in pairs:
        one = named[forward]
        if not one.layer:
            key = bisect_right(step_begins, one.begin), one.name
            seen[key] += 1
            one = named[forward] = one._replace(layer=seen[key])
        named[backward] = named[backward]._replace(name=f"backward of {one.name}", layer=one.layer)
    return named


def _outermost(work: list[Operation]) -> list[Operation]:
    """Return operations without what others contain; of two streams, what runs first counts."""
    found: list[Operation] = []
    for one in sorted(work, key=lambda one: (one.begin, -one.end)):
        begin = max(one.begin, found[-1].end) if found else one.begin
        if begin < one.end:
            found.append(one._replace(begin=begin))
    return found


def _kind(name: str, *, kernels: bool) -> str:
    text = name.lower().replace("_", "")
    if not text.startswith("nccl" if kernels else ("gloo:", "mpi:")):
        return ""
    return next((kind for part, kind in _KINDS.items() if part in text), "")


def _operator(name: str) -> str:
    return name.removeprefix(_EVALUATE).removeprefix("aten::")


def _kernel(name: str) -> str:
    return re.sub(r"^void |<.*|\(.*", "", name).rpartition("::")[2][:40]


def _span(event: Event) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])
