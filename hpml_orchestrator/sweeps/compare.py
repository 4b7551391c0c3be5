"""Set two sweeps side by side, such as before and after a change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import MEASURED, Costs, Notice, Report, Setting
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup
from hpml_orchestrator.sweeps.wording import estimate_text, number

__all__ = ["Comparison", "Pair", "compare"]

_CONDITIONS = ("base job", "scheduler", "code", "environment", "hardware", "device", "binding")


@dataclass(frozen=True)
class Pair:
    """One setting that both sweeps measured.

    Attributes:
        before, after: total seconds. speedup: before / after, above 1 where `after` is faster.
        distinguishable: whether the medians differ; None with fewer than 6 runs of one.
        accuracy_before, accuracy_after: test accuracy.
    """

    label: str
    before: Estimate
    after: Estimate
    speedup: Speedup
    distinguishable: bool | None
    accuracy_before: Estimate | None
    accuracy_after: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """What differs between two sweeps, and whether the data can tell.

    Attributes:
        notices: what differs besides the change, or restricts the comparison.
        only_before, only_after: settings that one of them measured.
        costs: of all attempts, before and after.
    """

    version: int
    name: str
    question: str
    answer: tuple[str, ...]
    notices: tuple[Notice, ...]
    pairs: tuple[Pair, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    costs: tuple[Costs, Costs]


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports setting by setting: equal scales and values of the axes."""
    old, new = _measured(before), _measured(after)
    pairs = tuple(_pair(*old[key], *new[key]) for key in old if key in new)
    return Comparison(
        version=1,
        name=f"{before.name} and {after.name}",
        question=f"What changed from {before.id} to {after.id}?",
        answer=tuple(_answer(pairs)),
        notices=tuple(_notices(before, after)),
        pairs=pairs,
        only_before=tuple(old[key][0].label for key in old if key not in new),
        only_after=tuple(new[key][0].label for key in new if key not in old),
        costs=(before.costs, after.costs),
    )


def _measured(report: Report) -> dict[str, tuple[Setting, list[float]]]:
    """Return settings with the total seconds of their complete runs, by scale and values."""
    found: dict[str, tuple[Setting, list[float]]] = {}
    for attempt in report.attempts:
        if attempt.row.state == MEASURED and attempt.row.total_seconds:
            setting = report.settings[attempt.setting]
            key = repr((setting.scale, setting.values))
            found.setdefault(key, (setting, []))[1].append(attempt.row.total_seconds)
    return found


def _pair(before: Setting, old: list[float], after: Setting, new: list[float]) -> Pair:
    return Pair(
        label=before.label,
        before=statistics.median_estimate(old),
        after=statistics.median_estimate(new),
        speedup=statistics.speedup(old, new),
        distinguishable=statistics.distinguishable(old, new),
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
    )


def _answer(pairs: tuple[Pair, ...]) -> Iterable[str]:
    if not pairs:
        yield "No setting is complete in both sweeps, so there is nothing to compare."
        return
    differing = [pair for pair in pairs if pair.distinguishable]
    faster = sum(pair.speedup.value > 1 for pair in differing)
    equal = sum(pair.distinguishable is False for pair in pairs)
    unknown = len(pairs) - len(differing) - equal
    few = f"; {unknown} cannot be judged with fewer than {statistics.MIN_REPEATS} runs on a side"
    yield (
        f"Of {counted(len(pairs), 'setting')} complete in both sweeps, the second is faster in "
        f"{faster}, slower in {len(differing) - faster}, and not distinguishable in {equal}"
        f"{few if unknown else ''}."
    )
    largest = max(
        differing or pairs, key=lambda pair: max(pair.speedup.value, 1 / pair.speedup.value)
    )
    yield (
        f"The largest {'' if differing else 'apparent '}change is at {largest.label}: "
        f"{number(largest.before.value)} s before, {number(largest.after.value)} s after, "
        f"{estimate_text(largest.speedup)} times as fast."
    )


def _notices(before: Report, after: Report) -> Iterable[Notice]:
    old, new = (
        {name: report.provenance[name] for name in _CONDITIONS}
        | {f"sweep file, {name}": value for name, value in report.provenance["sweep file"].items()}
        for report in (before, after)
    )
    details = tuple(
        f"{name}: {_text(old.get(name))} before, {_text(new.get(name))} after"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name not in {"sweep file, name", "sweep file, base"}
    )
    if details:
        text = "What differs between the sweeps besides their times."
        yield Notice("Different conditions", text, loud=True, details=details)
    for when, report in (("before", before), ("after", after)):
        for notice in report.notices:
            yield Notice(f"{notice.title} ({when})", notice.text)


def _text(value: object) -> str:
    return first_few(value, 4) if value and isinstance(value, list) else str(value or "not known")
