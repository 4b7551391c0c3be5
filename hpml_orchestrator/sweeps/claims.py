"""The sentences of a sweep's report: question, answer, and what restricts it.

Rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples, first_few
from hpml_orchestrator.sweeps.facts import MEASURED, Check, Notice, Report, Setting
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate
from hpml_orchestrator.sweeps.wording import (
    axis_text,
    environment,
    exact_text,
    interval_text,
    number,
    percent,
    scale_text,
    states_text,
)

__all__ = ["answer", "checklist", "mixed_batches", "notices", "question"]

_UNFINISHED = ("WAITING", "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
_FEW = 3
_SMALL_SHARE = 0.02
_CAUSES = {
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}


def question(report: Report) -> str:
    """Return the question that the sweep asks."""
    scales = sorted({setting.scale for setting in report.settings if setting.scale})
    axes = " and ".join(
        dict.fromkeys(axis_text(name) for one in report.settings for name in one.values)
    )
    if report.scaling and scales:
        largest = scale_text(scales[-1], report.unit)
        span = f"from {scales[0]} to {largest}" if len(scales) > 1 else f"on {largest} alone"
        what = "global batch" if report.mode == "strong" else "batch of each rank"
        sizes = {size for one in report.settings for size in _batches(report.mode, one)}
        size = f" ({sizes.pop()})" if len(sizes) == 1 else ""
        return f"How does {report.name} scale {span} with the same {what}{size}?"
    direction = "highest" if report.figure.maximize else "lowest"
    which = f"of {len(report.settings)} combinations of {axes} gives"
    if report.search:
        which = f"values of {axes} give"
    return f"Which {which} {report.name} the {direction} {report.figure.name}?"


def answer(report: Report) -> tuple[str, ...]:
    """Return the answer in two sentences, and a sentence for each notice that restricts it."""
    restricted = tuple(notice.text for notice in report.notices if notice.restricts)
    if report.best is None:
        open_runs = sum(report.states.get(state, 0) for state in _UNFINISHED)
        what = "No run is complete yet" if open_runs else "No run completed"
        states = states_text(report.states) or "nothing was planned"
        return (f"{what} ({states}), so there is no answer.",)
    best = next(setting for setting in report.settings if setting.number == report.best)
    if not report.scaling:
        return (*_ranking(report, best), *restricted)
    return (*_scaling(report, best), *restricted)


def _scaling(report: Report, best: Setting) -> Iterable[str]:
    siblings = [one for one in report.series[best.series] if one.seconds]
    baseline = next((one for one in siblings if one.scale == report.baseline), None)
    seconds = f"{_seconds(best.seconds)} in all ({_runs(best)})"
    equal = [one.label for one in siblings if one.distinguishable is False and one is not best]
    verb = "is" if best.scale == 1 else "are"
    if any(one.oversubscribed for one in siblings):
        yield f"The data do not show how {report.name} scales: runs had more ranks than CPU cores."
    if report.mixed:
        yield f"No speedups are given: {report.mixed}."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif len(siblings) == 1:
        yield f"Only {best.label} is complete, so there is no speedup: it took {seconds}."
    elif baseline is None or baseline.seconds is None or best.speedup is None:
        name = scale_text(report.baseline, report.unit)
        reason = "did not report samples per second" if baseline else "is not complete"
        yield f"No speedups are given: the baseline, {name}, {reason}."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif best is baseline:
        others = [one for one in siblings if one is not best and one.speedup]
        rest = ", ".join(
            f"{one.label} {number(one.speedup.value)}" for one in others[:_FEW] if one.speedup
        )
        yield (
            f"{best.label} {verb} the best scale, with {seconds}: more {report.unit} are not "
            f"distinguishably faster (speedups: {rest})."
        )
        yield from _limit(report, siblings[-1])
    else:
        speedup = best.speedup
        faster = "times as fast as" if report.mode == "strong" else "times the throughput of"
        if speedup.interval is None:
            verb = "seems to be" if best.scale == 1 else "seem to be"
        yield (
            f"{best.label} {verb} the {'best' if equal else 'fastest'} of "
            f"{len(siblings)} scales: {number(speedup.value)}{interval_text(speedup.interval)} "
            f"{faster} {baseline.label} at an efficiency of {number(100 * speedup.efficiency)}"
            f"{interval_text(speedup.efficiency_interval, 100)} % ({_runs(best)})."
        )
        yield from _limit(report, best)
    if equal and best is not baseline:
        yield f"Not distinguishable from it, but larger: {first_few(equal, _FEW)}."


def _limit(report: Report, setting: Setting) -> Iterable[str]:
    """Say what the time is lost to at a scale, by phase and by Karp and Flatt."""
    if not setting.lost or not setting.seconds:
        return
    lost = sum(setting.lost.values())
    serial = setting.serial_fraction
    where = f"At {setting.label}, "
    if lost < _SMALL_SHARE * setting.seconds.value:
        yield f"{where}nothing limits it: less than 2 % is lost against ideal scaling."
        return
    causes = sorted(setting.lost.items(), key=lambda pair: -pair[1])
    gains = sum(seconds for _, seconds in causes if seconds > 0)
    named = [
        f"{_CAUSES.get(name, name)} {percent(seconds / gains)}"
        for name, seconds in causes[:_FEW]
        if seconds > _SMALL_SHARE * gains
    ]
    text = f"{where}{number(lost)} s are lost against ideal scaling: {', '.join(named)}"
    if serial:
        text += (
            f"; the serial fraction (Karp-Flatt) is {number(100 * serial.value)}"
            f"{interval_text(serial.interval, 100)} %{_trend(report, setting)}"
        )
    yield f"{text}."


def _trend(report: Report, setting: Setting) -> str:
    """Say whether the serial fraction changes with the scale, which tells overhead from serial."""
    series = [one.serial_fraction for one in report.series[setting.series]]
    known = [serial for serial in series if serial and serial.interval]
    if len(known) < 2:  # noqa: PLR2004 - a first and a last one
        return ""
    first, last = known[0].interval, known[-1].interval
    if first is None or last is None or first.overlaps(last):
        return ", the same at all scales within the intervals, as with a serial part"
    if last.low > first.high:
        return " and grows with the scale, as with communication or other overhead"
    return " and falls with the scale"


def _ranking(report: Report, best: Setting) -> Iterable[str]:
    ranked = report.ranked
    figure, name = best.figure, report.figure.name
    unit = f" {report.figure.unit}" if report.figure.unit else ""
    text = f"The best {name} is {exact_text(figure)}{unit}, with {best.label} ({_runs(best)}"
    if len(ranked) == 1:
        yield f"{text}); no other setting is complete."
    else:
        following = ranked[1]
        relation = {
            None: f"; whether they differ cannot be said with fewer than {MIN_REPEATS} runs each",
            True: ", distinguishable from it",
            False: ", not distinguishable from it",
        }[following.distinguishable]
        equal = sum(one.distinguishable is False for one in ranked) - 1
        more = (
            f", as are {equal - 1} more" if following.distinguishable is False < equal - 1 else ""
        )
        yield (
            f"{text}); next is {following.label} with {exact_text(following.figure)}{unit}"
            f"{relation}{more}."
        )
    noun = "trial" if report.search else "attempt"
    costs = report.costs
    yield (
        f"{counted(len(report.attempts), noun)} counted ({states_text(report.states)}), "
        f"{number(costs.gpu_hours)} GPU-hours and {number(costs.core_hours)} core-hours in all."
    )
    fastest = next(one for one in report.settings if one.number == report.fastest)
    if not report.search and fastest is not best and report.figure.source != "total_seconds":
        yield (
            f"The fastest setting is {fastest.label}: {_seconds(fastest.seconds)} against "
            f"{_seconds(best.seconds)}, {name} {exact_text(fastest.figure)}."
        )


def _seconds(estimate: Estimate | None) -> str:
    return (
        "-" if estimate is None else f"{number(estimate.value)} s{interval_text(estimate.interval)}"
    )


def _runs(setting: Setting) -> str:
    if setting.runs == 1:
        return "1 run, no 95 % CI"
    interval = setting.seconds.interval if setting.seconds else None
    return f"median of {counted(setting.runs, 'run')}, {'' if interval else 'no '}95 % CI"


def mixed_batches(mode: str, settings: Sequence[Setting]) -> str:
    """Return why speedups would compare different problems (rule 1), or nothing."""
    if mode not in {"strong", "weak"}:
        return ""
    what = "global batch" if mode == "strong" else "batch per rank"
    sizes: dict[str, set[int]] = defaultdict(set)
    for setting in settings:
        if setting.runs:
            sizes[setting.series].update(_batches(mode, setting))
    for found in sizes.values():
        if len(found) > 1:
            listed = ", ".join(str(size) for size in sorted(found))
            return f"{mode} scaling needs the same {what} everywhere, but runs had {listed}"
    return ""


def _batches(mode: str, setting: Setting) -> tuple[int, ...]:
    """Return the batch sizes that the mode keeps constant."""
    return setting.batch_global if mode == "strong" else setting.batch_per_rank


def notices(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return what a reader has to know before believing the figures, the gravest first."""
    if report.mixed:
        yield Notice("Mixed batches", f"No speedups are given: {report.mixed}.", loud=True)
    for name in ("code", "environment", "hardware", "device"):
        found = Counter(text for attempt in report.attempts if (text := getattr(attempt.row, name)))
        if len(found) > 1:
            details = tuple(f"{text}: {counted(n, 'attempt')}" for text, n in found.most_common(8))
            text = f"Attempts differ in {name}, so differences may not come from the settings."
            yield Notice(f"Different {name}", text, restricts=True, loud=True, details=details)
    yield from _doubts(report)
    yield from _deviations(plan, report)
    few = [one for one in report.settings if 0 < one.runs < MIN_REPEATS]
    if few:
        least = min(one.runs for one in few)
        text = (
            f"No 95 % CI for {counted(len(few), 'setting')} with fewer than {MIN_REPEATS} "
            f"complete runs (down to {least}), so differences there may be chance."
        )
        yield Notice("Few repeats", text)
    open_runs = {name: report.states[name] for name in _UNFINISHED if report.states.get(name)}
    if open_runs:
        text = f"The sweep is not finished: {states_text(open_runs)}."
        yield Notice("Not finished", text, restricts=True)
    failed = {
        name: count
        for name, count in report.states.items()
        if name not in {*_UNFINISHED, MEASURED, "PRUNED", "EXCLUDED"}
    }
    if failed:
        text = (
            f"{counted(sum(failed.values()), 'attempt')} did not complete: {states_text(failed)}."
        )
        yield Notice("Attempts that did not complete", text)
    dirty = sum("+dirty" in attempt.row.code for attempt in report.attempts)
    if dirty:
        text = f"{counted(dirty, 'attempt')} ran code with uncommitted changes."
        yield Notice("Uncommitted changes", text)


def _doubts(report: Report) -> Iterable[Notice]:
    """Return which runs were oversubscribed, and which not bound as planned."""
    many = [one for one in report.settings if one.oversubscribed]
    if many:
        names = first_few([one.label for one in many])
        text = (
            f"{sum(one.oversubscribed for one in many)} of {report.complete} complete runs had "
            f"more ranks than CPU cores ({names}): their times say little about scaling."
        )
        yield Notice("Oversubscribed runs", text, restricts=not report.scaling, loud=True)
    loose = [one for one in report.settings if one.unverified]
    if loose:
        names = first_few([one.label for one in loose])
        text = (
            f"The binding of {sum(one.unverified for one in loose)} of {report.complete} "
            f"complete runs is not verified ({names})."
        )
        yield Notice("Binding not verified", text)


def _deviations(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return where runs did something else than planned, or a different amount of work."""
    points = {point.number: point for point in plan.points}
    details = []
    for attempt in report.attempts:
        row, point = attempt.row, points.get(attempt.row.point)
        planned = point.learning_rate if point else None
        if planned and row.learning_rate and abs(row.learning_rate / planned - 1) > 1e-6:  # noqa: PLR2004 - rounding
            details.append(f"point {row.point}: {row.learning_rate:g} instead of {planned:g}")
    if details:
        text = (
            f"{counted(len(details), 'attempt')} trained with another learning rate than planned."
        )
        yield Notice("Learning rate", text, restricts=True, details=tuple(details[:8]))
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
