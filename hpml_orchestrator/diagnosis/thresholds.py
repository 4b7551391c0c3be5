"""From which figure on something is reported: the only table of these numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BANDWIDTH_SHARE",
    "CAUSE_SHARE",
    "FEW_STEPS",
    "JUDGED_SECONDS",
    "LONG_PHASE_SECONDS",
    "SEEN_SECONDS",
    "SHORT_SECONDS",
    "SURE",
    "THRESHOLDS",
    "TOO_SHORT_SECONDS",
    "Threshold",
]

FEW_STEPS = 20
"""With fewer steps, nothing is critical (TraceML)."""
SHORT_SECONDS = 60.0
"""With less training, nothing is critical."""
TOO_SHORT_SECONDS = 5.0
"""With less training, or fewer steps than `FEW_STEPS`, the steps are not judged at all."""
JUDGED_SECONDS = 600.0
"""Shorter runs may ask for too much: a trial asks for what the real run needs (ClusterCockpit)."""
SEEN_SECONDS = 60.0
"""After this time every GPU should have work, if no steps are counted: ranks may just start."""
LONG_PHASE_SECONDS = 60.0
"""Shorter phases are not reported: importing PyTorch from cold storage takes most of a minute."""
SURE = 0.001
"""Chance at most that one of equal ranks is the slowest as often: a usual level of significance."""
CAUSE_SHARE = 0.8
"""Share of a delay that a second figure must explain to be named as its cause (TraceML)."""
BANDWIDTH_SHARE = 0.8
"""From this share of the measured peak on, storage or a link is at its limit (ClusterCockpit)."""


@dataclass(frozen=True)
class Threshold:
    """Limits of one figure.

    Attributes:
        figure: what is compared, in words.
        warn, critical: limits; None: that level is not used.
        unit: `ratio`, `factor` or `count`.
        source: where the numbers come from.
        below: whether figures below the limits are the bad ones.
    """

    figure: str
    warn: float
    critical: float | None
    unit: str
    source: str
    below: bool = False

    def level(self, value: float) -> str:
        """Return `critical`, `warning`, or nothing."""

        def passed(limit: float | None) -> bool:
            return limit is not None and (value <= limit if self.below else value >= limit)

        return "critical" if passed(self.critical) else "warning" if passed(self.warn) else ""

    def text(self, limit: float) -> str:
        """Return a limit in its unit."""
        return f"{limit:.0%}" if self.unit == "ratio" else f"{limit:g}"

    def __str__(self) -> str:
        name = "at most" if self.below else "from"
        levels = [f"warning {name} {self.text(self.warn)}"]
        if self.critical is not None:
            levels.append(f"critical {name} {self.text(self.critical)}")
        return f"{', '.join(levels)}: {self.source}"


THRESHOLDS = {
    "waits-for-data": Threshold(
        "share of the steps in which the median rank waits for data", 0.10, 0.20, "ratio", "TraceML"
    ),
    "slow-rank": Threshold(
        "how much longer a rank works than the others, as a share of a step",
        0.10,
        0.20,
        "ratio",
        "TraceML",
    ),
    "cpu-contention": Threshold(
        "share of the training in which others took the CPUs of a rank",
        0.15,
        0.30,
        "ratio",
        "hpml",
    ),
    "host-to-device": Threshold(
        "share of the steps for copies to the GPU", 0.10, 0.20, "ratio", "TraceML"
    ),
    "communication": Threshold(
        "share of the steps in collectives",
        0.20,
        0.40,
        "ratio",
        "twice torch-tb-profiler's, since part of it overlaps with computation",
    ),
    "slow-storage": Threshold(
        "read rate, of the rate that was measured", 0.80, None, "ratio", "ClusterCockpit"
    ),
    "tensor-cores-idle": Threshold(
        "activity of the tensor cores while over 50 % of the SMs work",
        0.05,
        None,
        "ratio",
        "hpml",
        below=True,
    ),
    "launch-bound": Threshold(
        "share of the SMs that work while ranks wait neither for data nor for each other",
        0.25,
        0.10,
        "ratio",
        "job_defense_shield (GPU below 25 %)",
        below=True,
    ),
    "cpu-bound": Threshold(
        "busy CPUs while the GPUs work less than half of the time", 0.95, None, "ratio", "hpml"
    ),
    "memory-pressure": Threshold(
        "peak of the memory, of its limit", 0.92, 0.97, "ratio", "TraceML"
    ),
    "memory-headroom": Threshold("peak of the GPU memory", 0.50, None, "ratio", "hpml", below=True),
    "gpu-unused": Threshold(
        "allocated GPUs without a process or without work", 1, 1, "count", "job_defense_shield"
    ),
    "cpus-unused": Threshold(
        "busy CPUs, of those that were allocated",
        0.40,
        None,
        "ratio",
        "half of jobstats'",
        below=True,
    ),
    "memory-over-asked": Threshold(
        "memory limit, in peaks of the memory", 4, None, "factor", "hpml"
    ),
    "time-over-asked": Threshold(
        "time limit, in durations of the run", 10, None, "factor", "jobstats"
    ),
    "wrong-binding": Threshold(
        "ranks that do not run as planned, or share cores", 1, 1, "count", "hpml"
    ),
    "throttled": Threshold(
        "share of the time in which heat or a power brake holds a GPU down",
        0.05,
        0.20,
        "ratio",
        "hpml",
    ),
    "faulty-gpu": Threshold(
        "XID errors that mean a fault of the hardware", 1, 1, "count", "NVIDIA's XID catalogue"
    ),
    "slow-start": Threshold(
        "share of the run before the first step, without staging", 0.10, 0.20, "ratio", "hpml"
    ),
    "slow-staging": Threshold("share of the run for staging", 0.10, 0.20, "ratio", "hpml"),
    "slow-saving": Threshold("share of the training for checkpoints", 0.10, 0.20, "ratio", "hpml"),
    "slow-evaluation": Threshold(
        "share of the training for evaluation", 0.25, 0.50, "ratio", "hpml"
    ),
}
"""Limits by the kind of finding."""
