"""Set two sweeps side by side, such as before and after a change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import MEASURED, Notice, Report, Setting
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup
from hpml_orchestrator.sweeps.wording import interval_text, number

__all__ = ["Comparison", "Pair", "compare"]

_Measured: TypeAlias = dict[tuple[int | None, str], tuple[Setting, list[float]]]
_COMPARED = ("base job", "scheduler", "code", "environment", "hardware", "device", "binding")


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
        before, after: ids of the sweeps.
        notices: what differs besides the change, or restricts the comparison.
        only_before, only_after: settings that one of them measured.
        gpu_hours, core_hours: of all attempts, before and after.
    """

    version: int
    name: str
    before: str
    after: str
    question: str
    answer: tuple[str, ...]
    notices: tuple[Notice, ...]
    pairs: tuple[Pair, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    gpu_hours: tuple[float, float]
    core_hours: tuple[float, float]


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports setting by setting: equal scales and values of the axes."""
    measured = [_measured(report) for report in (before, after)]
    pairs = []
    for key in (key for key in measured[0] if key in measured[1]):
        (setting, one), (same, other) = (settings[key] for settings in measured)
        pairs.append(
            Pair(
                label=setting.label,
                before=statistics.median_estimate(one),
                after=statistics.median_estimate(other),
                speedup=statistics.speedup(one, other),
                distinguishable=statistics.distinguishable(one, other),
                accuracy_before=setting.accuracy,
                accuracy_after=same.accuracy,
            )
        )
    return Comparison(
        version=1,
        name=f"{before.name} and {after.name}",
        before=before.id,
        after=after.id,
        question=f"What changed from {before.id} to {after.id}?",
        answer=tuple(_answer(pairs)),
        notices=tuple(_notices(before, after)),
        pairs=tuple(pairs),
        only_before=_only(*measured),
        only_after=_only(*reversed(measured)),
        gpu_hours=(before.costs.gpu_hours, after.costs.gpu_hours),
        core_hours=(before.costs.core_hours, after.costs.core_hours),
    )


def _measured(report: Report) -> _Measured:
    """Return settings with the total seconds of their complete runs, by scale and values."""
    totals: dict[int, list[float]] = defaultdict(list)
    for attempt in report.attempts:
        if attempt.row.state == MEASURED and attempt.row.total_seconds:
            totals[attempt.setting].append(attempt.row.total_seconds)
    return {
        (one.scale, repr(sorted(one.values.items()))): (one, totals[one.number])
        for one in report.settings
        if totals[one.number]
    }


def _only(these: _Measured, those: _Measured) -> tuple[str, ...]:
    return tuple(setting.label for key, (setting, _) in these.items() if key not in those)


def _answer(pairs: list[Pair]) -> Iterable[str]:
    if not pairs:
        yield "No setting is complete in both sweeps, so there is nothing to compare."
        return
    differing = [pair for pair in pairs if pair.distinguishable]
    faster = sum(pair.speedup.value > 1 for pair in differing)
    equal = sum(pair.distinguishable is False for pair in pairs)
    unknown = len(pairs) - len(differing) - equal
    text = (
        f"Of {counted(len(pairs), 'setting')} complete in both sweeps, the second is faster in "
        f"{faster}, slower in {len(differing) - faster}, and not distinguishable in {equal}"
    )
    few = f"{unknown} cannot be judged with fewer than {statistics.MIN_REPEATS} runs on a side"
    yield f"{text}; {few}." if unknown else f"{text}."
    largest = max(
        differing or pairs, key=lambda pair: max(pair.speedup.value, 1 / pair.speedup.value)
    )
    yield (
        f"The largest {'' if differing else 'apparent '}change is at {largest.label}: "
        f"{number(largest.before.value)} s before, {number(largest.after.value)} s after, "
        f"{number(largest.speedup.value)}{interval_text(largest.speedup.interval)} times as fast."
    )


def _notices(before: Report, after: Report) -> Iterable[Notice]:
    details = []
    for name in _COMPARED:
        one, other = before.provenance.get(name), after.provenance.get(name)
        if one != other:
            details.append(f"{name}: {_text(one)} before, {_text(other)} after")
    fields = [report.provenance["sweep file"] for report in (before, after)]
    for name in sorted({*fields[0], *fields[1]} - {"name"}):
        one, other = (str(values.get(name, "not set")) for values in fields)
        if one != other:
            details.append(f"sweep file, {name}: {one} before, {other} after")
    if details:
        text = "What differs between the sweeps besides their times."
        yield Notice("Different conditions", text, loud=True, details=tuple(details))
    for when, report in (("before", before), ("after", after)):
        for notice in report.notices:
            if notice.restricts or notice.loud:
                yield Notice(f"{notice.title} ({when})", notice.text, restricts=True)


def _text(value: object) -> str:
    texts = value if isinstance(value, list) else [str(value or "")]
    return first_few([text for text in texts if text], 4) or "not known"
