"""The course of a sweep: outlying runs, and a drift over the order of the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from scipy import stats

from hpml_orchestrator.diagnosis.templates import number, percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.sweeps.facts import MEASURED, Notice, PointStart, SweepFacts
from hpml_orchestrator.sweeps.models import Places, outliers
from hpml_orchestrator.sweeps.statistics import Array

_MUCH_LONGER = 1.5  # times the median of the setting
_MOST_RUNS = 5
_FEWEST_RUNS = 3  # of a setting whose runs have a usual time
_SURE = 0.01  # highest p-value of a drift
_PRINTED = 0.001  # smallest p-value that is printed
_SMALL_DRIFT = 0.02  # from the first run to the last


def course(report: SweepFacts) -> Iterable[Notice]:
    """Yield notices of outlying runs and of a drift, if a scaling sweep has them.

    A run is an outlier if it is far outside of the scatter and took 1.5 times the median of its
    setting.
    """
    runs = [one for one in report.attempts if one.row.state == MEASURED and one.row.total_seconds]
    if not (report.scaling and runs):
        return
    logs = np.log([one.row.total_seconds or 1 for one in runs])
    settings = np.unique([one.setting for one in runs], return_inverse=True)[1]
    in_blocks = settings.max() > 0 and any(one.blocks for one in report.settings)
    repeats = np.unique([in_blocks * one.repeat for one in runs], return_inverse=True)[1]
    far = outliers(logs, settings, repeats)
    groups = {
        one.setting: [other for other in runs if other.setting == one.setting] for one in runs
    }
    found = {
        _outlier(report, run, groups[run.setting]): _ratio(run, groups[run.setting])
        for run, is_far in zip(runs, far, strict=True)
        if is_far
        and len(groups[run.setting]) >= _FEWEST_RUNS
        and _ratio(run, groups[run.setting]) > _MUCH_LONGER
    }
    if found:
        listed = sorted(found, key=lambda text: -found[text])[:_MOST_RUNS]
        listed += [f"{len(found) - _MOST_RUNS} more"] * (len(found) > _MOST_RUNS)
        text = (
            f"{len(found)} of {counted(len(runs), 'complete run')} took far longer than the others "
            "of the same setting. None is left out: medians withstand a few, and the fitted models "
            "give them no weight."
        )
        yield Notice("Outliers", text, details=tuple(listed))
    starts = np.array([one.row.started or math.nan for one in runs])
    if np.isfinite(starts).all():
        order = stats.rankdata(starts)
        slope, p_value = _trend(order[~far], logs[~far], settings[~far], repeats[~far])
        change = math.expm1(slope * (len(runs) - 1))
        if p_value < _SURE and abs(change) > _SMALL_DRIFT:
            yield _drift(change, p_value, in_blocks=in_blocks)


def _ratio(run: PointStart, group: Sequence[PointStart]) -> float:
    usual = median(one.row.total_seconds or 0 for one in group)
    return (run.row.total_seconds or 0) / usual


def _outlier(report: SweepFacts, run: PointStart, group: Sequence[PointStart]) -> str:
    """Return how much longer a run took, and the phase that explains at least half of it."""
    text = (
        f"run {run.row.run} ({report.settings[run.setting].label}) took "
        f"{number(_ratio(run, group))} times the median of its setting"
    )
    seconds = run.row.total_seconds or 0
    longer = {
        name: took - median(one.row.phases.get(name, 0) for one in group)
        for name, took in run.row.phases.items()
        if name != "queue"
    }
    name = max(longer, key=longer.__getitem__, default="")
    if name and longer[name] > (1 - 1 / _ratio(run, group)) * seconds / 2:
        text += f": {name} {number(run.row.phases[name])} s of {number(seconds)} s"
    return text


def _trend(order: Array, logs: Array, settings: Places, repeats: Places) -> tuple[float, float]:
    """Return the slope of the logs over the order, and its p-value.

    The runs of a repeat share its noise, so each repeat counts once; without repeats each run
    counts, compared with the others of its setting.
    """

    def within(values: Array, groups: Places) -> Array:
        return values - (np.bincount(groups, values) / np.bincount(groups))[groups]

    used = np.unique(settings, return_inverse=True)[1]
    x, y, fitted = within(order, used), within(logs, used), used.max() + 2
    if repeats.max() > 0:
        blocks = np.unique(repeats, return_inverse=True)[1]
        x, y = (np.bincount(blocks, one) / np.bincount(blocks) for one in (order, y))
        x, y, fitted = x - x.mean(), y - y.mean(), 2
    if len(x) <= fitted or not x.any():
        return 0.0, 1.0
    slope = float(x @ y / (x @ x))
    left = y - slope * x
    error = math.sqrt(float(left @ left) / (len(x) - fitted) / float(x @ x))
    p_value = 2 * stats.t.sf(abs(slope) / error, len(x) - fitted) if error else float(not slope)
    return slope, float(p_value)


def _drift(change: float, p_value: float, *, in_blocks: bool) -> Notice:
    p = f"p = {number(p_value)}" if p_value >= _PRINTED else f"p < {_PRINTED}"
    text = (
        f"The runs became {'slower' if change > 0 else 'faster'} by about {percent(abs(change))} "
        f"from the first to the last (trend over the order of the runs, {p}). "
    )
    if in_blocks:
        text += "Each repeat runs every setting, so speedups hold; absolute times do not."
        return Notice("Drift", text)
    text += "Speedups do not compare runs of the same repeat, so they may come from the drift."
    return Notice("Drift", text, "loud")
