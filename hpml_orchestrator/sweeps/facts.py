"""What a sweep's report says, as data: every module of the report reads or makes these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpml_orchestrator.spec.sweep import SEARCHES
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
class Costs:
    """What attempts cost; `energy_kwh` is None if it was never measured."""

    attempts: int
    gpu_hours: float
    core_hours: float
    node_hours: float
    energy_kwh: float | None
    energy_attempts: int


@dataclass(frozen=True)
class Setting:
    """What was measured with one scale and one combination of the axes' values.

    Attributes:
        label: scale and values in one line. series: the values alone, empty without axes.
        planned, runs: runs that the plan has, and how many of them are complete.
        seconds: total time of a run, staging included; None where no run is complete.
        figure: what settings are ranked by (`Report.figure`); figures: of each complete run.
        batch_global, batch_per_rank, learning_rate, steps, epochs: every value that runs reported.
        phases: mean seconds by `PARTS`. queue_seconds: mean seconds in the queue.
        costs: of all attempts.
        oversubscribed, unverified: complete runs with more ranks than cores, and those whose
            binding is not verified.
        speedup: over the baseline of the same series; efficiency: in percent.
        serial_fraction: of Karp and Flatt.
        lost: mean seconds more than with ideal scaling from the baseline, by `PARTS`.
        distinguishable: from the best setting; None: unknown.
    """

    number: int
    label: str
    series: str
    scale: int | None
    values: Mapping[str, Any]
    planned: int
    runs: int
    seconds: Estimate | None
    seconds_without_staging: Estimate | None
    samples_per_second: Estimate | None
    accuracy: Estimate | None
    figure: Estimate | None
    figures: tuple[float, ...]
    target: Target | None
    batch_global: tuple[int, ...]
    batch_per_rank: tuple[int, ...]
    learning_rate: tuple[float, ...]
    steps: tuple[int, ...]
    epochs: tuple[int, ...]
    phases: Mapping[str, float]
    queue_seconds: float | None
    data_wait_ratio: float | None
    gpu_active: float | None
    costs: Costs
    oversubscribed: int
    unverified: int
    speedup: Speedup | None = None
    efficiency: Estimate | None = None
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
    note: str


@dataclass(frozen=True)
class Notice:
    """What a reader has to know before believing the figures; a loud one may change the answer."""

    title: str
    text: str
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
        mixed: why no speedups are given, by rule 1 (equal batches), or empty.
        states: attempts by state. failed: costs of those that are neither complete nor pruned.
        best: number of the best setting, None where nothing can be recommended.
        provenance: where the figures come from, by heading.
    """

    version: int
    id: str
    name: str
    mode: str
    unit: str
    baseline: int | None
    figure: Figure
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
    checks: tuple[Check, ...] = ()

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
        """Settings that were measured, the best first; no scales with more ranks than cores."""
        sign = -1 if self.figure.maximize else 1
        measured = [
            (sign * one.figure.value, one)
            for one in self.settings
            if one.figure and not (self.scaling and one.oversubscribed)
        ]
        return [one for _, one in sorted(measured, key=lambda pair: pair[0])]
