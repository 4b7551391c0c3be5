"""The critical path of constructed traces of two ranks, of which the answer is known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.critical_path import CriticalPath
from hpml_orchestrator.diagnosis.profile import read_profile

Work = Sequence[tuple[str, float]]
STEPS, STEP, UPDATE = 3, 100.0, 10.0  # milliseconds
MAIN, WORKER = 1, 2  # threads


def event(category: str, name: str, begin: float, end: float, thread: int = MAIN) -> Any:
    common = {"cat": category, "name": name, "ph": "X", "tid": thread}
    return {**common, "ts": 1000 * begin, "dur": 1000 * (end - begin)}


def steps_of(work: Work, *reduced: tuple[float, float]) -> list[Any]:
    """Return steps of 100 ms: work one after the other, all-reduces, and the optimizer's 10 ms."""
    events = []
    for at in (STEP * number for number in range(STEPS)):
        now, forward = at, []
        events.append(event("user_annotation", "hpml.step", at, at + STEP))
        for name, took in work:
            if name == "hpml.data":
                events.append(event("user_annotation", name, now, now + took))
            elif name != "sleep":
                events.append(event("cpu_op", name, now, now + took))
                events.append(event("cpu_op", "aten::empty", now, now + took / 2))  # within it
            if name == "aten::conv2d":
                forward.append(now)
            elif "Convolution" in name:  # the last layer's gradient comes first
                arrow = {"cat": "fwdbwd", "id": now, "tid": MAIN}
                events.append({**arrow, "ph": "s", "ts": 1000 * forward.pop() + 1})
                events.append({**arrow, "ph": "f", "ts": 1000 * now})
            now += took
        for begin, end in reduced:
            events.append(event("cpu_op", "c10d::allreduce_", at + begin, at + begin + 0.1))
            span = at + begin, at + end
            events.append(event("user_annotation", "gloo:all_reduce", *span, WORKER))
        events.append(event("cpu_op", "aten::add_", at + STEP - UPDATE, at + STEP))
    return events


def path_of(directory: Path, *ranks: list[Any], groups: int = 2) -> CriticalPath | None:
    """Return the path of ranks whose clocks differ by minutes."""
    for rank, events in enumerate(ranks):
        for one in events:
            one["ts"] += 6e7 * rank + 1e9
        about = {"world_size": 2, "pg_config": [{"pg_size": 2}, {"pg_size": groups}]}
        content = json.dumps({"traceEvents": events, "distributedInfo": about}).encode()
        file = directory / f"trace-rank{rank}.json.gz"
        file.write_bytes(gzip.compress(content, mtime=0))
    profile = read_profile(directory)
    assert profile is not None
    return profile.path


def known(path: CriticalPath | None) -> list[tuple[str, int | None, int]]:
    """Return kind, rank and milliseconds of its parts."""
    assert path is not None
    return [(part.kind, part.rank, round(1000 * part.seconds)) for part in path.parts]


def named(path: CriticalPath) -> dict[str, int]:
    """Return the milliseconds of the names of the longest part."""
    return {name: round(1000 * seconds) for name, seconds in path.parts[0].names}


BACKWARD = "autograd::engine::evaluate_function: ConvolutionBackward0"
FAST: Work = [("aten::conv2d", 5), ("aten::conv2d", 15), (BACKWARD, 10), (BACKWARD, 10)]


@pytest.mark.parametrize(
    ("slow", "ready", "names"),
    [
        # the second layer's forward pass, its backward pass, Python before it, data for it
        ([FAST[0], ("aten::conv2d", 55), *FAST[2:]], 80, "ms conv2d 2"),
        (
            [*FAST[:2], (BACKWARD, 50), FAST[3]],
            80,
            "backward of conv2d 2",
        ),
        ([FAST[0], ("sleep", 40), *FAST[1:]], 80, "Python before conv2d 2"),
        ([("hpml.data", 40), *FAST], 80, "40 ms rank 1's wait for data"),
    ],
)  # fmt: skip
def test_a_slow_rank(slow: Work, ready: float, names: str, tmp_path: Path) -> None:
    """Its work, up to the all-reduce that waits for it, is named with the layer; the rest is not.

    Rank 0 is ready after 40 ms of each step, rank 1 after 80; the all-reduce takes 10 more.
    """
    path = path_of(tmp_path, steps_of(FAST, (40, 90)), steps_of(slow, (ready, 90)))
    assert path is not None
    assert names in path.text()
    assert (path.waits, round(1000 * path.gain_seconds)) == ("all-reduce 1", 40)
    of_rank_1 = [part for part in known(path) if part[1] == 1]
    # the optimizer's 10 ms behind the last all-reduce are rank 0's, as both end at the same time
    assert sum(time for *_, time in of_rank_1) == round(80 + 10 * (STEPS - 1) / STEPS)
    assert ("transfer", None, 10) in known(path)
    assert path.step_seconds == pytest.approx(0.1)
    assert sum(part.seconds for part in path.parts) == pytest.approx(0.1)


def test_the_sentence(tmp_path: Path) -> None:
    """It has the step, the part that is longest, who waits for it, and what comes next."""
    slow: Work = [FAST[0], ("aten::conv2d", 55), *FAST[2:]]
    path = path_of(tmp_path, steps_of(FAST, (40, 90)), steps_of(slow, (80, 90)))
    assert path is not None
    assert path.text() == (
        "of a step of 100 ms, 86.7 ms are rank 1's work (60 ms conv2d 2, 20 ms backward of "
        "conv2d); all-reduce 1 waits for it, 40 ms longer than for others; next: 10 ms transfer "
        "(10 ms all-reduce 1)"
    )


def test_bound_by_communication(tmp_path: Path) -> None:
    """The second bucket waits for the first one's transfer, not for a rank."""
    ranks = [steps_of([("aten::mm", 20)], (20, 60), (60, 90)) for _ in range(2)]
    path = path_of(tmp_path, *ranks)
    assert path is not None
    assert known(path) == [("transfer", None, 70), ("work", None, 30)]
    assert named(path) == {"all-reduce 1": 40, "all-reduce 2": 30}
    assert path.waits == ""


def test_balanced_ranks(tmp_path: Path) -> None:
    """One is always the last; if it is so by little, none is named."""
    ranks = [steps_of([("aten::mm", took)], (took, 90)) for took in (79, 80)]
    assert known(path_of(tmp_path, *ranks)) == [("work", None, 90), ("transfer", None, 10)]


def test_an_all_reduce_during_work_is_not_on_the_path(tmp_path: Path) -> None:
    """Nobody waited for the first of two, however long it took."""
    ranks = [steps_of([("aten::mm", 80)], (10, 70), (80, 90)) for _ in range(2)]
    assert known(path_of(tmp_path, *ranks)) == [("work", None, 90), ("transfer", None, 10)]


def test_traces_that_begin_at_different_collectives(tmp_path: Path) -> None:
    """The ranks are compared step by step: an all-reduce before the first one does not count."""
    early = event("user_annotation", "gloo:all_reduce", -20, -10, WORKER)
    slow = steps_of([("aten::mm", 80)], (80, 90))
    path = path_of(tmp_path, [early, *steps_of([("aten::mm", 40)], (40, 90))], slow)
    assert known(path)[0] == ("work", 1, 87)


def test_gpus(tmp_path: Path) -> None:
    """Kernels count, of all streams; the GPU works on behind the last step of its host."""
    ranks = []
    for gemm in (40.0, 80.0):
        events = [event("user_annotation", "ProfilerStep#5", 0, 50)]
        events += [event("cpu_op", "aten::mm", 0, 5), event("cpu_op", "aten::add_", 5, 10)]
        kernel = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(Params)"
        events.append(event("kernel", kernel, 10, 10 + gemm, 7))
        nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        events.append(event("kernel", nccl, 10 + gemm, 100, 8))
        events.append(event("kernel", "adam_kernel", 100, 110, 7))
        ranks.append(events)
    path = path_of(tmp_path, *ranks)
    assert path is not None
    assert sorted(known(path), key=str) == [
        ("transfer", None, 10),
        ("work", 1, 90),
        ("work", None, 10),
    ]
    assert named(path) == {"Kernel2": 80, "no kernel": 10}


def test_without_a_path(tmp_path: Path) -> None:
    """One rank waits for nobody; collectives of some ranks cannot be told from those of others."""
    rank = steps_of([("aten::mm", 20)], (20, 60))
    assert path_of(tmp_path, rank) is None
    assert path_of(tmp_path, rank, steps_of([("aten::mm", 20)])) is None
    assert path_of(tmp_path, rank, rank, groups=1) is None
