"""The Pareto front of a sweep by several figures: the settings that no other one dominates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.sweeps.facts import Setting, SweepFacts
from hpml_orchestrator.sweeps.rows import PointRow, objective
from hpml_orchestrator.sweeps.statistics import Estimate, median_estimate
from hpml_orchestrator.sweeps.wording import attempts_text, axis_text, costs_text, exact_text

_MOST_NAMES = 5


def objectives(runs: Sequence[PointRow], names: Iterable[str]) -> dict[str, Estimate]:
    """Return the medians of figures of a setting's complete runs; empty if a run lacks one."""
    found = {name: [objective(row, name) for row in runs] for name in names}
    known = {name: [one for one in values if one is not None] for name, values in found.items()}
    if not runs or any(len(values) < len(runs) for values in known.values()):
        return {}
    return {name: median_estimate(values) for name, values in known.items()}


def with_front(report: SweepFacts) -> SweepFacts:
    """Return the report with its front, ordered by the first figure, the best first."""
    places = {
        one.number: [
            one.objectives[name].value * (-1 if more else 1)
            for name, more in report.objectives.items()
        ]
        for one in report.settings
        if one.objectives
    }
    kept = [
        (place, number)
        for number, place in places.items()
        if not any(
            other != place and all(a <= b for a, b in zip(other, place, strict=True))
            for other in places.values()
        )
    ]
    return replace(report, front=tuple(number for _, number in sorted(kept, key=itemgetter(0))))


def question(report: SweepFacts) -> str:
    """Return what a sweep by several figures asks."""
    axes = dict.fromkeys(axis_text(name) for one in report.settings for name in one.values)
    job = report.name.removesuffix(f"-{report.mode}")
    wanted = " and the ".join(_wanted(report.objectives))
    values = f"values of {' and '.join(axes)}" if axes else "values"
    return f"Which {values} are the best compromises of {job} between the {wanted}?"


def _wanted(figures: Mapping[str, bool]) -> list[str]:
    return [f"{'highest' if more else 'lowest'} {name}" for name, more in figures.items()]


def answer(report: SweepFacts) -> Iterable[str]:
    """Return the front in sentences, and what it does not show."""
    measured = [one for one in report.settings if one.objectives]
    noun = "trial" if report.search else "combination"
    names = " and ".join(_wanted(report.objectives))
    if not measured:
        names = ", ".join(report.objectives)
        yield f"No complete run reports all of {names}: no answer is possible."
        return
    front = [report.settings[number] for number in report.front]
    yield (
        f"Of {counted(len(measured), noun)}, {len(front)} "
        f"{'is' if len(front) == 1 else 'are'} not dominated (by {names}): for each of the others "
        "one of these is at least as good in every figure, and better in one."
    )
    yield f"They are: {first_few([_words(one) for one in front], _MOST_NAMES)}."
    if min(one.runs for one in front) == 1:
        yield (
            "A point of the front is one run: neighbours that differ by less than runs of one "
            "setting scatter may change places, and times of runs side by side scatter most. "
            f"`hpml sweep repeat {report.id}` runs the front again, with new seeds."
        )
    yield f"{costs_text(report.costs)} went into {attempts_text(report.states)}."


def _words(setting: Setting) -> str:
    figures = [f"{name} {exact_text(value)}" for name, value in setting.objectives.items()]
    return f"{setting.label} ({', '.join(figures)})"
