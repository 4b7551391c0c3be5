"""The question and the answer of a sweep's report, in sentences, and its checklist.

The sentences follow the rules of docs/sweeps.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpml_orchestrator.diagnosis.templates import number, percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps import selection
from hpml_orchestrator.sweeps.facts import MEASURED, Notice, Setting, SweepFacts
from hpml_orchestrator.sweeps.power import sensitivity
from hpml_orchestrator.sweeps.quality import runs_text
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate
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

_UNSURE = f"; fewer than {MIN_REPEATS} runs each cannot tell them apart"
_MOST_NAMES = 3
_SMALL_SHARE = 0.02
_WIDE = 0.5  # an interval of a serial fraction that says nothing
_CAUSES = {
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}


def question(report: SweepFacts) -> str:
    """Return the question that the sweep asks, with the job's name."""
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


def _be_all(settings: Sequence[Setting]) -> str:
    """Return the labels of settings with their verb, as `2 nodes and 4 nodes are`."""
    labels = [one.label for one in settings]
    listed = " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
    return f"{listed} {'are' if len(labels) > 1 else _be(settings[0])}"


def _scaling(report: SweepFacts, best: Setting) -> Iterable[str]:
    others = [one for one in report.ranked if one is not best]
    equal = [one.label for one in others if one.distinguishable is False]
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
    if best.scale == report.baseline:
        yield from _no_gain(report, best, others)
    else:
        verb = verb if speedup.interval else "seems to be" if best.scale == 1 else "seem to be"
        what = f"{'among the fastest' if equal else 'the fastest'} of {len(others) + 1} "
        what += "comparable " if any(one.doubt for one in report.settings) else ""
        what += "settings" if best.series else "scales"
        faster = "times as fast as" if report.mode == "strong" else "times the throughput of"
        listed = f"; not distinguishable from {first_few(equal, _MOST_NAMES)}" if equal else ""
        differs = f"; but {best.unequal}" if best.unequal else ""
        yield (
            f"{best.label} {verb} {what}: {estimate_text(speedup)} {faster} {baseline} at an "
            f"efficiency of {estimate_text(speedup.efficiency, 100)} % ({_runs(best)})"
            f"{listed}{differs}{'' if speedup.interval else _UNSURE}."
        )
        yield from _limit(best, baseline)
    yield _accuracies(report, best)


def _no_gain(report: SweepFacts, best: Setting, others: Sequence[Setting]) -> Iterable[str]:
    """Return the answer if no scale is faster than the baseline: which ones are slower."""
    larger = [one for one in others if one.series == best.series and one.speedup]
    found: dict[str, list[Setting]] = {"same": [], "slower": [], "unsure": []}
    for one in larger:
        differ = one.speedup and one.speedup.distinguishable
        slower = differ and one.speedup and one.speedup.value < 1
        found["unsure" if differ is None else "slower" if slower else "same"].append(one)
    what = "speedup" if report.mode == "strong" else "ratio of the throughputs"
    words = {
        "same": f"not distinguishable from {best.label}",
        "slower": f"slower than {best.label}" if report.mode == "strong" else "no improvement",
        "unsure": f"not known to differ, with fewer than {MIN_REPEATS} runs each",
    }
    parts = [
        f"{_be_all(ones)} {words[kind]} "
        f"({what} {', '.join(estimate_text(one.speedup) for one in ones)})"
        for kind, ones in found.items()
        if ones
    ]
    seconds = f"{estimate_text(best.seconds)} s in all ({_runs(best)})"
    if larger and not found["same"] and not found["unsure"]:
        start = f"{best.label} {_be(best)} the fastest, with {seconds}"
    else:
        start = f"No scale is shown to be faster than {best.label}, with {seconds}"
    yield f"{start}: {'; '.join(parts) or 'no other scale has the same values'}."
    if larger:
        yield from _limit(max(larger, key=lambda one: one.scale or 0), best.label)


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
        None: _UNSURE,
        True: ", distinguishable from it",
        False: ", not distinguishable from it",
    }
    for following in report.ranked[1:2]:
        text += f"; next is {following.label} with {exact_text(following.figure)}{unit}"
        yield f"{text}{relation[following.distinguishable]}."
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
