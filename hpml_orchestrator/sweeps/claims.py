"""The sentences of a sweep's report: question, answer, and what a reader has to know.

Rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples, first_few
from hpml_orchestrator.sweeps.facts import MEASURED, Check, Notice, Report, Setting
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS
from hpml_orchestrator.sweeps.wording import (
    axis_text,
    environment,
    estimate_text,
    exact_text,
    number,
    percent,
    scale_text,
    states_text,
)

__all__ = ["answer", "checklist", "mixed_batches", "notices", "question"]

_UNFINISHED = {"WAITING", "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"}
_UNSURE = f"whether they differ cannot be said with fewer than {MIN_REPEATS} runs each"
_FEW = 3
_SMALL_SHARE = 0.02
_CAUSES = {
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}


def question(report: Report) -> str:
    """Return the question that the sweep asks, with the job's name."""
    job = report.name.removesuffix(f"-{report.mode}")
    scales = sorted({setting.scale for setting in report.settings if setting.scale})
    axes = " and ".join(
        dict.fromkeys(axis_text(name) for one in report.settings for name in one.values)
    )
    if report.scaling and scales:
        listed = ", ".join(str(scale) for scale in scales[:-1])
        over = f"{listed} and " if listed else ""
        what = "global batch" if report.mode == "strong" else "batch of each rank"
        sizes = {size for one in report.settings for size in _batches(report.mode, one)}
        size = f" ({sizes.pop()})" if len(sizes) == 1 else ""
        largest = scale_text(scales[-1], report.unit)
        return f"How does {job} scale over {over}{largest} with the same {what}{size}?"
    direction = "highest" if report.figure.maximize else "lowest"
    which = f"of {len(report.settings)} combinations of {axes} gives"
    if report.search:
        which = f"values of {axes} give"
    return f"Which {which} {job} the {direction} {report.figure.name}?"


def answer(report: Report) -> Iterable[str]:
    """Return the answer in two sentences, as far as the data carry one."""
    best = next((setting for setting in report.settings if setting.number == report.best), None)
    if not report.states.get(MEASURED):
        what = "No run is complete yet" if _UNFINISHED & set(report.states) else "No run completed"
        states = states_text(report.states) or "nothing was planned"
        yield f"{what} ({states}), so there is no answer."
    elif best is None:
        what = "all had more ranks than CPU cores" if report.scaling else "none has a figure"
        yield f"The complete runs give no answer: {what}."
    elif report.scaling:
        yield from _scaling(report, best)
    else:
        yield from _ranking(report, best)


def _scaling(report: Report, best: Setting) -> Iterable[str]:
    siblings = [one for one in report.ranked if one.series == best.series]
    largest = max(siblings, key=lambda one: one.scale or 0)
    equal = [one.label for one in siblings if one.distinguishable is False and one is not best]
    seconds = f"{estimate_text(best.seconds)} s in all ({_runs(best)})"
    speedup, verb = best.speedup, "is" if best.scale == 1 else "are"
    baseline = scale_text(report.baseline, report.unit)
    if report.mixed:
        yield f"No speedups are given: {report.mixed}."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif len(siblings) == 1 and any(one.oversubscribed for one in report.settings):
        yield (
            f"The data do not show how {report.name} scales: only {best.label} did not have more "
            f"ranks than CPU cores; it took {seconds}."
        )
    elif len(siblings) == 1:
        yield f"Only {best.label} is complete, so there is no speedup: it took {seconds}."
    elif speedup is None:
        yield f"No speedups are given: the baseline, {baseline}, has no result to compare with."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif best.scale == report.baseline:
        rest = ", ".join(
            f"{one.label} {estimate_text(one.speedup)}" for one in siblings if one is not best
        )
        yield (
            f"{best.label} {verb} the best scale, with {seconds}: more {report.unit} are not "
            f"distinguishably faster (speedups: {rest})."
        )
        yield from _limit(largest)
    else:
        unsure = ""
        if speedup.interval is None:
            verb = "seems to be" if best.scale == 1 else "seem to be"
            unsure = f"; {_UNSURE}"
        faster = "times as fast as" if report.mode == "strong" else "times the throughput of"
        larger = f"; not distinguishable, but larger: {first_few(equal, _FEW)}" if equal else ""
        yield (
            f"{best.label} {verb} the {'best' if equal else 'fastest'} of {len(siblings)} scales: "
            f"{estimate_text(speedup)} {faster} {baseline} at an efficiency of "
            f"{estimate_text(best.efficiency)} % ({_runs(best)}){larger}{unsure}."
        )
        yield from _limit(best)


def _limit(setting: Setting) -> Iterable[str]:
    """Say what the time is lost to at a scale, by phase and by Karp and Flatt."""
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
        for name, seconds in causes[:_FEW]
        if seconds > _SMALL_SHARE * gains
    )
    yield (
        f"At {setting.label}, {number(lost)} s are lost against ideal scaling: {named}; the serial "
        f"fraction (Karp-Flatt) is {estimate_text(setting.serial_fraction, 100)} %."
    )


def _ranking(report: Report, best: Setting) -> Iterable[str]:
    unit = f" {report.figure.unit}" if report.figure.unit else ""
    text = (
        f"The best {report.figure.name} is {exact_text(best.figure)}{unit}, with {best.label} "
        f"({_runs(best)})"
    )
    following = report.ranked[1:2]
    relation = {
        None: f"; {_UNSURE}",
        True: ", distinguishable from it",
        False: ", not distinguishable from it",
    }
    for one in following:
        text += f"; next is {one.label} with {exact_text(one.figure)}{unit}"
        text += relation[one.distinguishable]
    yield f"{text}." if following else f"{text}; no other setting is complete."
    noun = "trial" if report.search else "attempt"
    yield (
        f"{counted(len(report.attempts), noun)} counted ({states_text(report.states)}), "
        f"{number(report.costs.gpu_hours)} GPU-hours and "
        f"{number(report.costs.core_hours)} core-hours in all."
    )


def _runs(setting: Setting) -> str:
    if setting.runs == 1:
        return "1 run, no 95 % CI"
    interval = setting.seconds.interval if setting.seconds else None
    return f"median of {counted(setting.runs, 'run')}, {'' if interval else 'no '}95 % CI"


def mixed_batches(mode: str, settings: Sequence[Setting]) -> str:
    """Return why speedups would compare different problems (rule 1), or nothing."""
    sizes: dict[str, set[int]] = {}
    for setting in settings:
        if setting.runs:
            sizes.setdefault(setting.series, set()).update(_batches(mode, setting))
    what = "global batch" if mode == "strong" else "batch per rank"
    for found in sizes.values():
        if len(found) > 1:
            listed = ", ".join(str(size) for size in sorted(found))
            return f"{mode} scaling needs the same {what} everywhere, but runs had {listed}"
    return ""


def _batches(mode: str, setting: Setting) -> tuple[int, ...]:
    """Return the batch sizes that the mode keeps constant."""
    constant = {"strong": setting.batch_global, "weak": setting.batch_per_rank}
    return constant.get(mode, ())


def notices(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return what a reader has to know before believing the figures, the gravest first."""
    for name in ("code", "environment", "hardware", "device"):
        found = Counter(text for attempt in report.attempts if (text := getattr(attempt.row, name)))
        if len(found) > 1:
            details = tuple(f"{text}: {counted(n, 'attempt')}" for text, n in found.most_common(8))
            text = f"Attempts differ in {name}, so differences may not come from the settings."
            yield Notice(f"Different {name}", text, loud=True, details=details)
    yield from _deviations(plan, report)
    if few := [one.runs for one in report.settings if 0 < one.runs < MIN_REPEATS]:
        text = (
            f"No 95 % CI for {counted(len(few), 'setting')} with fewer than {MIN_REPEATS} "
            f"complete runs (down to {min(few)}), so differences there may be chance."
        )
        yield Notice("Few repeats", text)
    if missing := set(report.states) - {MEASURED, "PRUNED", "EXCLUDED"}:
        text = states_text({name: report.states[name] for name in missing})
        title = "Not finished" if missing & _UNFINISHED else "Not completed"
        yield Notice(title, f"Of {counted(len(report.attempts), 'attempt')}: {text}.")
    if dirty := sum("+dirty" in attempt.row.code for attempt in report.attempts):
        text = f"{counted(dirty, 'attempt')} ran code with uncommitted changes."
        yield Notice("Uncommitted changes", text)


def _deviations(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return where runs were placed or trained in another way than planned."""
    complete = f"of {report.states.get(MEASURED, 0)} complete runs"
    if many := [one for one in report.settings if one.oversubscribed]:
        text = (
            f"{sum(one.oversubscribed for one in many)} {complete} had more ranks than CPU cores "
            f"({first_few([one.label for one in many])}): their times say little about scaling."
        )
        yield Notice("Oversubscribed runs", text, loud=True)
    if loose := [one for one in report.settings if one.unverified]:
        names = first_few([one.label for one in loose])
        text = f"{sum(one.unverified for one in loose)} {complete} are not verified ({names})."
        yield Notice("Binding not verified", f"The bindings of {text}")
    planned = {point.number: point.learning_rate for point in plan.points}
    rates = [
        f"point {row.point}: {row.learning_rate:g} instead of {rate:g}"
        for row in (attempt.row for attempt in report.attempts)
        if (rate := planned.get(row.point))
        and row.learning_rate
        and abs(row.learning_rate / rate - 1) > 1e-6  # noqa: PLR2004 - rounding
    ]
    if rates:
        text = f"{counted(len(rates), 'attempt')} trained with another learning rate than planned."
        yield Notice("Learning rate", text, details=tuple(rates[:8]))
    reported = sorted({rate for one in report.settings for rate in one.learning_rate})
    if report.mode == "strong" and not plan.sweep.get("learning_rate") and len(reported) > 1:
        text = (
            f"The scales trained with learning rates from {reported[0]:g} to {reported[-1]:g} at "
            "the same global batch, so their accuracies and times to accuracy do not compare."
        )
        yield Notice("Different learning rates", text, loud=True)
    uneven = [one for one in report.settings if len(one.steps) > 1]
    if uneven and report.scaling:
        listed = examples([f"{one.label}: {min(one.steps)}-{max(one.steps)}" for one in uneven], 4)
        text = f"Runs of the same setting trained different numbers of steps ({listed})."
        yield Notice("Different steps", text)


def checklist(report: Report) -> tuple[Check, ...]:
    """Return how the report answers each of the twelve ways to fool the masses.

    Source: Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning
    workloads" (2018).
    """
    lines = environment("md").get_template("checklist.j2").render(report=report).splitlines()
    checks = [line.strip().split(" | ", 2) for line in lines if line.strip()]
    return tuple(Check(way, status, text) for way, status, text in checks)
