"""The limits of all findings, in one table."""

from __future__ import annotations

from dataclasses import dataclass

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
"""Highest probability that equal ranks look this uneven by chance: a usual significance level."""
CAUSE_SHARE = 0.8
"""Share of a delay that a second figure must explain to be named as its cause (TraceML)."""
BANDWIDTH_SHARE = 0.8
"""From this share of the measured peak on, storage or a link is at its limit (ClusterCockpit)."""
OVER_ASKED = ("cpus-unused", "memory-over-asked", "time-over-asked")
"""Kinds of findings about what a job asks for and does not use."""


@dataclass(frozen=True)
class Threshold:
    """Limits of one figure."""

    # `warn`, `critical`: limits; None: that level is not used. Below 1 they are shares
    warn: float
    critical: float | None
    source: str  # where the numbers come from
    figure: str  # what is compared, in words
    # The condition of the largest possible gain, in words; empty if no gain is known
    gain_if: str = ""
    below: bool = False  # whether figures below the limits are the bad ones

    def level(self, value: float) -> str:
        """Return `critical`, `warning`, or nothing."""

        def passed(limit: float | None) -> bool:
            return limit is not None and (value <= limit if self.below else value >= limit)

        return "critical" if passed(self.critical) else "warning" if passed(self.warn) else ""

    def text(self, limit: float) -> str:
        """Return a limit as a share in percent, or as a number from 1 on."""
        return f"{limit:.0%}" if limit < 1 else f"{limit:g}"

    def __str__(self) -> str:
        name = "at most" if self.below else "from"
        levels = [f"warning {name} {self.text(self.warn)}"]
        if self.critical is not None:
            levels.append(f"critical {name} {self.text(self.critical)}")
        return f"{', '.join(levels)}: {self.source}"


# fmt: off
THRESHOLDS = {
    # warn, critical, source; figure, condition of the gain
    "waits-for-data": Threshold(0.10, 0.20, "TraceML",
        "share of the steps in which the median rank waits for data", "if no step waited for data"),
    "slow-rank": Threshold(0.10, 0.20, "TraceML",
        "how much longer a rank works than the others, as a share of a step",
        "if it kept up with the others"),
    "cpu-contention": Threshold(0.15, 0.30, "hpml",
        "share of the training in which others took the CPUs of a rank",
        "if no other process used its CPUs"),
    "own-contention": Threshold(0.15, 0.30, "as cpu-contention",
        "share of the training in which a rank's own threads and loaders took its CPUs",
        "if these left it a CPU"),
    "host-to-device": Threshold(0.10, 0.20, "TraceML",
        "share of the steps for copies to the GPU", "if copies took no time"),
    "communication": Threshold(0.20, 0.40,
        "twice torch-tb-profiler's, since part of it overlaps with computation",
        "share of the steps in collectives", "if communication took no time"),
    "uncounted-time": Threshold(0.25, 0.50, "hpml",
        "share of the training outside of the steps and `timed` blocks of a rank",
        "if the script did nothing there"),
    "own-threads": Threshold(0.15, 0.30, "hpml",
        "share of the steps in which other Python threads of a rank keep its training from running",
        "if these threads took nothing from the training"),
    "slow-storage": Threshold(0.80, None, "ClusterCockpit",
        "read rate, of the rate that was measured"),
    "tensor-cores-idle": Threshold(0.05, None, "hpml",
        "activity of the tensor cores while over 50 % of the SMs work",
        "if tensor cores halved the time in which SMs compute", below=True),
    "launch-bound": Threshold(0.25, 0.10, "job_defense_shield (GPU below 25 %)",
        "share of the SMs that work while ranks wait neither for data nor for each other",
        "if kernels kept all SMs busy", below=True),
    "cpu-bound": Threshold(0.95, None, "hpml",
        "busy CPUs while the GPUs work less than half of the time",
        "if the GPUs never waited for the CPUs"),
    "memory-pressure": Threshold(0.92, 0.97, "TraceML",
        "peak of the memory, of its limit"),
    "memory-headroom": Threshold(0.50, None, "hpml",
        "peak of the GPU memory", below=True),
    "gpu-unused": Threshold(1, 1, "job_defense_shield",
        "allocated GPUs without a process or without work"),
    "cpus-unused": Threshold(0.40, None, "half of jobstats'",
        "busy CPUs, of those that were allocated", below=True),
    "memory-over-asked": Threshold(4, None, "hpml",
        "memory limit, in peaks of the memory"),
    "time-over-asked": Threshold(10, None, "jobstats",
        "time limit, in durations of the run"),
    "wrong-binding": Threshold(1, 1, "hpml",
        "ranks that do not run as planned, or share cores",
        "if each rank ran on the planned cores"),
    "throttled": Threshold(0.05, 0.20, "hpml",
        "share of the time in which heat or a power brake holds a GPU down",
        "if throttling ended, which halves the clocks at most"),
    "faulty-gpu": Threshold(1, 1, "NVIDIA's XID catalogue",
        "XID errors that mean a fault of the hardware"),
    "slow-start": Threshold(0.10, 0.20, "hpml",
        "share of the run before the first step, without staging", "if the start took no time"),
    "slow-staging": Threshold(0.10, 0.20, "hpml",
        "share of the run for staging", "if staging took no time"),
    "slow-saving": Threshold(0.10, 0.20, "hpml",
        "share of the training for checkpoints", "if checkpoints took no time"),
    "slow-evaluation": Threshold(0.25, 0.50, "hpml",
        "share of the training for evaluation", "if evaluation took no time"),
}
# fmt: on
"""Limits by the kind of finding."""
