"""The words of a sweep's report: figures and scales, the sentences made of them, and the templates.

The rules that the sentences keep are those of docs/sweeps.md.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jinja2

from hpml_orchestrator import assets
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import examples, first_few
from hpml_orchestrator.sweeps.facts import (
    MEASURED,
    NOT_ATTEMPTED,
    PARTS,
    Costs,
    Notice,
    Report,
    Setting,
)
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Estimate

__all__ = [
    "answer",
    "axis_text",
    "checklist",
    "environment",
    "estimate_text",
    "mixed_batches",
    "notices",
    "number",
    "question",
    "scale_text",
    "values_text",
]

_NUMERIC = re.compile(r"-?[\d.,]+(e[+-]?\d+)?( %| of \d+| / \d+| \[.*\])?|not reached.*|-|")
_UNFINISHED = {"WAITING", "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"}
_UNSURE = f"; fewer than {MIN_REPEATS} runs each cannot tell them apart"
_MOST_NAMES = 3
_MOST_DETAILS = 8
_SMALL_SHARE = 0.02
_CAUSES = {
    "steps": "steps (communication, or too little work per rank)",
    "data wait": "waiting for data",
    "end": "the end of the job",
    "not divided": "time outside the recorded phases",
}
_CONSTANT = {"strong": "batch_global", "weak": "batch_per_rank"}


def number(value: float | None) -> str:
    """Return a figure with three significant digits.

    >>> number(12345.6), number(0.98765), number(None)
    ('12,346', '0.988', '-')
    """
    if value is None:
        return "-"
    if math.isinf(value):
        return "open"  # the end of an interval where runs never reached their target
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"  # noqa: PLR2004 - 3 digits


def percent(value: float | None) -> str:
    """Return a share in percent.

    >>> percent(0.8349)
    '83 %'
    """
    return "-" if value is None else f"{100 * value:.0f} %"


def estimate_text(
    estimate: Estimate | None, factor: float = 1, text: Callable[[float], str] = number
) -> str:
    """Return `factor` times a figure with its interval, as `1.79 [1.77, 1.83]`."""
    if estimate is None:
        return "-"
    ends = estimate.interval
    interval = f" [{text(ends.low * factor)}, {text(ends.high * factor)}]" if ends else ""
    return text(estimate.value * factor) + interval


def exact_text(estimate: Estimate | None) -> str:
    """Return a figure with four digits, as accuracies need, and its interval."""
    return estimate_text(estimate, text=_value_text)


def scale_text(scale: int | None, unit: str) -> str:
    """Return a scale with its unit.

    >>> scale_text(1, "nodes"), scale_text(4, "gpus")
    ('1 node', '4 GPUs')
    """
    return counted(scale or 0, unit.removesuffix("s").replace("gpu", "GPU"))


def axis_text(name: str) -> str:
    """Return an axis' name without the dashes of an argument.

    >>> axis_text("--batch-size"), axis_text("lr=")
    ('batch-size', 'lr')
    """
    return name.removeprefix("--").removesuffix("=")


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values of the axes in one line."""
    return ", ".join(f"{axis_text(name)}={_value_text(value)}" for name, value in values.items())


def attempts_text(states: Mapping[str, int]) -> str:
    """Return how many attempts ended how, and apart from them what was never attempted.

    >>> attempts_text({"FAILED": 1, "COMPLETED": 5, "EXCLUDED": 2})
    '6 attempts: 5 completed, 1 failed; 2 points excluded'
    """
    ordered = sorted(states.items(), key=lambda pair: (pair[0] != MEASURED, -pair[1], pair[0]))
    made = {state: count for state, count in ordered if state not in NOT_ATTEMPTED}
    ended = ", ".join(f"{n} {state.lower().replace('_', ' ')}" for state, n in made.items())
    others = [
        f"{counted(count, 'point')} {state.lower()}"
        for state, count in ordered
        if state in NOT_ATTEMPTED
    ]
    attempts = [f"{counted(sum(made.values()), 'attempt')}: {ended}"] * bool(made)
    return "; ".join([*attempts, *others])


def costs_text(costs: Costs) -> str:
    """Return GPU-hours, core-hours, node-hours and energy in one line, what is known of them."""
    parts = [f"{number(costs.core_hours)} core-hours", f"{number(costs.node_hours)} node-hours"]
    if costs.gpu_hours:
        parts.insert(0, f"{number(costs.gpu_hours)} GPU-hours")
    if costs.energy_kwh is not None:
        parts.append(f"{number(costs.energy_kwh)} kWh")
    return ", ".join(parts)


@cache
def environment(form: str) -> jinja2.Environment:
    """Return the environment of the report's templates, for `html` or `md`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets.path("templates/report")),
        autoescape=jinja2.select_autoescape(default=form == "html", default_for_string=False),
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"format": form, "columns": _columns, "parts": PARTS}
    environment.filters |= {
        "attempts": attempts_text,
        "axis": axis_text,
        "cell": lambda value: str(value).replace("|", "\\|").replace("\n", " "),
        "costs": costs_text,
        "epochs": lambda n: "-" if n is None else "epoch" if n == 1 else f"{number(n)} epochs",
        "estimate": estimate_text,
        "exact": exact_text,
        "hours": lambda hours: number(hours or None),
        "number": number,
        "percent": percent,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
        "scale": scale_text,
        "time": lambda time: "not reached" if math.isinf(time.value) else estimate_text(time),
        "several": lambda values: examples([_value_text(value) for value in values], 4) or "-",
        "value": _value_text,
    }
    return environment


def _value_text(value: Any) -> str:
    """Return a value of an axis, or an accuracy, with four digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return a table's columns that something is known for, and whether they are numeric."""
    columns = {}
    for place, name in enumerate(rows[0] if rows else ()):
        cells = [str(row[name]) for row in rows]
        if place == 0 or set(cells) - {"-", ""}:
            columns[name] = all(map(_NUMERIC.fullmatch, cells))
    return columns


def question(report: Report) -> str:
    """Return the question that the sweep asks, with the job's name."""
    job = report.name.removesuffix(f"-{report.mode}")
    tried = [one for one in report.settings if one.planned]
    scales = sorted({one.scale for one in tried if one.scale})
    if report.scaling and scales:
        listed = ", ".join(str(scale) for scale in scales[:-1])
        over = f"{listed} and " if listed else ""
        what = "global batch" if report.mode == "strong" else "batch of each rank"
        sizes = {size for one in tried for size in one.ran[_CONSTANT[report.mode]]}
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


def answer(report: Report) -> Iterable[str]:
    """Return the answer in two sentences, as far as the data carry one."""
    if not report.states.get(MEASURED):
        what = "No run is complete yet" if _UNFINISHED & set(report.states) else "No run completed"
        yield f"{what} ({attempts_text(report.states)}), so there is no answer."
    elif report.best is None:
        what = "all had more ranks than CPU cores" if report.scaling else "none has a figure"
        yield f"The complete runs give no answer: {what}."
    elif report.scaling:
        yield from _scaling(report, report.settings[report.best])
    else:
        yield from _ranking(report, report.settings[report.best])


def _scaling(report: Report, best: Setting) -> Iterable[str]:
    others = [one for one in report.ranked if one is not best]
    equal = [one.label for one in others if one.distinguishable is False]
    seconds = f"{estimate_text(best.seconds)} s in all ({_runs(best)})"
    speedup, verb = best.speedup, "is" if best.scale == 1 else "are"
    baseline = ", ".join(filter(None, (scale_text(report.baseline, report.unit), best.series)))
    if report.mixed or not others or speedup is None:
        doubtful = any(one.oversubscribed for one in report.settings)
        without = " without more ranks than CPU cores" if doubtful else ""
        alone = f"only {best.label} {verb} complete{without}"
        missing = f"the baseline, {baseline}, has no result to compare with"
        yield f"No speedups are given: {report.mixed or (missing if others else alone)}."
        yield f"{best.label} took {seconds}."
    elif best.scale == report.baseline:
        larger = [one for one in others if one.series == best.series]
        speedups = ", ".join(f"{one.label} {estimate_text(one.speedup)}" for one in larger)
        yield (
            f"{best.label} {verb} the best scale, with {seconds}: more {report.unit} are not "
            f"distinguishably faster (speedups: {speedups or 'none'})."
        )
        yield from _limit(max([best, *larger], key=lambda one: one.scale or 0))
    else:
        verb = verb if speedup.interval else "seems to be" if best.scale == 1 else "seem to be"
        what = f"{'best' if equal else 'fastest'} of {len(others) + 1} "
        what += "settings" if best.series else "scales"
        faster = "times as fast as" if report.mode == "strong" else "times the throughput of"
        listed = f"; not distinguishable from {first_few(equal, _MOST_NAMES)}" if equal else ""
        yield (
            f"{best.label} {verb} the {what}: {estimate_text(speedup)} {faster} {baseline} at an "
            f"efficiency of {estimate_text(speedup.efficiency, 100)} % ({_runs(best)})"
            f"{listed}{'' if speedup.interval else _UNSURE}."
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
        for name, seconds in causes[:_MOST_NAMES]
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
    relation = {
        None: _UNSURE,
        True: ", distinguishable from it",
        False: ", not distinguishable from it",
    }
    for following in report.ranked[1:2]:
        text += f"; next is {following.label} with {exact_text(following.figure)}{unit}"
        yield f"{text}{relation[following.distinguishable]}."
    if len(report.ranked) == 1:
        yield f"{text}; no other setting is complete."
    yield f"{costs_text(report.costs)} went into {attempts_text(report.states)}."


def _runs(setting: Setting) -> str:
    if setting.runs == 1:
        return "1 run, no 95 % CI"
    interval = setting.seconds.interval if setting.seconds else None
    return f"median of {counted(setting.runs, 'run')}, {'' if interval else 'no '}95 % CI"


def mixed_batches(mode: str, settings: Sequence[Setting]) -> str:
    """Return why speedups would compare different problems (rule 1), or nothing."""
    sizes = _differing(settings, _CONSTANT[mode]) if mode in _CONSTANT else []
    what = "global batch" if mode == "strong" else "batch per rank"
    listed = ", ".join(f"{size:g}" for size in sizes)
    return f"{mode} scaling needs the same {what}, but runs had {listed}" if sizes else ""


def _differing(settings: Sequence[Setting], name: str) -> list[float]:
    """Return what the runs of one series had where all should have had the same."""
    found: dict[str, set[float]] = defaultdict(set)
    for setting in settings:
        if setting.runs:
            found[setting.series].update(setting.ran[name])
    return next((sorted(values) for values in found.values() if len(values) > 1), [])


def notices(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return what a reader has to know before believing the figures, the gravest first."""
    rows = [attempt.row for attempt in report.attempts]
    for name in ("code", "environment", "hardware", "device"):
        found = Counter(text for row in rows if (text := getattr(row, name)))
        if len(found) > 1:
            text = f"Attempts differ in {name}, so differences may not come from the settings."
            yield Notice(f"Different {name}", text, "loud", _tally(found, "attempt"))
    yield from _deviations(plan, report)
    if few := [one.runs for one in report.settings if 0 < one.runs < MIN_REPEATS]:
        text = (
            f"No 95 % CI for {counted(len(few), 'setting')} with fewer than {MIN_REPEATS} "
            f"complete runs (down to {min(few)}), so differences there may be chance."
        )
        if report.search:
            text += " The best of many trials is partly the luckiest: repeat it to know its figure."
        yield Notice("Few repeats", text)
    if missing := set(report.states) - {MEASURED, "PRUNED", "EXCLUDED"}:
        title = "Not finished" if missing & _UNFINISHED else "Not completed"
        yield Notice(title, f"{attempts_text({name: report.states[name] for name in missing})}.")
    if left := Counter(row.reason for row in rows if row.state == "EXCLUDED"):
        text = f"{counted(left.total(), 'point')} of the plan will not run."
        yield Notice("Left out", text, details=_tally(left, "point"))
    if dirty := sum("+dirty" in row.code for row in rows):
        text = f"{counted(dirty, 'attempt')} ran code with uncommitted changes."
        yield Notice("Uncommitted changes", text)


def _tally(found: Counter[str], noun: str) -> tuple[str, ...]:
    return tuple(f"{text}: {counted(n, noun)}" for text, n in found.most_common(_MOST_DETAILS))


def _deviations(plan: SweepPlan, report: Report) -> Iterable[Notice]:
    """Return where runs were placed or trained in another way than planned."""
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
    used = _differing(report.settings, "learning_rate")
    if report.mode == "strong" and not plan.sweep.get("learning_rate") and used:
        text = (
            f"The scales trained with learning rates from {used[0]:g} to {used[-1]:g} at "
            "the same global batch, so their accuracies and times to accuracy do not compare."
        )
        yield Notice("Different learning rates", text, "loud")
    steps = {one.label: one.ran["steps"] for one in report.settings if len(one.ran["steps"]) > 1}
    if steps and report.scaling:
        listed = examples([f"{label}: {min(n)}-{max(n)}" for label, n in steps.items()], 4)
        text = f"Runs of the same setting trained different numbers of steps ({listed})."
        yield Notice("Different steps", text)


def checklist(report: Report) -> tuple[Notice, ...]:
    """Return how the report answers each of the twelve ways to fool the masses.

    Source: Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning
    workloads" (2018).
    """
    lines = environment("md").get_template("checklist.j2").render(report=report).splitlines()
    checks = [line.strip().split(" | ", 2) for line in lines if line.strip()]
    return tuple(Notice(way, text, status) for way, status, text in checks)
