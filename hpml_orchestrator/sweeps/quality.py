"""How well the runs of a sweep trained: by which figure, and whether a scale keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hpml_orchestrator.errors import counted
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps.facts import MEASURED, Quality
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.rows import TEST_ACCURACIES, PointRow, lost_figure
from hpml_orchestrator.sweeps.statistics import (
    CONFIDENCE,
    MIN_REPEATS,
    mean_variance,
    median_estimate,
    satterthwaite,
)
from hpml_orchestrator.sweeps.wording import accuracy_text, value_text

_LOSSES = (
    *("test_loss", "eval_loss", "evaluation_loss", "validation_loss", "val_loss"),
    *("test_perplexity", "eval_perplexity", "validation_perplexity", "val_perplexity"),
    *("loss", "perplexity"),
)  # compared if runs report no accuracy, the preferred first
_ON_TEST = ("test", "eval")  # how names of figures on test data begin
_TEST_SIZES = ("test_images", "test_samples", "test_examples", "test_size", "eval_samples")
_MARGIN = 0.01  # how much worse a scale may be: of an accuracy, or as a share of a loss
_LARGEST_FRACTION = 1.5  # of accuracies; above it, they are per cents

_Key: TypeAlias = tuple[int, int]


class _Figure(NamedTuple):
    source: str  # `accuracy` and `metric` are fields of rows, any other name one of the result
    name: str
    maximize: bool = False
    margin: float = _MARGIN
    relative: bool = True


def with_divergence(plan: SweepPlan, rows: Sequence[PointRow]) -> list[PointRow]:
    """Return the rows, marking complete runs that diverged; these have no accuracy."""
    # Strict JSON has null for a NaN, but also for what was never measured: then no run has it.
    known = {name for row in rows for name in numbers(row.result)}
    found = []
    for row in rows:
        lost = row.diverged or lost_figure(row.result, plan.spec.search.metric_name, known)
        if row.accuracy is not None and not math.isfinite(row.accuracy):
            lost = lost or f"{row.accuracy_name or 'accuracy'} is NaN"
        is_lost = lost and row.state == MEASURED
        found.append(replace(row, diverged=lost, accuracy=None) if is_lost else row)
    return found


def qualities(plan: SweepPlan, groups: Mapping[_Key, Sequence[PointRow]]) -> dict[_Key, Quality]:
    """Return the quality of each group of complete runs that reports one, all of one figure.

    That is the accuracy, else the metric that the sweep file names, else a known loss.
    """
    figure = _figure(plan, [row for rows in groups.values() for row in rows if not row.diverged])
    if figure is None:
        return {}
    found = {key: _quality(figure, rows) for key, rows in groups.items()}
    return {key: quality for key, quality in found.items() if quality}


def _figure(plan: SweepPlan, rows: Sequence[PointRow]) -> _Figure | None:
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    if accuracies:
        # Then these are per cents, and the margin is 1 point.
        margin = 100 * _MARGIN if max(accuracies) > _LARGEST_FRACTION else _MARGIN
        name = accuracy_text({row.accuracy_name for row in rows if row.accuracy is not None})
        return _Figure("accuracy", name, maximize=True, margin=margin, relative=False)
    search = plan.spec.search
    metric = search.metric_name
    if metric and "second" not in metric and any(row.metric is not None for row in rows):
        return _Figure("metric", metric, maximize=search.maximize)
    # The unit of a loss is the program's own, so the margin is a share of it; 1 % of a perplexity,
    # exp(loss), is the stricter one: 0.01 of the loss.
    names = {name for row in rows for name in numbers(row.result)}
    known = [name for name in _LOSSES if name in names]
    return _Figure(known[0], known[0].replace("_", " ")) if known else None


def _quality(figure: _Figure, rows: Sequence[PointRow]) -> Quality | None:
    is_accuracy, values, on_test = figure.source == "accuracy", [], []
    judged = [row for row in rows if not row.diverged]
    for row in judged:
        fields = {"accuracy": row.accuracy, "metric": row.metric}
        value = fields.get(figure.source, numbers(row.result).get(figure.source))
        if value is not None:
            values.append(value)
            name = row.accuracy_name if is_accuracy else figure.name
            on_test.append(name in TEST_ACCURACIES or name.startswith(_ON_TEST))
    if not values:
        return None
    return Quality(
        name=figure.name,
        maximize=figure.maximize,
        margin=figure.margin,
        relative=figure.relative,
        values=tuple(values),
        median=median_estimate(values),
        tested=sum(on_test),
        test_set=_test_set(figure, median(values), judged) if is_accuracy and all(on_test) else "",
    )


def _test_set(figure: _Figure, accuracy: float, rows: Sequence[PointRow]) -> str:
    """Return the size of the test set, and what it leaves uncertain of this accuracy."""
    told = [numbers(row.result) for row in rows]
    sizes = {(name, int(one[name])) for one in told for name in _TEST_SIZES if one.get(name)}
    whole = figure.margin / _MARGIN  # 100 if accuracies are per cents
    if len(sizes) != 1 or not 0 <= accuracy <= whole:
        return ""
    ((name, size),) = sizes
    right = stats.binomtest(round(accuracy / whole * size), size)
    low, high = right.proportion_ci(CONFIDENCE, method="wilson")
    return (
        f"{counted(size, 'image' if name == 'test_images' else 'sample')}: "
        f"one error is {100 / size:.2g} %; "
        f"binomial 95 % [{low * whole:.3g}, {high * whole:.3g}]"
    )


def kept(ours: Quality | None, theirs: Quality | None, whose: str) -> tuple[bool | None, str]:
    """Return whether a quality is shown not to be worse than another by more than the margin.

    From 6 runs of each on, the 95 % interval of the difference of the means (Welch) must exclude a
    larger loss, which a scale that loses more passes with a probability of at most 2.5 %: 0.3 % at
    twice the margin, for accuracies that scatter by 0.02. Each scale is judged alone; that all of
    them keep the quality needs no correction, because all have to pass.

    The second value is the reason against comparing the two, or empty. With fewer runs there is one
    only if the means differ by more than the margin.

    Args:
        ours: of the setting; None if no run reports one, which is not judged.
        theirs: of the baseline.
        whose: the baseline's name.
    """
    if ours is None or theirs is None:
        return None, ""
    if (ours.name, ours.margin) != (theirs.name, theirs.margin):  # of two sweeps
        return None, ""
    one, other, margin = np.asarray(ours.values), np.asarray(theirs.values), ours.margin
    if ours.relative and min(one.min(), other.min()) > 0:
        one, other = np.log(one), np.log(other)
    elif ours.relative:  # a log-likelihood has no log
        margin *= abs(float(other.mean()))
    n = min(len(one), len(other))
    difference = float(one.mean() - other.mean())
    half = _half_width(one, other) if n >= MIN_REPEATS else 0.0
    loss = half - difference if ours.maximize else half + difference
    is_kept = loss <= margin * (1 + 1e-9)  # up to rounding
    if is_kept:
        return n >= MIN_REPEATS, ""
    means = [value_text(fmean(one.values)) for one in (ours, theirs)]
    runs = runs_text(ours, theirs)
    if n >= MIN_REPEATS:
        share = ours.relative and margin == ours.margin
        ends = [100 * end if share else end for end in (difference - half, difference + half)]
        unit = " %" if share else ""
        runs = f"95 % CI of the difference [{ends[0]:.2g}, {ends[1]:.2g}]{unit}; {runs}"
    return False, (
        f"the mean {ours.name} is not shown to be within {ours.margin_text} of that of {whose}: "
        f"{means[0]} against {means[1]} ({runs})"
    )


def runs_text(ours: Quality, theirs: Quality) -> str:
    """Return how many runs of both report the quality."""
    n, other = len(ours.values), len(theirs.values)
    return f"{counted(n, 'run')} each" if n == other else f"{n} and {counted(other, 'run')}"


def _half_width(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return half of the 95 % interval of a difference of means, by Welch's t."""
    variance, freedom = satterthwaite(mean_variance(one), mean_variance(other))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(variance)
