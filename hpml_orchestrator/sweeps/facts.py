"""What a sweep's report says, as data: every module of the report reads or makes these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

__all__ = [
    "MEASURED",
    "PARTS",
    "Attempt",
    "Check",
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

PARTS = (
    "staging",
    "start-up",
    "rendezvous",
    "warm-up",
    "steps",
    "data wait",
    "evaluation",
    "checkpoint",
    "end",
    "not divided",
)
"""What the total time of a run is divided into, in order; the queue is not part of it."""


@dataclass(frozen=True)
class Attempt:
    """One start of a point: the row, with what the plan says about the point."""

    label: str
    setting: int
    repeat: int
    seed: int
    row: Row


@dataclass(frozen=True)
class Target:
    """Time to a target accuracy; runs that did not reach it are censored, not dropped.

    Attributes:
        every_epochs: interval of the evaluations, the resolution of the time.
        runs, reached: complete runs and timeouts, and how many of them reached the target.
        seconds: median (Kaplan-Meier), None where too few runs reached it.
        low, high: its 95 % interval; None where unknown, high also where it is open.
    """

    accuracy: float
    every_epochs: float | None
    runs: int
    reached: int
    seconds: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Setting:
    """What was measured with one scale and one combination of the axes' values.

    Attributes:
        label: scale and values in one line. series: the values alone, empty without axes.
        states: attempts by state. planned: runs that the plan has.
        seconds: total time of a run, staging included; None where no run is complete.
        figure: what settings are ranked by (`Report.figure`).
        speedup: over the baseline of the same series, with its efficiency.
        serial_fraction: of Karp and Flatt.
        batch_global, batch_per_rank, learning_rate, steps, epochs: every value that runs reported.
        phases: mean seconds by `PARTS`. lost: mean seconds more than with ideal scaling from the
            baseline. queue_seconds: mean seconds in the queue.
        gpu_hours, core_hours, energy_kwh: of all attempts; energy_kwh is None if never measured.
        distinguishable: from the best setting, by intervals that do not overlap; None: unknown.
        runs: complete runs. figures: of each of them, what settings are ranked by.
    """

    number: int
    label: str
    series: str
    scale: int | None
    values: Mapping[str, Any]
    planned: int
    states: Mapping[str, int]
    seconds: Estimate | None = None
    seconds_without_staging: Estimate | None = None
    samples_per_second: Estimate | None = None
    accuracy: Estimate | None = None
    figure: Estimate | None = None
    speedup: Speedup | None = None
    serial_fraction: Estimate | None = None
    target: Target | None = None
    batch_global: tuple[int, ...] = ()
    batch_per_rank: tuple[int, ...] = ()
    learning_rate: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, float] = field(default_factory=dict)
    queue_seconds: float | None = None
    data_wait_ratio: float | None = None
    gpu_active: float | None = None
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    energy_kwh: float | None = None
    oversubscribed: int = 0
    unverified: int = 0
    distinguishable: bool | None = None
    runs: int = 0
    figures: tuple[float, ...] = ()


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
        scales, speedups: the curve, at the measured scales.
        note: what the model says beyond its parameters.
    """

    model: str
    formula: str
    series: str
    parameters: Mapping[str, Estimate]
    runs: int
    residual: float
    scales: tuple[int, ...]
    speedups: tuple[float, ...]
    note: str = ""


@dataclass(frozen=True)
class Costs:
    """What all attempts cost, those that failed included."""

    attempts: int
    gpu_hours: float
    core_hours: float
    node_hours: float
    gpu_hours_failed: float
    core_hours_failed: float
    energy_kwh: float | None
    energy_attempts: int


@dataclass(frozen=True)
class Notice:
    """What a reader has to know before believing the figures.

    Attributes:
        restricts: whether it restricts the answer, which then says so.
        loud: whether it may turn the answer over.
        details: one line each.
    """

    title: str
    text: str
    restricts: bool = False
    loud: bool = False
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One of the twelve ways to fool the masses, and how this report answers it.

    Attributes:
        status: `ok`, `not answered` or `does not apply`.
    """

    way: str
    status: str
    answer: str


@dataclass(frozen=True)
class Report:
    """Everything that the report of a sweep says.

    Attributes:
        answer: the two sentences on top, and what restricts them.
        mixed: why no speedups are given, by rule 1 (equal batches), or empty.
        best: number of the best setting. fastest: of the one with the smallest total time.
        trace: of a search, the best figure so far after each trial, as (trial, figure).
        provenance: where the figures come from, by heading.
    """

    version: int
    id: str
    name: str
    mode: str
    unit: str
    baseline: int | None
    search: bool
    figure: Figure
    mixed: str
    states: Mapping[str, int]
    settings: tuple[Setting, ...]
    costs: Costs
    attempts: tuple[Attempt, ...]
    log_axes: tuple[str, ...]
    provenance: Mapping[str, Any]
    question: str = ""
    answer: tuple[str, ...] = ()
    best: int | None = None
    fastest: int | None = None
    notices: tuple[Notice, ...] = ()
    fits: tuple[FittedModel, ...] = ()
    trace: tuple[tuple[int, float], ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def scaling(self) -> bool:
        """Whether the sweep compares scales."""
        return self.mode in {"strong", "weak"}

    @property
    def complete(self) -> int:
        """Number of complete runs."""
        return self.states.get(MEASURED, 0)

    @property
    def series(self) -> dict[str, list[Setting]]:
        """Settings by the values of their axes, in the order of the plan."""
        grouped: dict[str, list[Setting]] = defaultdict(list)
        for setting in self.settings:
            grouped[setting.series].append(setting)
        return dict(grouped)

    @property
    def ranked(self) -> list[Setting]:
        """Settings that were measured, the best first."""
        sign = -1 if self.figure.maximize else 1
        measured = [(sign * one.figure.value, one) for one in self.settings if one.figure]
        return [one for _, one in sorted(measured, key=lambda pair: pair[0])]
