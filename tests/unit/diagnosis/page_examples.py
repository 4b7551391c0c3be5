"""Diagnoses that the tests of pages and comparisons share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpml_orchestrator.diagnosis.model import (
    Change,
    Diagnosis,
    Facts,
    Finding,
    GpuFacts,
    NodeFacts,
    Peaks,
    RankFacts,
    StageFacts,
)
from tests.unit.diagnosis.jobs import complete

HOSTILE = "<script>alert(1)</script>\"'&</svg>"
GIB = 2.0**30
JOB: dict[str, Any] = {
    "name": "digits",
    "resources": {"nodes": 1, "gpus": 4, "time": "30m"},
    "command": ["python", "train.py", "--batch-size", "64"],
}
PEAKS = Peaks(
    {"bfloat16": 794e12, "float32": 51e12}, 3.0e12, shared_read=450e6,
    origin="measured on 2026-11-20 on node1",
)  # fmt: skip

DATA = Finding(
    "waits-for-data",
    "critical",
    "waits for data: 31 % of each step",
    evidence=[
        "31 % of the steps' time on rank 2 (warning from 10 %, critical from 20 %: TraceML)",
        "read 412 MiB/s from nfs; this node type reads 430 MiB/s (hpml bench, 2026-11-20)",
    ],
    changes=[
        Change(
            "stage the data to /dev/shm",
            "stage",
            [{"name": "digits", "source": "digits", "target": "shm"}],
        ),
        Change(
            "use 4 loader workers for each rank: its cores are idle", "binding.loader_workers", 4
        ),
    ],
    gain=0.29,
    gain_if="if no step waited for data",
    gain_hours=0.25,
)
SLOW = Finding(
    "slow-rank",
    "warning",
    "rank 3 works 14 % longer than the others",
    evidence=["the other ranks wait 11 % of each step (warning from 10 %: TraceML)"],
    changes=[Change("exclude node1 and inform the administrators")],
    gain=0.11,
    gain_if="if it kept up with the others",
    gain_hours=0.08,
)
BATCH = Finding(
    "tensor-cores-idle",
    "warning",
    "the tensor cores are idle",
    evidence=["tensor cores 3 % active while 71 % of the SMs work"],
    changes=[
        Change("train in bfloat16", "environment.variables.AMP", "bf16", touches_accuracy=True)
    ],
)


def ranks(count: int, *, slow: int = 3, waits: bool = True) -> list[RankFacts]:
    """Ranks of a data-parallel training, of which one is slow."""
    return [
        RankFacts(
            rank,
            f"node{rank // 4 + 1}",
            samples=51_200,
            steps=800,
            step_seconds=560.0,
            data_wait_seconds=174.0 - rank % 4,
            transfer_seconds=9.0,
            wait_seconds=(4.0 if rank == slow else 62.0 + rank % 7) if waits else None,
            comm_seconds=31.0,
            save_seconds=22.0,
            evaluation_seconds=35.0,
            bound_as_planned=True,
        )
        for rank in range(count)
    ]


def facts(**changed: Any) -> Facts:
    """A finished run on one node with four GPUs, of which everything is known."""
    gpus = [
        GpuFacts(
            f"GPU-{place}", "NVIDIA H100", 751.0, True, 0.83, 0.55, 0.17, 0.41, 31 * GIB, 80 * GIB,
            402.0, 700.0, {"thermal": 21.0} if place == 3 else {},
        )
        for place in range(4)
    ]  # fmt: skip
    node = NodeFacts(
        "node1", 751.0, 32, 9.4, 41 * GIB, 256 * GIB, 0, 310 * GIB, 2 * GIB, 340 * GIB, 4, gpus
    )
    known: dict[str, Any] = {
        "run": "digits-3f2a",
        "state": "COMPLETED",
        "over": True,
        "job": JOB,
        "phases": {
            "queue": 200.0, "start-up": 6.0, "staging": 41.0, "launch": 12.0, "rendezvous": 3.0,
            "warm-up": 55.0, "training": 625.0, "end": 9.0,
        },
        "elapsed_seconds": 751.0,
        "limit_seconds": 1800.0,
        "node_count": 1,
        "gpu_count": 4,
        "core_count": 32,
        "world_size": 4,
        "channel": True,
        "monitored": True,
        "ranks": ranks(4),
        "nodes": [node],
        "stages": [StageFacts("digits", "/nfs/digits", "shm", 41.0, 12 * GIB, 60_000)],
        "achieved_flops": 4 * 142e12,
        "accuracy": {"test accuracy": 0.9712},
        "peaks": PEAKS,
    }  # fmt: skip
    known |= changed
    return Facts(**{**known, "job": complete(**known["job"])})


def gpu_run(**changed: Any) -> Diagnosis:
    """Three findings with every field of a finding."""
    return Diagnosis(
        facts(**changed),
        [DATA, SLOW, BATCH],
        unknown=[Finding("faulty-gpu", "unknown", "NVLink errors are unknown", needs="driver 550")],
        healthy=["4 of 4 ranks are bound as planned", "the steps differ by 2 % between ranks"],
    )


def crowd(count: int = 1024) -> Diagnosis:
    """A run on very many ranks."""
    of_crowd = ranks(count, slow=577)
    node = facts().nodes[0]
    nodes = [replace(node, node=f"node{place + 1}") for place in range(count // 4)]
    return Diagnosis(
        facts(
            ranks=of_crowd, nodes=nodes, node_count=count // 4, gpu_count=count, world_size=count,
            achieved_flops=count * 142e12,
        ),
        [SLOW],
    )  # fmt: skip


def unknowing() -> Diagnosis:
    """A run of which only the record is known."""
    return Diagnosis(
        facts(
            channel=False, monitored=False, ranks=(), nodes=(), achieved_flops=None, peaks=None,
            accuracy={}, phases={"start-up": 2.0, "running": 61.0}, gpu_count=0, over=False,
            state="RUNNING", elapsed_seconds=63.0,
        ),
        unknown=[
            Finding("waits-for-data", "unknown", "waiting for data is unknown", needs="the channel")
        ],
    )  # fmt: skip


def diagnosed(**changed: Any) -> Diagnosis:
    """A healthy run."""
    return Diagnosis(facts(**changed), healthy=["the ranks wait 1 % of each step for data"])
