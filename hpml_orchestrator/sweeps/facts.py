"""The contents of a sweep's report as data, shared by all modules of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpml_orchestrator.spec.sweep import SEARCHES
from hpml_orchestrator.sweeps.communication import Communication
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

__all__ = [
    "CONTINUED",
    "MEASURED",
    "NOT_ATTEMPTED",
    "PARTS",
    "TIMED_OUT",
    "Attempt",
    "Costs",
    "Figure",
    "FittedModel",
    "Notice",
    "Report",
    "Setting",
    "Target",
]

MEASURED = "COMPLETED"
"""State of the attempts that enter medians."""

NOT_ATTEMPTED = ("WAITING", "EXCLUDED")
"""States of planned points that were never submitted."""

CONTINUED = "CONTINUED"
"""The state of attempts whose work the next one continued from a checkpoint."""

TIMED_OUT = ("TIMEOUT", "DEADLINE")
"""States of runs that would have taken longer: those that are left are the fast ones."""

PARTS = tuple(
    "staging, start-up, rendezvous, warm-up, steps, data wait, evaluation, checkpoint, end, "
    "not divided".split(", ")
)
"""What the total time of a run is divided into, in order; the queue is not part of it."""


@dataclass(frozen=True)
class Attempt:
    """One start of a point, or a point that was never started: its row, and its place in the plan.

    Attributes:
        setting: number of its setting.
        seed: that the program was given; None if the sweep gives it none.
    """

    setting: int
    repeat: int
    seed: int | None
    row: Row


@dataclass(frozen=True)
class Target:
    """Time to a target accuracy; runs that did not reach it are censored, not dropped.

    Attributes:
        accuracy: to which the times belong.
        beforehand: whether the plan named it before the first run was submitted.
        every_epochs: interval of the evaluations, the resolution of the time.
        reached: how many of the complete runs and timeouts reached the target.
        unknown: complete runs of which no time to this target is known; they are in no other count.
        seconds: median of all of these, infinite where too few reached it.
    """

    accuracy: float
    beforehand: bool
    every_epochs: float | None
    reached: int
    unknown: int
    seconds: Estimate


@dataclass(frozen=True)
class Costs:
    """What attempts cost.

    Attributes:
        energy_kwh: None if it was measured for none of them.
        requested: attempts whose hours are those of what was requested, because what was allocated
            is not recorded.
    """

    gpu_hours: float
    core_hours: float
    node_hours: float
    energy_kwh: float | None
    energy_attempts: int
    requested: int


@dataclass(frozen=True)
class Setting:
    """What was measured with one scale and one combination of the axes' values.

    Attributes:
        number: its place in `Report.settings`.
        label: scale and values in one line. series: the values alone, empty without axes.
        planned, runs: runs that the plan has and no rule excludes; how many of them are complete.
        missing: those that are not complete, by the state of their last start.
        seconds: total time of a run, staging included; None where no run is complete.
        figure: what settings are ranked by (`Report.figure`).
        samples: the values of the complete runs: `total_seconds`, `accuracy`, `figure`.
        blocks: the figure of each complete run by its repeat, if the plan runs repeat after repeat.
        ran: every `batch_global`, `batch_per_rank`, `learning_rate`, `steps` and `epochs` that runs
            reported, by these names.
        means: of complete runs: `work` (samples trained with), `steps`, `epochs`, `accuracy`,
            `queue_seconds`, `data_wait_ratio` and `gpu_active`, if known.
        phases: mean seconds by `PARTS`.
        costs: of all attempts.
        oversubscribed, unverified: complete runs with more ranks than cores, and those whose
            binding is not verified.
        doubt: why it is not compared with other scales, empty if it is: runs timed out, trained
            less than at the baseline, or to another accuracy.
        unequal: how its accuracy differs from the baseline's, empty if it does not.
        speedup: over the baseline of the same series.
        serial_fraction: of Karp and Flatt.
        lost: mean seconds more than with ideal scaling from the baseline, by `PARTS`.
        distinguishable: from the setting with the best figure, corrected for how many settings are
            compared; None: unknown.
    """

    number: int
    label: str
    series: str
    scale: int | None
    values: Mapping[str, Any]
    planned: int
    runs: int
    missing: Mapping[str, int]
    seconds: Estimate | None
    seconds_without_staging: Estimate | None
    samples_per_second: Estimate | None
    accuracy: Estimate | None
    figure: Estimate | None
    samples: Mapping[str, tuple[float, ...]]
    blocks: Mapping[int, float]
    target: Target | None
    ran: Mapping[str, tuple[float, ...]]
    means: Mapping[str, float]
    phases: Mapping[str, float]
    costs: Costs
    oversubscribed: int
    unverified: int
    doubt: str = ""
    unequal: str = ""
    speedup: Speedup | None = None
    serial_fraction: Estimate | None = None
    lost: Mapping[str, float] = field(default_factory=dict)
    distinguishable: bool | None = None


@dataclass(frozen=True)
class Figure:
    """What settings are ranked by, and what speedups of a scaling sweep compare.

    Attributes:
        source: a field of the rows; `rate` is samples per second of the total time.
    """

    source: Literal["total_seconds", "rate", "samples_per_second", "metric", "accuracy"]
    name: str
    unit: str
    maximize: bool


@dataclass(frozen=True)
class FittedModel:
    """A scaling model fitted to the runs of one series.

    Attributes:
        parameters: by the formula's names; scales count in units of the smallest one.
        residual: typical relative distance of a run from the curve.
        lack_of_fit: p-value of the test whether the curve misses the measured scales by more than
            the runs scatter; None if that cannot be tested.
        speedups: the curve, by the measured scales.
        note: further results of the model, such as a peak.
    """

    model: str
    formula: str
    series: str
    parameters: Mapping[str, Estimate]
    residual: float
    lack_of_fit: float | None
    speedups: Mapping[int, float]
    note: str


@dataclass(frozen=True)
class Notice:
    """A warning that a reader needs before trusting the figures.

    Attributes:
        status: `loud` if it may change the answer; of the twelve ways to fool the masses whether
            the report answers them: `ok`, `not answered` or `does not apply`.
    """

    title: str
    text: str
    status: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The contents of a sweep's report.

    Attributes:
        accuracy_name: what `accuracy` is: `test accuracy`, or what the program calls it.
        mixed: why no speedups are given, by rule 1 (equal batches), or empty.
        states: attempts, and points that were never attempted, by state.
        failed: costs of attempts that are neither complete, nor pruned, nor continued; requeued
            starts included.
        best: number of the best setting, None if none can be recommended.
        provenance: where the figures come from, by heading.
    """

    version: int
    id: str
    name: str
    mode: str
    unit: str
    baseline: int | None
    figure: Figure
    accuracy_name: str
    mixed: str
    states: Mapping[str, int]
    settings: tuple[Setting, ...]
    attempts: tuple[Attempt, ...]
    costs: Costs
    failed: Costs
    provenance: Mapping[str, Any]
    question: str = ""
    answer: tuple[str, ...] = ()
    best: int | None = None
    notices: tuple[Notice, ...] = ()
    fits: tuple[FittedModel, ...] = ()
    checks: tuple[Notice, ...] = ()
    communication: Communication | None = None

    @property
    def scaling(self) -> bool:
        """Whether the sweep compares scales."""
        return self.mode in {"strong", "weak"}

    @property
    def search(self) -> bool:
        """Whether the sweep is a search, whose points are trials."""
        return self.mode in SEARCHES

    @property
    def series(self) -> dict[str, list[Setting]]:
        """Settings by the values of their axes, in the order of the plan."""
        grouped: dict[str, list[Setting]] = {}
        for setting in self.settings:
            grouped.setdefault(setting.series, []).append(setting)
        return grouped

    @property
    def ranked(self) -> list[Setting]:
        """Settings that were measured, the best first; of scales those that can be compared."""
        sign = -1 if self.figure.maximize else 1
        measured = [
            (sign * one.figure.value, one)
            for one in self.settings
            if one.figure and not (self.scaling and (one.oversubscribed or one.doubt))
        ]
        return [one for _, one in sorted(measured, key=lambda pair: pair[0])]
