"""The warnings of a sweep's report, and the reasons against comparing scales.

The rules are those of docs/sweeps.md.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import median

import numpy as np
from scipy import stats

from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.document.templates import number, percent
from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.model import expand, fold
from hpml_orchestrator.sweeps.doubts import differing, some_lost
from hpml_orchestrator.sweeps.facts import CONTINUED, MEASURED, Notice, PointStart, SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Array, Places, outliers
from hpml_orchestrator.sweeps.wording import UNFINISHED, attempts_text, estimate_text, scale_text

# Warnings about what runs found besides their settings: nodes, CPUs, and speedups above ideal.

_Nodes = frozenset[str]


def conditions(report: SweepFacts) -> Iterable[Notice]:
    """Yield warnings about conditions under which times do not compare the settings."""
    if report.scaling:
        yield from _own_nodes(report)
    yield from _contention(report)


def _own_nodes(report: SweepFacts) -> Iterable[Notice]:
    """Yield a warning about scales whose runs all used nodes that no other scale used."""
    used: dict[int, list[_Nodes]] = defaultdict(list)
    for one in report.attempts:
        scale = report.settings[one.setting].scale
        if scale and one.row.state == MEASURED and (nodes := _nodes(one.row.nodes)):
            used[scale].append(nodes)
    found = {scale: (own, len(used[scale])) for scale, own in _apart(used).items()}
    texts = [
        f"{n} runs at {scale_text(scale, report.unit)} ran on {fold(sorted(own))}"
        for scale, (own, n) in found.items()
    ]
    if texts:
        several = len(texts) > 1 or any(len(own) > 1 for own, _ in found.values())
        text = (
            f"All {first_few(texts)}, which no other scale used: a difference may come from the "
            f"node{'s' if several else ''}."
        )
        yield Notice("A scale on separate nodes", text, "loud")


def _apart(used: Mapping[int, Sequence[_Nodes]]) -> Mapping[int, _Nodes]:
    """Return by scale the nodes that it alone used, in all its runs."""
    found: dict[int, _Nodes] = {}
    for scale, runs in used.items():
        own, others = _own(used, scale)
        if others and all(own & nodes and not nodes & others for nodes in runs):
            found[scale] = own
    # The other scales share nodes. Of these, a run larger than what the rest used needs new ones.
    sharing = {scale: runs for scale, runs in used.items() if scale not in found}
    for scale, runs in sharing.items():
        own, others = _own(sharing, scale)
        if all(own & nodes and len(nodes) <= len(others) for nodes in runs):
            found[scale] = own
    return dict(sorted(found.items()))


def _own(used: Mapping[int, Sequence[_Nodes]], scale: int) -> tuple[_Nodes, _Nodes]:
    """Return the nodes of most runs of a scale that no other used, and those of all others."""
    others = frozenset().union(*(nodes for one in used if one != scale for nodes in used[one]))
    times = Counter(node for nodes in used[scale] for node in nodes - others)
    # On a large cluster each run has other nodes, and none of them is a cause.
    least = max(2, len(used[scale]) / 2)
    return frozenset(node for node, n in times.items() if n >= least), others


@cache
def _nodes(text: str) -> _Nodes:
    with contextlib.suppress(HpmlError):
        return frozenset(expand(text))
    return frozenset()


def _contention(report: SweepFacts) -> Iterable[Notice]:
    shares = [
        (report.settings[one.setting].label, one.row.cpu_contention)
        for one in report.attempts
        if one.row.state == MEASURED
    ]
    known = [(label, share) for label, share in shares if share is not None]
    high = [(label, share) for label, share in known if THRESHOLDS["cpu-contention"].level(share)]
    if not high:
        return
    most = percent(max(share for _, share in high))
    text = (
        f"In {len(high)} of {counted(len(shares), 'complete run')} other processes had the CPUs of "
        f"a rank for up to {most} of its training: times of these runs do not show how fast the "
        "settings are."
    )
    if left := len(shares) - len(known):
        text += f" For {counted(left, 'run')} this was not measured."
    tally = Counter(label for label, _ in high).most_common(8)
    details = tuple(f"{label}: {counted(n, 'run')}" for label, n in tally)
    timed = report.scaling or "second" in report.figure.name
    yield Notice("CPU contention", text, "loud" if timed else "", details)


def above_ideal(report: SweepFacts) -> Iterable[Notice]:
    """Yield a warning about efficiencies above 100 %, beyond the noise."""
    found = [
        f"{one.label} ({estimate_text(one.speedup.efficiency, 100)} %)"
        for one in report.settings
        if one.speedup and (ends := one.speedup.efficiency.interval) and ends.low > 1
    ]
    if found:
        text = (
            f"More than ideal: {first_few(found)}. Usually the data or the model fits into the "
            "caches or the memory of more nodes, or the baseline's runs were slow: check those "
            "before you report it."
        )
        yield Notice("Efficiency above 100 %", text)


# The course of a sweep: outlying runs, and a drift over the order of the runs.

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


_MOST_DETAILS = 8


def notices(
    plan: SweepPlan, report: SweepFacts, *, aim: float | None, one_after_other: bool
) -> Iterable[Notice]:
    """Return the warnings of a report, the most serious first.

    Args:
        plan: the plan.
        report: everything else in the report.
        aim: the accuracy that reported times refer to, if any.
        one_after_other: whether all repeats of a setting come before those of the next.
    """
    rows = [attempt.row for attempt in report.attempts]
    for name in ("code", "environment", "hardware", "device"):
        found = Counter(text for row in rows if (text := getattr(row, name)))
        if len(found) > 1:
            text = f"Attempts differ in {name}, so differences may not come from the settings."
            silent = sum(row.started is not None and not getattr(row, name) for row in rows)
            details = [f"not recorded: {counted(silent, 'attempt')}"] * bool(silent)
            yield Notice(f"Different {name}", text, "loud", (*_tally(found, "attempt"), *details))
    yield from conditions(report)
    yield from _deviations(plan, report)
    yield from _targets(plan, report, aim)
    yield from _missed(report)
    several = report.scaling and len([one for one in report.settings if one.planned]) > 1
    if several and one_after_other:
        text = (
            "The plan submits all runs of one setting before those of the next: a drift of the "
            "cluster over time looks like an effect of the scale."
        )
        yield Notice("Order of the runs", text, "loud")
    yield from course(report)
    yield from above_ideal(report)
    if few := [one.runs for one in report.settings if 0 < one.runs < MIN_REPEATS]:
        text = (
            f"No 95 % CI for {counted(len(few), 'setting')} with fewer than {MIN_REPEATS} "
            f"complete runs (down to {min(few)}), so differences there may be chance."
        )
        yield Notice("Few repeats", text)
    if missing := set(report.states) - {MEASURED, "PRUNED", "EXCLUDED", CONTINUED}:
        title = "Not finished" if missing & UNFINISHED else "Not completed"
        yield Notice(title, f"{attempts_text({name: report.states[name] for name in missing})}.")
    if left := Counter(row.reason for row in rows if row.state == "EXCLUDED"):
        text = f"{counted(left.total(), 'point')} of the plan will not run."
        yield Notice("Left out", text, details=_tally(left, "point"))
    if dirty := sum("+dirty" in row.code for row in rows):
        text = f"{counted(dirty, 'attempt')} ran code with uncommitted changes."
        yield Notice("Uncommitted changes", text)


def _tally(found: Counter[str], noun: str) -> tuple[str, ...]:
    return tuple(f"{text}: {counted(n, noun)}" for text, n in found.most_common(_MOST_DETAILS))


def _deviations(plan: SweepPlan, report: SweepFacts) -> Iterable[Notice]:
    """Yield warnings about runs that were placed or trained differently than planned."""
    complete = f"of {report.states.get(MEASURED, 0)} complete runs"
    if many := [one for one in report.settings if one.oversubscribed]:
        text = (
            f"{sum(one.oversubscribed for one in many)} {complete} had more ranks than CPU cores "
            f"({first_few([one.label for one in many])}): their times say little about scaling."
        )
        yield Notice("Oversubscribed runs", text, "loud")
    if loose := [one for one in report.settings if one.unverified]:
        names = first_few([one.label for one in loose])
        text = f"{sum(one.unverified for one in loose)} {complete} are not verified ({names})."
        yield Notice("Binding not verified", f"The bindings of {text}")
    if not report.search:
        yield from some_lost(report.settings)
    planned = {point.number: point.learning_rate for point in plan.points}
    rates = [
        f"point {attempt.row.point}: {reported:g} instead of {rate:g}"
        for attempt in report.attempts
        if (rate := planned.get(attempt.row.point))
        and (reported := attempt.row.learning_rate)
        and f"{reported:g}" != f"{rate:g}"
    ]
    if rates:
        text = f"{counted(len(rates), 'attempt')} trained with another learning rate than planned."
        yield Notice("Learning rate", text, details=tuple(rates[:_MOST_DETAILS]))
    used = differing(report.settings, "learning_rate")
    if report.mode == "strong" and not plan.spec.learning_rate and used:
        text = (
            f"The scales trained with learning rates from {used[0]:g} to {used[-1]:g} at "
            "the same global batch, so their accuracies and times to accuracy do not compare."
        )
        yield Notice("Different learning rates", text, "loud")
    measured = [one for one in report.settings if one.runs]
    if report.mode == "strong" and not all(
        {"work", "steps", "epochs"} & one.means.keys() for one in measured
    ):
        text = "Not all runs reported steps or epochs: that all scales do the same work is assumed."
        yield Notice("Amount of work not recorded", text)
    steps = {one.label: one.ran["steps"] for one in report.settings if len(one.ran["steps"]) > 1}
    if steps and report.scaling:
        listed = first_few([f"{label}: {min(n)}-{max(n)}" for label, n in steps.items()], 4)
        text = f"Runs of the same setting trained different numbers of steps ({listed})."
        yield Notice("Different steps", text)


def _missed(report: SweepFacts) -> Iterable[Notice]:
    """Yield which settings have runs that missed the target, and runs that took part later."""
    missed = [
        f"{one.label}: {one.target.reached} of {counted(one.target.seconds.n, 'run')} reached it"
        for one in report.settings
        if one.target and one.target.reached < one.target.seconds.n
    ]
    if missed and report.scaling:
        text = "Not all runs reached the target accuracy; speedups compare whole runs all the same."
        yield Notice("Target missed", text, details=tuple(missed[:_MOST_DETAILS]))
    later = [one for one in report.attempts if one.row.start and one.row.state == MEASURED]
    if later and any(one.blocks for one in report.settings):
        text = (
            f"{counted(len(later), 'complete run')} started again, later than the others of the "
            "same repeat, with which times are compared: the program or the cluster may have "
            "changed in between."
        )
        yield Notice("Runs at another time", text)


def _targets(plan: SweepPlan, report: SweepFacts, aim: float | None) -> Iterable[Notice]:
    """Yield warnings about times to accuracy that are not to the sweep file's target."""
    rows = [attempt.row for attempt in report.attempts]
    told = sorted({row.target_accuracy for row in rows if row.target_accuracy is not None})
    listed = ", ".join(f"{target:g}" for target in told)
    wanted = plan.spec.target_accuracy
    unknown = sum(one.target.unknown for one in report.settings if one.target)
    if wanted is not None and aim != wanted and report.states.get(MEASURED):
        text = f"The sweep file's target accuracy is {wanted:g}, but no run reported evaluations"
        text += f", and the program measured its times to {listed}" if told else ""
        text += f": the times below are to {aim:g}." if aim else ": no time to it is known."
        yield Notice("Another target", text, "loud")
    elif aim is None and len(told) > 1:
        text = f"The program measured its times to different accuracies ({listed}): none is given."
        yield Notice("Different targets", text, "loud")
    elif unknown:
        text = f"{counted(unknown, 'complete run')} reported no time to the accuracy {aim:g}."
        yield Notice("Unknown times to the target", text, "loud")
    elif aim is not None and any(target != aim for target in told):
        text = (
            f"The program measured its times to {listed}; those to the sweep file's {aim:g} are "
            "computed from the evaluations that it reported, from the start of its warm-up."
        )
        yield Notice("Computed times to the target", text)
