"""Speedups over the baseline, and the ranking of settings."""

from __future__ import annotations

import math
from dataclasses import replace

from hpml_orchestrator.sweeps import doubts, models, quality, statistics
from hpml_orchestrator.sweeps.facts import PARTS, Setting, SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Interval, Speedup


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
    paired = _paired(baseline, setting)
    old, new = paired or (baseline.samples["figure"], setting.samples["figure"])
    if plan.mode == "weak":
        # Weak scaling compares rates, for which more is better, so the two sides swap.
        old, new = new, old
        work = [one.means.get("work", math.nan) for one in (setting, baseline)]
        growth = work[0] / work[1]
    speedup = statistics.speedup(old, new, scale=scale, paired=bool(paired))
    # With ideal scaling every phase would shrink with the scale and, in a weak sweep, grow with
    # the work. What a phase takes beyond that is lost.
    lost = {
        name: setting.phases.get(name, 0.0) - baseline.phases.get(name, 0.0) * growth / scale
        for name in PARTS
        if name in {**setting.phases, **baseline.phases} and math.isfinite(growth)
    }
    serial = _serial_fraction(speedup) if scale > 1 else None
    return replace(setting, speedup=speedup, serial_fraction=serial, lost=lost)


def _paired(one: Setting, other: Setting) -> tuple[list[float], list[float]] | None:
    both = sorted(one.blocks.keys() & other.blocks.keys())
    if len(both) < MIN_REPEATS:
        return None
    return [one.blocks[repeat] for repeat in both], [other.blocks[repeat] for repeat in both]


def _serial_fraction(speedup: Speedup) -> Estimate:
    ends, scale = speedup.interval, speedup.scale
    # The serial fraction falls as the speedup rises, so the ends of the interval swap.
    interval = ends and Interval(
        models.karp_flatt(ends.high, scale), models.karp_flatt(ends.low, scale), ends.method
    )
    return Estimate(models.karp_flatt(speedup.value, scale), speedup.n, interval)


def ranked(report: SweepFacts, *, paired: bool) -> SweepFacts:
    """Return the report with its best setting, and mark those not distinguishable from it."""
    if not report.ranked:
        return report
    top, *others = report.ranked
    settings = [one for one in report.ranked if one.runs >= MIN_REPEATS]
    in_pairs = paired and all(_paired(top, one) for one in others if one in settings)
    samples = [(top.samples["figure"], one.samples["figure"]) for one in others]
    aligned = [_paired(top, one) if in_pairs else None for one in others]
    found = statistics.distinguishable(
        [pair or sample for pair, sample in zip(aligned, samples, strict=True)],
        comparisons=len(settings) * (len(settings) - 1) // 2,
        paired=in_pairs,
    )
    differ = {one.number: answer for one, answer in zip(others, found, strict=True)}
    if top in settings:
        differ[top.number] = False
    best = top
    if report.scaling:  # the smallest of those that may be the fastest
        equal = [one for one in report.ranked if differ.get(one.number) is False]
        best = min(equal, key=lambda one: one.scale or 0, default=top)
    marked = [replace(one, distinguishable=differ.get(one.number)) for one in report.settings]
    return replace(report, settings=tuple(marked), best=best.number)
