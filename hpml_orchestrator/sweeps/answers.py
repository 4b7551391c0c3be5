"""The question and the answer of a sweep's report, in sentences, and its checklist.

The sentences follow the rules of docs/sweeps.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpml_orchestrator.document.templates import number, percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps import selection
from hpml_orchestrator.sweeps.facts import MEASURED, Notice, Setting, SweepFacts
from hpml_orchestrator.sweeps.power import found_by, sensitivity
from hpml_orchestrator.sweeps.quality import runs_text
from hpml_orchestrator.sweeps.ranking import EQUIVALENT
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Speedup
from hpml_orchestrator.sweeps.wording import (
    CONSTANT,
    UNFINISHED,
    attempts_text,
    axis_text,
    costs_text,
    environment,
    estimate_text,
    exact_text,
    scale_text,
)

_MOST_NAMES = 3
_MOST_SCALES = 5  # in one sentence
_SMALL_SHARE = 0.02
_WIDE = 0.5  # an interval of a serial fraction that says nothing
_CAUSES = {
    "rendezvous": "launch and rendezvous",
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}


def question(report: SweepFacts) -> str:
    """Return the question that the sweep asks, with the job's name."""
    if report.objectives:
        return selection.question(report)
    job = report.name.removesuffix(f"-{report.mode}")
    tried = [one for one in report.settings if one.planned]
    scales = sorted({one.scale for one in tried if one.scale})
    if report.scaling and scales:
        listed = ", ".join(str(scale) for scale in scales[:-1])
        over = f"{listed} and " if listed else ""
        what = "global batch" if report.mode == "strong" else "batch of each rank"
        sizes = {size for one in tried for size in one.ran[CONSTANT[report.mode]]}
        size = f" ({sizes.pop()})" if len(sizes) == 1 else ""
        largest = scale_text(scales[-1], report.unit)
        return f"How does {job} scale over {over}{largest} with the same {what}{size}?"
    names = dict.fromkeys(axis_text(name) for one in tried for name in one.values)
    axes = " and ".join(names)
    direction = "highest" if report.figure.maximize else "lowest"
    which = f"of {counted(len(tried), 'combination')} of {axes} gives"
    if report.search:
        which = f"values of {axes} give" if axes else "values give"
    return f"Which {which} {job} the {direction} {report.figure.name}?"


def answer(report: SweepFacts) -> Iterable[str]:
    """Return the answer in a few sentences, if the data allow one."""
    doubtful = [one for one in report.settings if one.doubt and report.scaling]
    if not report.states.get(MEASURED):
        what = "No run is complete yet" if UNFINISHED & set(report.states) else "No run completed"
        yield f"{what} ({attempts_text(report.states)}): no answer is possible."
        return
    more: list[str] = []
    if report.objectives:
        yield from selection.answer(report)
        return
    if report.best is None:
        why = "all had more ranks than CPU cores" if report.scaling else "none has a figure"
        why = "no scale can be compared" if doubtful else why
        yield f"The complete runs give no answer: {why}."
        if not report.scaling:
            yield _how_to_report(report)
    elif report.scaling:
        first, *more = _scaling(report, report.settings[report.best])
        yield first
    else:
        more = [*_ranking(report, report.settings[report.best])]
    for one in doubtful[:_MOST_NAMES]:
        yield f"{one.label} {_be(one)} not compared: {one.doubt}."
    if len(doubtful) > _MOST_NAMES:
        yield f"{counted(len(doubtful) - _MOST_NAMES, 'more setting')} cannot be compared."
    yield from more
    yield from sensitivity(report)


def _be(setting: Setting) -> str:
    return "is" if setting.scale == 1 else "are"


def _scaling(report: SweepFacts, best: Setting) -> Iterable[str]:
    others = sorted(
        (one for one in report.ranked if one is not best),
        key=lambda one: (one.series != best.series, one.scale or 0),  # the baseline comes first
    )
    seconds = f"{estimate_text(best.seconds)} s in all ({_runs(best)})"
    speedup, verb = best.speedup, _be(best)
    baseline = ", ".join(filter(None, (scale_text(report.baseline, report.unit), best.series)))
    if report.mixed or not others or speedup is None:
        left_out = any(one.oversubscribed for one in report.settings)
        without = " without more ranks than CPU cores" if left_out else ""
        if any(one.doubt for one in report.settings):
            alone = f"{best.label} cannot be compared with another scale"
        else:
            alone = f"only {best.label} {verb} complete{without}"
        missing = f"the baseline, {baseline}, has no result that can be compared"
        yield f"No speedups are given: {report.mixed or (missing if others else alone)}."
        yield f"{best.label} took {seconds}."
        return
    base = next(one for one in report.series[best.series] if one.scale == report.baseline)
    gains = [one for one in report.series[best.series] if one.against_baseline == "faster"]
    if best is base or (best.against_baseline == "undecided" and not gains):
        yield from _no_gain(report, base)
    else:
        open_ones = [one for one in others if one.against_best == "undecided"]
        verb = verb if speedup.interval else "seems to be" if best.scale == 1 else "seem to be"
        what = f"the fastest of {len(others) + 1} "
        what += "comparable " if any(one.doubt for one in report.settings) else ""
        what += "settings" if best.series else "scales"
        what += " by the medians" if open_ones else ""
        yield (
            f"{best.label} {verb} {what}: {estimate_text(speedup)} {_times(report)} {baseline} "
            f"at an efficiency of {estimate_text(speedup.efficiency, 100)} % "
            f"({_runs(best)}{_quotient(best)})"
            f"{_undecided(report, open_ones)}{_unknown(report, others)}"
            f"{f'; but {best.unequal}' if best.unequal else ''}."
        )
        if gains and best.against_baseline == "undecided":
            listed = [f"{one.label} ({estimate_text(one.speedup)})" for one in gains]
            yield f"Shown to be faster than {baseline}: {first_few(listed, _MOST_SCALES)}."
        yield from _recommended(report, best)
        yield from _limit(best, baseline)
    yield _accuracies(report, best)


def _times(report: SweepFacts) -> str:
    return "times as fast as" if report.mode == "strong" else "times the throughput of"


def _quotient(setting: Setting) -> str:
    ratio = setting.medians_speedup
    return f"; the quotient of the two medians is {number(ratio)}" if ratio else ""


def _recommended(report: SweepFacts, best: Setting) -> Iterable[str]:
    """Say which smaller scale is shown to be nearly as fast as the best, if one is."""
    if report.recommended not in {None, report.best}:
        smaller = report.settings[report.recommended or 0]
        yield (
            f"Recommended: {smaller.label}, the smallest scale shown to be within "
            f"{number(100 * EQUIVALENT)} % of the fastest ({estimate_text(smaller.from_best)} "
            f"{_times(report)} {best.label})."
        )


def _undecided(report: SweepFacts, settings: Sequence[Setting]) -> str:
    """Return which settings the best is not shown to differ from, as part of a sentence."""
    if not settings:
        return ""
    listed = first_few([one.label for one in settings], _MOST_SCALES)
    return f"; undecided against {listed}, as {_blind(report, [one.from_best for one in settings])}"


def _blind(report: SweepFacts, ratios: Iterable[Speedup | None]) -> str:
    """Return which differences the sweep may miss; if unknown, those within these intervals."""
    ends = [(one.value, one.interval) for one in ratios if one and one.interval]
    widths = [max(end.high / value, value / end.low) - 1 for value, end in ends]
    missed = next((found for found, _, _ in found_by(report)), max([0.0, *widths]))
    what = (
        f"ratios under {1 + missed:.1f}"
        if missed > 1
        else f"differences under {100 * missed:.0f} %"
    )
    return f"{what} may be missed here"


def _unknown(report: SweepFacts, settings: Sequence[Setting]) -> str:
    """Return which settings have too few runs to be judged, as part of a sentence."""
    few = [one.label for one in settings if one.against_best == "unknown"]
    listed = first_few(few, _MOST_SCALES)
    return f"; not judged against {listed}, as {_too_few(report)}" if few else ""


def _too_few(report: SweepFacts) -> str:
    text = f"hpml gives no interval below {MIN_REPEATS} runs"
    again = any(one.runs < MIN_REPEATS <= one.planned for one in report.settings)
    return text + (f": `hpml sweep run {report.id} --top-up`" if again else "")


def _no_gain(report: SweepFacts, base: Setting) -> Iterable[str]:
    """Return the answer if no scale is faster than the baseline: which ones are slower."""
    kinds = ("faster", "undecided", "slower", "unknown")
    found: dict[str, list[Setting]] = {kind: [] for kind in kinds}
    for one in report.series[base.series]:
        if one.against_baseline in found:
            found[one.against_baseline].append(one)
    what = "speedup" if report.mode == "strong" else "ratio of the throughputs"
    words = {
        "faster": "faster within the repeats, though not by the medians",
        "slower": f"slower than {base.label}" if report.mode == "strong" else "no improvement",
        "unknown": "not known to differ",
    }
    why = {
        "undecided": f", as {_blind(report, [one.speedup for one in found['undecided']])}",
        "unknown": f", as {_too_few(report)}",
    }
    parts = []
    for kind, ones in found.items():
        if ones:
            labels = first_few([one.label for one in ones], _MOST_SCALES)
            are = "is" if len(ones) == ones[0].scale == 1 else "are"
            ratios = first_few([estimate_text(one.speedup) for one in ones], _MOST_SCALES)
            text = f"{labels} {are} {words[kind]}" if kind in words else f"undecided for {labels}"
            parts.append(f"{text} ({what} {ratios}){why.get(kind, '')}")
    seconds = f"{estimate_text(base.seconds)} s in all ({_runs(base)})"
    if found["faster"] or (found["slower"] and not found["undecided"] and not found["unknown"]):
        start = f"{base.label} {_be(base)} the fastest, with {seconds}"
    else:
        start = f"No scale is shown to be faster than {base.label}, with {seconds}"
    yield f"{start}: {'; '.join(parts) or 'no other scale has the same values'}."
    yield from _recommended(report, report.ranked[0])
    larger = [one for ones in found.values() for one in ones]
    if larger:
        yield from _limit(max(larger, key=lambda one: one.scale or 0), base.label)


def _accuracies(report: SweepFacts, best: Setting) -> str:
    base = next((one for one in report.series[best.series] if one.scale == report.baseline), best)
    shown = [best] if base is best else [best, base]
    found = [(one, one.quality) for one in shown if one.quality]
    if len(found) < len(shown):
        return (
            "The runs report no accuracy or loss, so it is not known whether all scales train as "
            "well."
        )
    texts = [f"{exact_text(quality.median)} with {one.label}" for one, quality in found]
    name, margin = found[0][1].name, found[0][1].margin_text
    kept = {
        True: f", not worse by more than {margin}",
        False: f", not shown to be within {margin} ({runs_text(found[0][1], found[-1][1])})",
        None: "",
    }
    few = [
        f"only {len(quality.values)} of {one.runs} runs of {one.label} report it"
        for one, quality in found
        if len(quality.values) < one.runs
    ]
    judged = f"{' and '.join(texts)}{kept[best.keeps_quality]}"
    return "; ".join([f"{name[:1].upper() + name[1:]}: {judged}", *few]) + "."


def _limit(setting: Setting, baseline: str) -> Iterable[str]:
    if not setting.lost or not setting.seconds:
        return
    lost = sum(setting.lost.values())
    if lost < _SMALL_SHARE * setting.seconds.value:
        yield f"At {setting.label}, less than 2 % of the time is lost against ideal scaling."
        return
    causes = sorted(setting.lost.items(), key=lambda pair: -pair[1])
    gains = sum(seconds for _, seconds in causes if seconds > 0)
    named = ", ".join(
        f"{_CAUSES.get(name, name)} {percent(seconds / gains)}"
        for name, seconds in causes[:_MOST_NAMES]
        if seconds > _SMALL_SHARE * gains
    )
    yield (
        f"At {setting.label}, {number(lost)} s are lost against ideal scaling from {baseline}: "
        f"{named}{_serial_text(setting.serial_fraction)}."
    )


def _serial_text(fraction: Estimate | None) -> str:
    """Return the serial fraction if its interval is narrow, and within what a fraction can be."""
    ends = fraction and fraction.interval
    if not ends or ends.high - ends.low > _WIDE or not 0 <= ends.high <= 1:
        return ""
    return f"; the serial fraction (Karp-Flatt) is {estimate_text(fraction, 100)}%"


def _ranking(report: SweepFacts, best: Setting) -> Iterable[str]:
    unit = f" {report.figure.unit}" if report.figure.unit else ""
    text = (
        f"The best {report.figure.name} is {exact_text(best.figure)}{unit}, with {best.label} "
        f"({_runs(best)})"
    )
    relation = {
        "unknown": f"; whether they differ is unknown, as {_too_few(report)}",
        "undecided": "; whether they differ is undecided",
        "worse": ", and they differ by more than noise explains",
    }
    for following in report.ranked[1:2]:
        text += f"; next is {following.label} with {exact_text(following.figure)}{unit}"
        yield f"{text}{relation.get(following.against_best, '')}."
    if len(report.ranked) == 1:
        others = any(one.unranked for one in report.settings)
        yield f"{text}; no other setting {'is ranked' if others else 'is complete'}."
    yield from selection.caveats(report, best)
    yield f"{costs_text(report.costs)} went into {attempts_text(report.states)}."


def _how_to_report(report: SweepFacts) -> str:
    if any(one.unranked for one in report.settings):
        return selection.unranked(report)
    reported = sorted({name for one in report.attempts for name in numbers(one.row.result)})
    name = report.figure.name
    figure = name.partition(" ")[0]
    if reported:
        return (
            f"They report {first_few(reported)}, but not {name}: name one of these "
            "as search.metric in the sweep file, and search.direction if less is better."
        )
    return (
        f"They report no result: let rank 0 of the program call hpml_channel's "
        f'result({figure}=…), write {{"{figure}": …}} to result.json in {{run.dir}}, or give '
        "search.metric a pattern of the program's output."
    )


def _runs(setting: Setting) -> str:
    interval = setting.seconds.interval if setting.seconds else None
    of_all = "" if setting.runs == setting.planned else f" of {setting.planned} planned"
    median = "median of " if setting.runs > 1 else ""
    return f"{median}{counted(setting.runs, 'run')}{of_all}, {'' if interval else 'no '}95 % CI"


def checklist(report: SweepFacts) -> tuple[Notice, ...]:
    """Return how the report answers each of the twelve ways to fool the masses.

    Source: Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning
    workloads" (2018).
    """
    template, unseen = environment("md").get_template("checklist.j2"), selection.unseen(report)
    lines = template.render(report=report, unseen=unseen).splitlines()
    checks = [line.strip().split(" | ", 2) for line in lines if line.strip()]
    return tuple(Notice(way, text, status) for way, status, text in checks)
