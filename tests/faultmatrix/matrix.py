"""The fault matrix: what is wrong with a run, what causes it, and what a report has to find.

It was written before the thresholds of reports were, and knows none of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDS = (1, 2)
RANKED = frozenset({"forward", "backward", "quota"})  # faults of one rank of two
STAGED = {"stage": [{"name": "digits", "source": "digits", "target": "shm"}]}
CHECKPOINTED = {"checkpoint": True}
TORCHRUN = {"launcher": "torchrun"}
ALONE = {"resources": {"ranks_per_node": 1, "cpus_per_rank": 2}}
ONE_CORE = {"resources": {"ranks_per_node": 1, "cpus_per_rank": 1}}
BUSY = {"util": 95, "gpm_graphics": 95, "gpm_sm": 80, "gpm_occupancy": 30, "gpm_tensor": 40}
WARM = {"gpm_dram": 50, "power": 600, "temp": 62, "clock_sm": 1755, "mem_used": 55_000_000_000}
WORKING = {**BUSY, **WARM}
"""Figures of a simulated H100 that is used well."""

LONG = {"steps": 1350}
"""More than ten minutes with `pace`: shorter runs are not judged by what they asked for."""

MINUTE = {"steps": 1150}
"""More than a minute: a GPU without a process is not judged before."""


@dataclass(frozen=True)
class Case:
    """One run with faults.

    Attributes:
        how: what causes the fault, in a few words.
        expected: kinds of the findings: the first of a report is one of them, and all are found.
            None of them: the run is healthy.
        faults: of faulty.py, which describes them; the amount is drawn between two bounds, by the
            seed.
        job: fields of the job file; mappings are merged.
        options: of the training.
        gpus: how many simulated GPUs the run has.
        gpu: the figures of each.
        gpu_faults: the same of the last one alone.
        xid: an error of the last GPU.
        link: bytes per second of the ranks' network, in a network namespace.
        disk: bytes per second of the disk of a staged file of `megabytes`, by a control group.
        busy: how many other processes keep the CPUs busy.
        channel: whether the training reports anything.
        ddp: whether PyTorch trains (faulty.py), instead of light.py.
    """

    how: str
    expected: tuple[str, ...] = ()
    faults: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)
    gpus: int = 0
    gpu: Mapping[str, float] = field(default_factory=lambda: WORKING)
    gpu_faults: Mapping[str, float] = field(default_factory=dict)
    xid: int = 0
    link: float = 0
    disk: float = 0
    megabytes: int = 0
    busy: int = 0
    channel: bool = True
    ddp: bool = False

    def words(self, seed: int) -> list[str]:
        """Return the arguments of the training that cause the faults."""
        drawn = random.Random(seed)
        words = []
        for name, bounds in self.faults.items():
            amount = f"{drawn.uniform(*bounds):.4g}"
            words += ["--fault", f"{name}={f'{self.slow_rank(seed)}:' * (name in RANKED)}{amount}"]
        return words

    def slow_rank(self, seed: int) -> int:
        """Return the rank, of two, that the faults of one rank are about."""
        return seed % 2


MONITORED = {"monitor": True}
ASKED = {**MONITORED, **ONE_CORE}

CASES = {
    "slow-disk": Case(
        "opening an image below the source takes milliseconds longer, by a fake",
        ("waits-for-data",),
        {"read": (0.006, 0.010)},
    ),
    "few-loader-workers": Case(
        "decoding costs CPU time, and the rank that computes does it itself",
        ("waits-for-data",),
        {"decode": (0.004, 0.006)},
        ALONE,
        {"workers": 0},
    ),
    "slow-rank-forward": Case(
        "one rank sleeps in its forward pass", ("slow-rank",), {"forward": (1.5, 2.5)}
    ),
    "slow-rank-backward": Case(
        "one rank sleeps in its backward pass", ("slow-rank",), {"backward": (1.5, 2.5)}
    ),
    "ddp-slow-rank-forward": Case(
        "the same of PyTorch", ("slow-rank",), {"forward": (1.5, 2.5)}, ddp=True
    ),
    "ddp-slow-rank-backward": Case(
        "the same of PyTorch", ("slow-rank",), {"backward": (1.5, 2.5)}, ddp=True
    ),
    "ddp-slow-rank-quota": Case(
        "one rank of PyTorch gets a part of its core's time, by a control group",
        ("slow-rank",),
        {"quota": (35, 50)},
        ddp=True,
    ),
    "busy-cpus": Case(
        "processes of others compute on the CPUs of the ranks",
        ("cpu-contention",),
        busy=4,
        ddp=True,
    ),
    "wrong-binding": Case(
        "both ranks bind themselves to the first CPU", ("wrong-binding",), {"core": (0, 0)}
    ),
    "slow-link": Case(
        "the ranks' network carries a few MB/s, by tc in a network namespace",
        ("communication",),
        options={"bytes": 200_000},
        link=3e6,
    ),
    "ddp-slow-link": Case(
        "the same of PyTorch", ("communication",), link=8e6, job=STAGED, ddp=True
    ),
    "slow-start": Case(
        "the environment's setup and the imports take a minute and a half",
        ("slow-start",),
        {"start": (80, 100)},
    ),
    "slow-staging": Case(
        "the source is on a disk that reads a few MB/s, by a control group",
        ("slow-staging",),
        job={"stage": [{"name": "big", "source": "big", "target": "shm"}]},
        disk=3.5e6,
        megabytes=320,
    ),
    "slow-saving": Case(
        "each checkpoint takes seconds longer",
        ("slow-saving",),
        {"save": (2, 3)},
        CHECKPOINTED,
        {"save": 1},
    ),
    "slow-evaluation": Case(
        "each batch of the evaluation takes longer",
        ("slow-evaluation",),
        {"evaluation": (0.4, 0.6)},
    ),
    "memory-pressure": Case(
        "the rank keeps memory until little is left of what it asked for",
        ("memory-pressure",),
        {"memory": (6, 9)},
        {**MONITORED, "resources": {"memory": "1G", **ALONE["resources"]}},
    ),
    "gpu-memory-pressure": Case(
        "a simulated GPU has almost no memory left",
        ("memory-pressure",),
        gpus=1,
        gpu_faults={"mem_used": 84_300_000_000},
        job=ONE_CORE,
    ),
    "throttled-gpu": Case(
        "one of two simulated GPUs is slowed down by heat",
        ("throttled",),
        gpus=2,
        gpu_faults={"throttle_hw_thermal": 0.4, "clock_sm": 900, "temp": 89},
    ),
    "idle-tensor-cores": Case(
        "simulated GPUs compute, and not with their tensor cores",
        ("tensor-cores-idle",),
        gpus=2,
        gpu={**WORKING, "gpm_tensor": 0.5},
    ),
    "launch-bound": Case(
        "simulated GPUs wait for kernels of a tiny batch; the ranks' cores are busy",
        ("launch-bound",),
        gpus=2,
        gpu={**WORKING, "gpm_sm": 7, "gpm_tensor": 2, "gpm_dram": 3, "power": 130},
    ),
    "forgotten-gpu": Case(
        "one of two simulated GPUs has no process",
        ("gpu-unused",),
        gpus=2,
        job=ONE_CORE,
        options=MINUTE,
        gpu_faults={"util": 0, "gpm_sm": 0, "gpm_tensor": 0, "power": 75, "mem_used": 5e8},
    ),
    "faulty-gpu": Case("one simulated GPU reports XID 48", ("faulty-gpu",), gpus=2, xid=48),
    "cpus-unused": Case(
        "one rank that computes little has two cores for eleven minutes",
        ("cpus-unused",),
        {"pace": (0.42, 0.46)},
        {**MONITORED, "resources": {**ALONE["resources"], "time": "20:00"}},
        LONG,
    ),
    "memory-over-asked": Case(
        "memory that is twenty times as much as is used",
        ("memory-over-asked",),
        {"pace": (0.42, 0.46)},
        {**MONITORED, "resources": {**ONE_CORE["resources"], "memory": "16G", "time": "20:00"}},
        LONG,
    ),
    "time-over-asked": Case(
        "a time limit of a day",
        ("time-over-asked",),
        {"pace": (0.42, 0.46)},
        {**MONITORED, "resources": {**ONE_CORE["resources"], "time": "24:00:00"}},
        LONG,
    ),
    "slow-disk-and-saving": Case(
        "two faults at once",
        ("waits-for-data", "slow-saving"),
        {"read": (0.006, 0.010), "save": (5, 6)},
        CHECKPOINTED,
        {"save": 1},
    ),
    "forgotten-gpu-and-slow-evaluation": Case(
        "two faults at once",
        ("gpu-unused", "slow-evaluation"),
        {"evaluation": (0.6, 0.8)},
        ONE_CORE,
        MINUTE,
        gpus=2,
        gpu_faults={"util": 0, "gpm_sm": 0, "gpm_tensor": 0, "power": 75, "mem_used": 5e8},
    ),
}
"""By name, with faults."""

HEALTHY = {
    "one-rank": Case("one rank", job=ALONE),
    "two-ranks": Case("two ranks"),
    "torchrun": Case("two ranks of torchrun", job=TORCHRUN),
    "staged": Case("two ranks, data in RAM", job=STAGED),
    "staged-monitored": Case("one rank, data in RAM, monitored", job={**STAGED, **ASKED}),
    "monitored": Case("two ranks, monitored", job=MONITORED),
    "checkpoint": Case("two ranks that save", job=CHECKPOINTED, options={"save": 1}),
    "ddp": Case("two ranks of PyTorch", ddp=True),
    "ddp-all": Case(
        "PyTorch by torchrun, with everything",
        job={**TORCHRUN, **STAGED, **MONITORED, **CHECKPOINTED},
        ddp=True,
    ),
    "gpus": Case("two simulated GPUs, used well", gpus=2),
    "one-gpu": Case(
        "one simulated GPU, used well, data in RAM", gpus=1, job={**STAGED, **ONE_CORE}
    ),
    "asked-well": Case(
        "eleven minutes with what it needs",
        faults={"pace": (0.42, 0.46)},
        job={
            **MONITORED,
            "resources": {**ONE_CORE["resources"], "memory": "1500M", "time": "20:00"},
        },
        options=LONG,
    ),
    "silent": Case("a training that reports nothing, without a monitor", channel=False),
}
"""By name, without faults: nothing may be found that holds them back."""
