"""The sum of torch.profiler's traces: real ones of two ranks, and ones with known shares."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import ProfileError, read_profile

TRAINING = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, schedule

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, directory = dist.get_rank(), sys.argv[1]
matrix = torch.randn(400, 400)

def write(trace):
    trace.export_chrome_trace(f"{directory}/trace-rank{rank}.json.gz")

with profile(schedule=schedule(wait=1, warmup=1, active=3), on_trace_ready=write) as profiler:
    for _ in range(5):
        with record_function("hpml.step"):
            with record_function("hpml.data"):
                time.sleep(0.05)
            for _ in range(10):
                matrix @ matrix
            time.sleep(0.3 * rank)  # a slow rank: the other one waits in the collective
            dist.all_reduce(torch.ones(10))
        profiler.step()
dist.destroy_process_group()
os._exit(0)  # threads of gloo may crash Python's own end (pytorch#190489)
"""


def trace(path: Path, *events: tuple[str, str, float, float]) -> None:
    """Write a trace with events of category, name, begin and end in milliseconds."""
    written: list[dict[str, Any]] = [
        {"ph": "X", "cat": category, "name": name, "ts": 1000 * begin, "dur": 1000 * (end - begin)}
        for category, name, begin, end in events
    ]
    content = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *written]})
    path.write_bytes(gzip.compress(content.encode(), mtime=0))


def test_real_traces_of_two_ranks(tmp_path: Path) -> None:
    """The sleep before a step is a wait for data, the fast rank's wait is communication."""
    (tmp_path / "train.py").write_text(TRAINING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", str(tmp_path / "train.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    profile = read_profile(tmp_path)
    assert profile is not None
    assert (profile.steps, profile.ranks, profile.device) == (3, (0, 1), "CPU")
    assert profile.step_seconds > 0.1
    assert profile.data is not None
    assert profile.data * profile.step_seconds > 0.045
    # rank 0 waits 300 ms for rank 1; the mean of the two is half of that
    assert profile.communication * profile.step_seconds > 0.05
    assert profile.compute > 0
    assert profile.idle > profile.data
    assert profile.path is not None
    first = profile.path.parts[0]
    assert (first.kind, first.rank, profile.path.waits) == ("work", 1, "all-reduce 1")
    assert profile.path.gain_seconds > 0.1


def test_shares_on_a_cpu(tmp_path: Path) -> None:
    """Nested operators count once; what starts a collective is not compute."""
    trace(
        tmp_path / "trace-rank0.json.gz",
        ("user_annotation", "hpml.step", 0, 50),
        ("user_annotation", "hpml.step", 50, 100),
        ("user_annotation", "hpml.data", 0, 10),
        ("user_annotation", "Optimizer.step#SGD.step", 0, 100),
        ("cpu_op", "aten::linear", 10, 60),
        ("cpu_op", "aten::addmm", 20, 30),
        ("cpu_op", "c10d::allreduce_", 90, 95),
        ("user_annotation", "gloo:all_reduce", 50, 80),
        ("cpu_op", "aten::mul", 100, 400),  # behind the last step
    )
    profile = read_profile(tmp_path)
    assert profile is not None
    found = (profile.compute, profile.communication, profile.overlap, profile.idle, profile.data)
    assert found == pytest.approx((0.5, 0.3, 0.1, 0.3, 0.1))
    assert profile.text() == (
        "CPU in 2 steps of 50 ms, 1 rank: compute 50%, communication 30% (33% of it during "
        "compute), idle 30%; waiting for data 10%"
    )


def test_shares_on_a_gpu(tmp_path: Path) -> None:
    """Kernels count, operators of the host do not; the GPU works after the last step's end.

    The trace is made up: no GPU is here. Names and categories are those of PyTorch 2.11 on an H100.
    """
    trace(
        tmp_path / "trace-rank0.json.gz",
        ("user_annotation", "ProfilerStep#5", 0, 80),
        ("gpu_user_annotation", "ProfilerStep#5", 20, 500),
        ("cpu_op", "aten::linear", 0, 80),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 20),
        ("kernel", "sm90_xmma_gemm_bf16bf16", 20, 70),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 100),
        ("gpu_user_annotation", "nccl:all_reduce", 55, 100),
    )
    profile = read_profile(tmp_path)
    assert profile is not None
    found = (profile.compute, profile.communication, profile.overlap, profile.copies, profile.idle)
    assert found == pytest.approx((0.5, 0.4, 0.1, 0.1, 0.1))
    assert profile.data is None
    assert profile.text().startswith("GPU in 1 steps of 100 ms, 1 rank: ".replace("steps", "step"))


def test_of_many_large_traces_some_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number, not by name: rank 10 comes after rank 9."""
    for rank in range(12):
        event = ("user_annotation", "hpml.step", 0.0, 10.0 + rank)
        trace(tmp_path / f"trace-rank{rank}.json.gz", event)
    small = read_profile(tmp_path)
    assert small is not None
    assert small.ranks == tuple(range(12))
    monkeypatch.setattr("hpml_orchestrator.diagnosis.profile._SMALL_BYTES", 100)
    profile = read_profile(tmp_path)
    assert profile is not None
    assert (profile.ranks, profile.traces) == ((0, 3, 6, 9), 12)
    assert "4 of 12 ranks" in profile.text()
    assert profile.idle == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a trace"),
        (b"not packed", "not a trace"),
        (gzip.compress(b"[]", mtime=0), "not a trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0), "has no steps"),
        (
            gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "hpml.step"}]}', mtime=0),
            "not a trace",
        ),
        (gzip.compress(b'{"traceEvents": [', mtime=0)[:-4], "not a trace"),
        (
            gzip.compress(
                b'{"traceEvents": [{"ph": "X", "name": "hpml.step", "ts": 0, "dur": 0}]}',
                mtime=0,
            ),
            "has no steps",
        ),
    ],
)
def test_damaged_traces(content: bytes, reason: str, tmp_path: Path) -> None:
    """The message names the file, as after a full disk or a killed rank."""
    (tmp_path / "trace-rank0.json.gz").write_bytes(content)
    with pytest.raises(ProfileError, match=rf"trace-rank0.json.gz.* {reason}"):
        read_profile(tmp_path)


def test_no_traces(tmp_path: Path) -> None:
    """A run without a profile has none, whether or not the directory exists."""
    assert read_profile(tmp_path) is None
    assert read_profile(tmp_path / "profile") is None
