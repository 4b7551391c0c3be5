"""The sentences of a sweep's report: question, answer, notices, and the twelve checks.

The twelve ways are those of Hoefler, "Twelve ways to fool the masses when reporting performance of
deep learning workloads" (2018), in our words; rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples, first_few
from hpml_orchestrator.sweeps.facts import MEASURED, Check, Notice, Report, Setting
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate, Interval

__all__ = [
    "answer",
    "axis_text",
    "checklist",
    "exact_text",
    "interval_text",
    "mixed_batches",
    "notices",
    "number",
    "percent",
    "phases_text",
    "question",
    "scale_text",
    "states_text",
    "value_text",
    "values_text",
]

_UNFINISHED = ("WAITING", "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
_FEW = 3
_SMALL_SHARE = 0.02
_CAUSES = {
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}


def number(value: float | None) -> str:
    """Return a figure with three significant digits.

    >>> number(12345.6), number(0.98765), number(None)
    ('12,346', '0.988', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"  # noqa: PLR2004 - 3 digits


def percent(value: float | None) -> str:
    """Return a share in percent.

    >>> percent(0.8349)
    '83 %'
    """
    return "-" if value is None else f"{100 * value:.0f} %"


def interval_text(interval: Interval | None, factor: float = 1) -> str:
    """Return an interval as ` [low, high]`, or nothing where there is none."""
    if interval is None:
        return ""
    return f" [{number(interval.low * factor)}, {number(interval.high * factor)}]"


def scale_text(scale: int | None, unit: str) -> str:
    """Return a scale with its unit.

    >>> scale_text(1, "nodes"), scale_text(4, "gpus")
    ('1 node', '4 GPUs')
    """
    noun = {"nodes": "node", "ranks": "rank", "gpus": "GPU"}.get(unit, unit)
    return counted(scale or 0, noun)


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values of the axes in one line."""
    return ", ".join(f"{axis_text(name)}={value_text(value)}" for name, value in values.items())


def axis_text(name: str) -> str:
    """Return an axis' name without the dashes of an argument.

    >>> axis_text("--batch-size"), axis_text("lr=")
    ('batch-size', 'lr')
    """
    return name.removeprefix("--").removesuffix("=")


def value_text(value: Any) -> str:
    """Return a value of an axis, or an accuracy, with four digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def states_text(states: Mapping[str, int]) -> str:
    """Return how many attempts are in each state, completed ones first."""
    ordered = sorted(states.items(), key=lambda pair: (pair[0] != MEASURED, -pair[1], pair[0]))
    return ", ".join(f"{count} {state.lower().replace('_', ' ')}" for state, count in ordered)


def phases_text(setting: Setting) -> str:
    """Return the mean seconds of the phases of a setting's runs."""
    return ", ".join(f"{name} {number(seconds)} s" for name, seconds in setting.phases.items())


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
        sizes = {
            size
            for setting in report.settings
            for size in (
                setting.batch_global if report.mode == "strong" else setting.batch_per_rank
            )
        }
        size = f" ({sizes.pop()})" if len(sizes) == 1 else ""
        return f"How does {report.name} scale {span} with the same {what}{size}?"
    direction = "highest" if report.figure.maximize else "lowest"
    which = (
        f"values of {axes}"
        if report.search
        else f"of {len(report.settings)} combinations of {axes}"
    )
    gives = "give" if report.search else "gives"
    return f"Which {which} {gives} {report.name} the {direction} {report.figure.name}?"


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
    if any(one.oversubscribed for one in siblings):
        yield f"The data do not show how {report.name} scales: runs had more ranks than CPU cores."
    if report.mixed:
        yield f"No speedups are given: {report.mixed}."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif len(siblings) == 1:
        yield f"Only {best.label} is complete, so there is no speedup: it took {seconds}."
    elif baseline is None or baseline.seconds is None or best.speedup is None:
        name = scale_text(report.baseline, report.unit)
        reason = "did not report batch and steps" if baseline else "is not complete"
        yield f"No speedups are given: the baseline, {name}, {reason}."
        yield f"The fastest setting took {seconds}: {best.label}."
    elif best is baseline:
        others = [one for one in siblings if one is not best and one.speedup]
        rest = ", ".join(
            f"{one.label} {number(one.speedup.value)}" for one in others[:_FEW] if one.speedup
        )
        yield (
            f"{best.label} is the best scale, with {seconds}: more {report.unit} are not "
            f"distinguishably faster (speedups: {rest})."
        )
        yield from _limit(report, others[-1])
    else:
        speedup = best.speedup
        faster = "times as fast as" if report.mode == "strong" else "times the throughput of"
        verb = ("seems" if best.scale == 1 else "seem") + " to be"
        if speedup.interval:
            verb = "is" if best.scale == 1 else "are"
        yield (
            f"{best.label} {verb} the best of "
            f"{len(siblings)} scales: {number(speedup.value)}{interval_text(speedup.interval)} "
            f"{faster} {baseline.label} at an efficiency of {number(100 * speedup.efficiency)}"
            f"{interval_text(speedup.efficiency_interval, 100)} % ({_runs(best)})."
        )
        yield from _limit(report, best)
    equal = [
        one.label for one in report.settings if one.distinguishable is False and one is not best
    ]
    if equal and best is not baseline:
        yield f"Not distinguishable from the fastest, but larger: {first_few(equal, _FEW)}."


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


def exact_text(estimate: Estimate | None) -> str:
    """Return a figure with four digits, as accuracies need, and its interval."""
    if estimate is None:
        return "-"
    value = estimate.value
    ends = estimate.interval
    return f"{value:.4g}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")


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
            batches = setting.batch_global if mode == "strong" else setting.batch_per_rank
            sizes[setting.series].update(batches)
    for found in sizes.values():
        if len(found) > 1:
            listed = ", ".join(str(size) for size in sorted(found))
            return f"{mode} scaling needs the same {what} everywhere, but runs had {listed}"
    return ""


def notices(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return what a reader has to know before believing the figures, the gravest first."""
    if report.mixed:
        yield Notice("Mixed batches", f"No speedups are given: {report.mixed}.", loud=True)
    for name, title in (
        ("code", "code"),
        ("environment", "environment"),
        ("hardware", "hardware"),
        ("device", "device"),
    ):
        found = Counter(text for attempt in report.attempts if (text := getattr(attempt.row, name)))
        if len(found) > 1:
            details = tuple(f"{text}: {counted(n, 'attempt')}" for text, n in found.most_common(8))
            text = f"Attempts differ in {title}, so differences may not come from the settings."
            yield Notice(f"Different {title}", text, restricts=True, loud=True, details=details)
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


def checklist(report: Report) -> Iterable[Check]:
    """Return how the report answers each of the twelve ways to fool the masses."""
    rows = [one.row for one in report.attempts if one.row.state == MEASURED]
    measured = [one for one in report.settings if one.runs]
    accurate = [one for one in measured if one.accuracy]
    costs = report.costs
    kinds = {row.hardware for row in rows if row.hardware}
    targets = [one.target for one in measured if one.target]
    staging = [row.phases["staging"] for row in rows if "staging" in row.phases]

    def check(way: str, answer: str, *, ok: bool, applies: bool = True) -> Check:
        return Check(way, ("ok" if ok else "not answered") if applies else "does not apply", answer)

    values = [one.accuracy.value for one in accurate if one.accuracy]
    span = f"{min(values):.4g} to {max(values):.4g}" if values else "not reported"
    yield check(
        "Scale up and leave the accuracy out",
        f"Test accuracy at {len(accurate)} of {counted(len(measured), 'setting')}: {span}.",
        ok=bool(measured) and len(accurate) == len(measured),
    )
    both = sum(row.accuracy is not None for row in rows)
    yield check(
        "Report training accuracy instead of test accuracy",
        f"{both} of {counted(len(rows), 'complete run')} reported `test_accuracy`.",
        ok=bool(rows) and both == len(rows),
    )
    energy = f", {number(costs.energy_kwh)} kWh" if costs.energy_kwh is not None else ""
    yield check(
        "Hide the runs that tuning took",
        f"All {counted(len(report.attempts), 'attempt')} are listed ({states_text(report.states)}) "
        f"and counted: {number(costs.gpu_hours)} GPU-hours, {number(costs.core_hours)} "
        f"core-hours{energy}. Runs before this sweep are not known to it.",
        ok=bool(report.attempts),
    )
    yield check(
        "Compare old hardware with new",
        f"All on {next(iter(kinds))}." if len(kinds) == 1 else f"{len(kinds)} kinds of hardware.",
        ok=len(kinds) == 1,
    )
    share = [row.phases.get("training", 0) / row.total_seconds for row in rows if row.total_seconds]
    yield check(
        "Time only the part that scales",
        "Headlines are total seconds from the start of the job to its end"
        + (f"; training is {percent(sum(share) / len(share))} of them." if share else "."),
        ok=bool(rows),
    )
    waits = [row.data_wait_ratio for row in rows if row.data_wait_ratio is not None]
    waited = (
        f"; steps waited for data {percent(sum(waits) / len(waits))} of the time" if waits else ""
    )
    yield check(
        "Leave out reading the data",
        f"Totals include staging ({number(sum(staging) / len(staging))} s on average){waited}."
        if staging
        else f"Totals include all reading; no run staged data{waited}.",
        ok=bool(rows),
    )
    yield check(
        "Report operations per second",
        "Seconds and samples per second are reported; there are no flop/s in this report.",
        ok=True,
    )
    yield check(
        "Take speed and accuracy from different settings",
        f"Speed and accuracy come from the same {counted(both, 'run')}.",
        ok=bool(rows) and both == len(rows),
    )
    images = {row.result["train_images"] for row in rows if row.result.get("train_images")}
    inputs = f"{min(images):,} training samples" if len(images) == 1 else "sizes are not reported"
    yield check(
        "Choose inputs that scale better than real ones",
        f"Whether the input is realistic is for the reader to judge: {inputs}, in the base job.",
        ok=False,
    )
    first = targets[0] if targets else None
    reached, tried = sum(one.reached for one in targets), sum(one.runs for one in targets)
    yield check(
        "Train for as long as it looks good",
        f"Target {number(first.accuracy)} set beforehand, evaluated every "
        f"{number(first.every_epochs)} epochs: reached by {reached} of {tried} runs."
        if first
        else "There is no target accuracy (`target_accuracy`).",
        ok=bool(first and first.every_epochs),
        applies=report.scaling or bool(first),
    )
    known = [one for one in measured if one.batch_global and one.batch_per_rank]
    yield check(
        "Change the batch size silently",
        report.mixed
        or f"Both batches are known for {len(known)} of {counted(len(measured), 'setting')}; "
        f"{'the mode fixes one of them' if report.scaling else 'they are in the table'}.",
        ok=bool(measured) and len(known) == len(measured) and not report.mixed,
    )
    compared = [one for one in measured if one.scale == report.baseline and one.speedup]
    yield check(
        "Choose a weak competitor",
        f"The baseline is {compared[0].label} of the same code: {_seconds(compared[0].seconds)} "
        f"in all, {exact_text(compared[0].samples_per_second)} samples/s; nothing "
        "is compared with others' results."
        if compared
        else "Settings are compared with each other, not with others' results.",
        ok=bool(compared),
        applies=report.scaling,
    )
