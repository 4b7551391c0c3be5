"""Speedups over the baseline, the ranking of settings, and the fitted models of scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hpml_orchestrator.sweeps import doubts, quality, statistics
from hpml_orchestrator.sweeps.facts import PARTS, Difference, FittedModel, Setting, SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Interval, Speedup
from hpml_orchestrator.sweeps.wording import scale_text

EQUIVALENT = 0.05  # how much longer a smaller scale may take to be recommended
_SAME_SPEEDUP = 0.02  # relative difference of two speedups that is not worth a word


def doubted(setting: Setting, baseline: Setting | None, plan: SweepPlan) -> Setting:
    """Return the setting with the reasons against comparing it with the baseline."""
    if baseline is None or setting is baseline or not (setting.runs and baseline.runs):
        return setting
    kept, unequal = quality.kept(setting.quality, baseline.quality, baseline.label)
    reasons = [setting.doubt]
    if plan.mode == "strong":  # a weak sweep compares rates, and its batch grows
        reasons += [doubts.other_work(setting, baseline), unequal]
    doubt = "; ".join(filter(None, reasons))
    return replace(setting, keeps_quality=kept, unequal=unequal, doubt=doubt)


def compared(setting: Setting, baseline: Setting | None, plan: SweepPlan) -> Setting:
    """Return the setting with its speedup over the baseline, and what is lost against the ideal."""
    if not (baseline and baseline.figure and setting.figure and setting.scale and baseline.scale):
        return setting
    if setting.doubt or baseline.doubt:
        return setting
    if setting is baseline:
        itself = Estimate(1, setting.runs, None)
        return replace(setting, speedup=Speedup(1, setting.runs, None, 1, itself))
    scale, growth = setting.scale / baseline.scale, 1.0
    medians = baseline.figure.value / setting.figure.value
    if plan.mode == "weak":
        medians = 1 / medians
        work = [one.means.get("work", math.nan) for one in (setting, baseline)]
        growth = work[0] / work[1]
    speedup = _speedup(setting, baseline, plan.mode, scale)
    # With ideal scaling every phase would shrink with the scale and, in a weak sweep, grow with
    # the work. What a phase takes beyond that is lost.
    lost = {
        name: setting.phases.get(name, 0.0) - baseline.phases.get(name, 0.0) * growth / scale
        for name in PARTS
        if name in {**setting.phases, **baseline.phases} and math.isfinite(growth)
    }
    serial = _serial_fraction(speedup) if scale > 1 else None
    apart = abs(medians / speedup.value - 1) > _SAME_SPEEDUP
    return replace(
        setting,
        speedup=speedup,
        medians_speedup=medians if apart else None,
        serial_fraction=serial,
        lost=lost,
    )


def _speedup(setting: Setting, baseline: Setting, mode: str, scale: float = 1.0) -> Speedup:
    paired = _paired(baseline, setting)
    old, new = paired or (baseline.samples["figure"], setting.samples["figure"])
    if mode == "weak":
        # Weak scaling compares rates, for which more is better, so the two sides swap.
        old, new = new, old
    return statistics.speedup(old, new, scale=scale, paired=bool(paired))


def _paired(one: Setting, other: Setting) -> tuple[list[float], list[float]] | None:
    both = sorted(one.blocks.keys() & other.blocks.keys())
    if len(both) < MIN_REPEATS:
        return None
    return [one.blocks[repeat] for repeat in both], [other.blocks[repeat] for repeat in both]


def _serial_fraction(speedup: Speedup) -> Estimate:
    ends, scale = speedup.interval, speedup.scale
    # The serial fraction falls as the speedup rises, so the ends of the interval swap.
    interval = ends and Interval(
        statistics.karp_flatt(ends.high, scale), statistics.karp_flatt(ends.low, scale), ends.method
    )
    return Estimate(statistics.karp_flatt(speedup.value, scale), speedup.n, interval)


def ranked(report: SweepFacts) -> SweepFacts:
    """Return the report with its best setting, a recommendation, and the verdicts on all others."""
    if not report.ranked:
        return report
    best = report.ranked[0]
    if report.scaling and not report.mixed:
        near = {one.number: _speedup(one, best, report.mode) for one in report.ranked[1:]}
        marked = [replace(one, from_best=near.get(one.number)) for one in report.settings]
        report = replace(report, settings=tuple(marked))
    return replace(
        report,
        settings=_judged(report, best),
        best=best.number,
        recommended=_recommended(report, best) if report.scaling else None,
    )


def _recommended(report: SweepFacts, best: Setting) -> int:
    """Return the number of the smallest scale that is shown to take at most 5 % longer.

    Scales are tried from the next smaller one down, up to the first that is not shown: of 19 scales
    that are all 5 % slower, one is recommended in 2 % of simulated sweeps of 6 runs. If each could
    be, it would be 18 %.
    """
    found = best
    for one in sorted(report.ranked, key=lambda one: -(one.scale or 0)):
        if one.series == best.series and (one.scale or 0) < (best.scale or 0):
            ends = one.from_best.interval if one.from_best else None
            if ends is None or ends.low < 1 / (1 + EQUIVALENT):
                break
            found = one
    return found.number


def _judged(report: SweepFacts, best: Setting) -> tuple[Setting, ...]:
    """Compare each ranked setting with the baseline of its series and with the best setting.

    All these verdicts are one family. The data choose the best, so that any pair might have been
    compared: Holm's method counts all of them, which costs little with a pooled variance.
    """
    bases = {one.series: one for one in report.ranked if one.speedup and one.speedup.scale == 1}
    pairs = {
        frozenset((one.number, other.number)): (other, one)
        for one in report.ranked
        for other in (bases.get(one.series), best)
        if other and other.number != one.number
    }
    tested = [one for one in report.ranked if len(one.samples["figure"]) >= MIN_REPEATS]
    paired = [_paired(*pair) for pair in pairs.values()]
    found = statistics.distinguishable(
        [
            within or (one.samples["figure"], other.samples["figure"])
            for within, (one, other) in zip(paired, pairs.values(), strict=True)
        ],
        comparisons=len(tested) * (len(tested) - 1) // 2,
        paired=[bool(within) for within in paired],
        pooled=_pooled(tested),
    )
    differ = dict(zip(pairs, found, strict=True))

    def verdict(one: Setting, other: Setting | None, speedup: Speedup | None) -> Difference:
        if other is None or (key := frozenset((one.number, other.number))) not in differ:
            return ""
        if not differ[key]:
            return "unknown" if differ[key] is None else "undecided"
        if speedup is None:
            return "slower" if report.scaling else "worse"
        return "faster" if speedup.value > 1 else "slower"

    return tuple(
        replace(
            one,
            against_baseline=verdict(one, bases.get(one.series), one.speedup),
            against_best=verdict(one, best, one.from_best),
        )
        for one in report.settings
    )


def _pooled(settings: Sequence[Setting]) -> tuple[float, float] | None:
    """Return the variance that all settings share; in blocks, of the repeats that all have."""
    if not any(one.blocks for one in settings):
        samples = [one.samples["figure"] for one in settings]
        return statistics.pooled_variance(samples, blocks=False)
    common = sorted(set.intersection(*({*one.blocks} for one in settings)))
    if len(common) < MIN_REPEATS:
        return None
    samples = [tuple(one.blocks[repeat] for repeat in common) for one in settings]
    return statistics.pooled_variance(samples, blocks=True)


# Fit the models of scaling to the runs of a sweep.

_SCALES_OF_A_LAW = 3  # fewest that Amdahl's or Gustafson's law is fitted to
_SCALES_OF_USL = 5
_LACK_OF_FIT = 0.05  # highest p-value of a curve that does not fit


def fits_of(report: SweepFacts) -> Iterable[FittedModel]:
    """Fit the laws of scaling to each series with speedups at three scales or more, USL at five."""
    strong = report.mode == "strong"
    for series, settings in report.series.items():
        compared = {
            one.scale: one
            for one in settings
            if one.speedup and one.scale and not one.oversubscribed
        }
        if len(compared) < _SCALES_OF_A_LAW or not report.baseline:
            continue
        unit = min(compared)
        units = [scale / unit for scale, one in compared.items() for _ in one.samples["figure"]]
        values = [value for one in compared.values() for value in one.samples["figure"]]
        repeats = [repeat for one in compared.values() for repeat in one.blocks]
        rates = [1 / value for value in values] if strong else values
        notes = [f"scales count in units of {scale_text(unit, report.unit)}"] * (unit > 1)
        if strong:
            fits = {"Amdahl": statistics.fit_amdahl(units, values, repeats)}
        else:
            fits = {"Gustafson": statistics.fit_gustafson(units, rates, repeats)}
        if len(compared) >= _SCALES_OF_USL:
            fits["Universal Scalability Law"] = statistics.fit_usl(units, rates, repeats)
        for name, fit in fits.items():
            base = fit.predict(report.baseline / unit)
            power = -1 if name == "Amdahl" else 1  # Amdahl's law gives seconds, the others rates
            yield FittedModel(
                model=name,
                formula=fit.formula,
                series=series,
                parameters=fit.parameters,
                residual=fit.residual,
                lack_of_fit=fit.lack_of_fit,
                speedups={scale: (fit.predict(scale / unit) / base) ** power for scale in compared},
                note="; ".join([*notes, *_peak(fit, unit, report.unit), *_limits(fit)]),
            )


def _peak(fit: statistics.Fit, unit: int, noun: str) -> Iterable[str]:
    if "b" in fit.parameters:
        peak = statistics.usl_peak(fit.parameters["a"].value, fit.parameters["b"].value)
        limit = 2 * fit.largest_scale
        if peak <= limit:
            yield f"highest throughput at about {unit * peak:.0f} {noun}"
        else:
            yield f"no peak up to {unit * limit:.0f} {noun}, twice the largest measured scale"


def _limits(fit: statistics.Fit) -> Iterable[str]:
    if not all(one.interval for one in fit.parameters.values()):
        yield f"no 95 % CI: that takes {MIN_REPEATS} repeats"
    if fit.outliers:
        yield f"without weight: {fit.outliers} of {fit.n} runs, far outside of the scatter"
    if fit.lack_of_fit is None:
        yield "whether it fits is not known: that takes repeats, and more scales than parameters"
    elif fit.lack_of_fit < _LACK_OF_FIT:
        yield "does not fit: it misses the scales by more than the runs scatter, do not build on it"
