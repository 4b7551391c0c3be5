"""The contents of a sweep's report as data, shared by all modules of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hpml_orchestrator.diagnosis.averaging import Averaging
from hpml_orchestrator.jobfile.sweep import SEARCHES
from hpml_orchestrator.sweeps.communication import Communication
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.plan import SweepPlan

MEASURED = "COMPLETED"
"""State of the attempts that enter medians."""

NOT_ATTEMPTED = ("WAITING", "EXCLUDED")
"""States of planned points that were never submitted."""

CONTINUED = "CONTINUED"
"""The state of attempts whose work the next one continued from a checkpoint."""

TIMED_OUT = ("TIMEOUT", "DEADLINE")
"""States of runs that would have taken longer; without them only the fast runs remain."""

PARTS = tuple(
    "staging, start-up, rendezvous, preparation, warm-up, steps, data wait, evaluation, "
    "checkpoint, end, not divided".split(", ")
)
"""The parts of a run's total time, in order; the queue is not among them."""


Difference: TypeAlias = Literal["", "unknown", "undecided", "faster", "slower", "worse"]
"""What a comparison showed: `unknown` with fewer than 6 runs, `undecided` if noise explains it."""


def is_complete(plan: SweepPlan, row: PointRow) -> bool:
    """Return whether a run counts in medians; runs of a trial are stopped early on purpose."""
    is_stopped = plan.trial is not None and row.state == "PRUNED"
    return (row.state == MEASURED or is_stopped) and bool(row.total_seconds)


@dataclass(frozen=True)
class PointStart:
    """One start of a point, or a point that was never started: its row and its place."""

    setting: int  # number of its setting
    repeat: int
    seed: int | None  # that the program was given; None if the sweep gives it none
    row: PointRow


@dataclass(frozen=True)
class Target:
    """Time to a target accuracy; runs that did not reach it are censored, not dropped."""

    accuracy: float  # to which the times belong
    beforehand: bool  # whether the plan named it before the first run was submitted
    every_epochs: float | None  # interval of the evaluations, the resolution of the time
    reached: int  # how many of the complete runs and timeouts reached the target
    # Complete runs whose time to this target is unknown; no other count includes them
    unknown: int
    seconds: Estimate  # median of all of these, infinite where too few reached it


@dataclass(frozen=True)
class MlperfResult:
    """Time to the target of a setting by MLPerf's rule: without the fastest and the slowest run."""

    setting: int  # number of the setting
    runs: int  # complete runs and timeouts
    reached: int  # how many of them reached the target
    dropped: tuple[float | None, float | None]  # seconds; None for a run that missed the target
    seconds: float | None  # mean of the others; None: no result
    remark: str  # why there is no result, or what MLPerf asks for beyond it


@dataclass(frozen=True)
class Costs:
    """What attempts cost."""

    gpu_hours: float
    core_hours: float
    node_hours: float
    energy_kwh: float | None  # None if it was measured for none of them
    energy_attempts: int
    # Attempts whose hours are those requested, because the allocation is not recorded
    requested: int


@dataclass(frozen=True)
class Quality:
    """How well the runs of a setting trained, by the figure that they report."""

    name: str  # in words, as `test accuracy`
    maximize: bool
    margin: float  # how much worse than at the baseline it may be
    relative: bool  # whether the margin is a share of the figure
    values: tuple[float, ...]  # of the complete runs that report it
    median: Estimate
    tested: int  # how many of the values come from test data
    test_set: str  # its size, and the binomial interval of this accuracy; empty if not reported

    @property
    def margin_text(self) -> str:
        """The margin with its unit."""
        if self.relative:
            return f"{100 * self.margin:g} %"
        return f"{self.margin:g}{' point' if self.margin == 1 else ''}"


@dataclass(frozen=True)
class Setting:
    """What was measured with one scale and one combination of the axes' values."""

    number: int  # its place in `SweepFacts.settings`
    label: str  # scale and values in one line
    series: str  # the values alone, empty without axes
    scale: int | None
    values: Mapping[str, object]
    planned: int  # runs of the plan that no rule excludes
    runs: int  # how many of them are complete
    missing: Mapping[str, int]  # those that are not complete, by the state of their last start
    seconds: Estimate | None  # total time of a run, staging included; None if no run is complete
    seconds_without_staging: Estimate | None
    samples_per_second: Estimate | None
    accuracy: Estimate | None
    quality: Quality | None
    diverged: Mapping[str, int]  # complete runs by the figure that is no number
    figure: Estimate | None  # what settings are ranked by (`SweepFacts.figure`)
    # The values of the complete runs: `total_seconds`, `accuracy`, `figure`
    samples: Mapping[str, tuple[float, ...]]
    # The figure of each complete run by its repeat, if the plan runs repeat after repeat
    blocks: Mapping[int, float]
    target: Target | None
    # Every `batch_global`, `batch_per_rank`, `learning_rate`, `steps` and `epochs` that runs
    # reported, by these names
    ran: Mapping[str, tuple[float, ...]]
    # Of complete runs: `work` (samples trained with), `steps`, `epochs`, `epochs_to_target` (of
    # those that reached it), `queue_seconds`, `data_wait_ratio` and `gpu_active`, if known
    means: Mapping[str, float]
    phases: Mapping[str, float]  # seconds of the median run by `PARTS`; they add up to `seconds`
    costs: Costs  # of all attempts
    oversubscribed: int  # complete runs with more ranks than cores
    unverified: int  # complete runs whose binding is not verified
    # Why it is not compared with other scales, empty if it is: runs timed out or were lost, trained
    # less than at the baseline, or are not shown to train as well
    doubt: str = ""
    # Why a complete setting of a grid or search has no figure: not all runs report it, or too few
    # reached the target
    unranked: str = ""
    unequal: str = ""  # why its quality withholds the speedup of a strong sweep, if it does
    # Whether its quality is shown to be that of the baseline; None: the baseline, or not reported
    keeps_quality: bool | None = None
    speedup: Speedup | None = None  # over the baseline of the same series
    # The same from the two medians, if it differs from a speedup that compares within repeats
    medians_speedup: float | None = None
    serial_fraction: Estimate | None = None  # of Karp and Flatt
    # By how many seconds `phases` exceed ideal scaling from the baseline, by `PARTS`
    lost: Mapping[str, float] = field(default_factory=dict)
    from_best: Speedup | None = None  # how many times as fast as the fastest scale, if comparable
    # Differences of one family: all together, they call equal settings different in 5 % of sweeps.
    # Empty for the setting itself, and for one that is not compared
    against_baseline: Difference = ""
    against_best: Difference = ""
    # Of a sweep by several figures: the median of each, if all complete runs have all
    objectives: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class RankedFigure:
    """What settings are ranked by, and what speedups of a scaling sweep compare.

    Attributes:
        source: a field of the rows; `rate` is samples per second of the total time.
        slowest: of a time to a target, that of the slowest run that reached it.
    """

    source: Literal["total_seconds", "rate", "samples_per_second", "metric", "accuracy"]
    name: str
    unit: str
    maximize: bool
    slowest: float | None = None


@dataclass(frozen=True)
class FittedModel:
    """A scaling model fitted to the runs of one series."""

    model: str
    formula: str
    series: str
    # By the formula's names; scales count in units of the smallest one. With fewer than 6 repeats
    # there are no intervals
    parameters: Mapping[str, Estimate]
    residual: float  # typical relative distance of a run from the curve of its repeat
    # P-value of the test whether the curve misses the measured scales by more than the runs
    # scatter; None if that cannot be tested
    lack_of_fit: float | None
    speedups: Mapping[int, float]  # the curve, by the measured scales
    note: str  # further results of the model, such as a peak


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
class SweepFacts:
    """The contents of a sweep's report."""

    version: int
    id: str
    name: str
    mode: str
    unit: str
    baseline: int | None
    figure: RankedFigure
    accuracy_name: str  # what `accuracy` is: `test accuracy`, or what the program calls it
    mixed: str  # why no speedups are given, by rule 1 (equal batches), or empty
    states: Mapping[str, int]  # attempts, and points that were never attempted, by state
    settings: tuple[Setting, ...]
    attempts: tuple[PointStart, ...]
    costs: Costs
    # Costs of attempts that are neither complete, nor pruned, nor continued; requeued starts
    # included
    failed: Costs
    provenance: Mapping[str, Any]  # where the figures come from, by heading
    question: str = ""
    answer: tuple[str, ...] = ()
    best: int | None = None  # number of the setting with the best median, None if there is none
    # Of a scaling sweep: number of the smallest scale shown to be within 5 % of the best, or `best`
    recommended: int | None = None
    notices: tuple[Notice, ...] = ()
    fits: tuple[FittedModel, ...] = ()
    checks: tuple[Notice, ...] = ()
    communication: Communication | None = None
    # Of gradients, in the median run of a setting, by its number; without runs that reported it
    averaging: Mapping[int, Averaging] = field(default_factory=dict)
    # Several figures that the sweep compares, and whether more of each is better; then no setting
    # is the best, and these are the numbers of those that no other one dominates
    objectives: Mapping[str, bool] = field(default_factory=dict)
    front: tuple[int, ...] = ()
    mlperf: tuple[MlperfResult, ...] = ()  # only if it was asked for

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
        """Measured settings, the best first; in a scaling sweep only those that can be compared."""
        sign = -1 if self.figure.maximize else 1
        measured = [
            (sign * one.figure.value, one)
            for one in self.settings
            if one.figure and not (self.scaling and (one.oversubscribed or one.doubt))
        ]
        return [one for _, one in sorted(measured, key=lambda pair: pair[0])]
