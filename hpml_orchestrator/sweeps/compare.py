"""Compare two sweeps, such as before and after a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import clock_text, first_few
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.doubts import lost, other_work, timed_out
from hpml_orchestrator.sweeps.facts import MEASURED, TIMED_OUT, Costs, Notice, Setting, SweepFacts
from hpml_orchestrator.sweeps.quality import kept
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Speedup
from hpml_orchestrator.sweeps.wording import estimate_text

_MOST_DOUBTS = 3
_OTHER_DAY = 4 / 3  # two days whose times each vary by 10 % (sd) differ by more in 1 of 20 pairs
_COMMON = 0.5  # of the shorter sweep's duration: with less in common, two sweeps were not mixed
_CONDITIONS = ("base job", "scheduler", "code", "environment", "hardware", "device", "binding")


@dataclass(frozen=True)
class Pair:
    """One setting as two sweeps measured it; None if a sweep has no complete run of it."""

    label: str
    before: Setting | None
    after: Setting | None
    speedup: Speedup | None  # seconds before / seconds after, above 1 if `after` is faster
    # `faster`, `slower`, `not distinguishable`, `unknown` (with too few runs, or if `doubt` gives a
    # reason against comparing the times), `not known: different days` or `different times` (the
    # difference may come from when the sweeps ran)
    verdict: str
    doubt: str = ""  # runs timed out, did another amount of work, or are not shown to train as well


@dataclass(frozen=True)
class SweepComparison:
    """The differences between two sweeps, and whether they can be distinguished from noise."""

    version: int
    name: str
    question: str
    answer: tuple[str, ...]
    notices: tuple[Notice, ...]  # what differs besides the change, or restricts the comparison
    pairs: tuple[Pair, ...]
    costs: tuple[Costs, Costs]  # of all attempts, before and after


class _Apart(NamedTuple):
    """When two sweeps ran that did not run at the same time."""

    word: str
    text: str


def compare(before: SweepFacts, after: SweepFacts) -> SweepComparison:
    """Compare two reports setting by setting: equal scales and values of the axes."""
    old, new = (
        {repr((one.scale, one.values)): one for one in report.settings if one.runs}
        for report in (before, after)
    )
    apart = _apart(before, after)
    pairs = _judged([_pair(old.get(key), new.get(key)) for key in {**old, **new}], apart)
    return SweepComparison(
        version=1,
        name=f"{before.name} and {after.name}",
        question=f"What changed from {before.id} to {after.id}?",
        answer=tuple(_answer(pairs, apart)),
        notices=tuple(_notices(before, after)),
        pairs=tuple(pairs),
        costs=(before.costs, after.costs),
    )


def _apart(before: SweepFacts, after: SweepFacts) -> _Apart | None:
    """Return when two sweeps ran; None if they ran at the same time, as if mixed."""
    spans = [
        (
            min((row.started for row in rows if row.started), default=0.0),
            max((row.ended for row in rows if row.ended), default=0.0),
        )
        for report in (before, after)
        for rows in [[one.row for one in report.attempts if one.row.state == MEASURED]]
    ]
    starts, ends = zip(*spans, strict=True)
    if min(ends) - max(starts) >= _COMMON * min(end - start for start, end in spans):
        return None
    days = [clock_text(start).partition(" ")[0] for start in starts]
    if days[0] == days[1]:
        return _Apart("different times", f"at different times of {days[0]}")
    return _Apart("different days", f"on different days ({days[0]} and {days[1]})")


def _pair(before: Setting | None, after: Setting | None) -> Pair:
    if before and after:
        seconds = before.samples["total_seconds"], after.samples["total_seconds"]
        doubts = [
            timed_out(sum(one.missing.get(state, 0) for state in TIMED_OUT), one.runs)
            for one in (before, after)
        ]
        for one in (before, after):
            text, is_third = lost(one.diverged, one.missing, one.planned)
            doubts += [text] * is_third
        speedup = statistics.speedup(*seconds)
        # Only the faster side can owe its time to a model that was trained less well.
        sides = [(after, before, "the first sweep"), (before, after, "the second sweep")]
        ours, theirs, whose = sides[speedup.value < 1]
        doubts += [other_work(after, before), kept(ours.quality, theirs.quality, whose)[1]]
        doubt = "; ".join(dict.fromkeys(filter(None, doubts)))
        return Pair(before.label, before, after, speedup, "unknown", doubt)
    label = "".join(one.label for one in (before, after) if one)
    return Pair(label, before, after, None, "unknown")


def _judged(pairs: Sequence[Pair], apart: _Apart | None) -> list[Pair]:
    samples = {
        place: (pair.before.samples["total_seconds"], pair.after.samples["total_seconds"])
        for place, pair in enumerate(pairs)
        if pair.before and pair.after and not pair.doubt
    }
    # Each setting is compared only with itself, so there are as many comparisons as settings.
    # Repeat n of one sweep and repeat n of the other did not run in succession, so they form no
    # pairs.
    found = statistics.distinguishable([*samples.values()], comparisons=len(samples))
    judged = list(pairs)
    for place, differ in zip(samples, found, strict=True):
        speedup = pairs[place].speedup
        verdict = "faster" if speedup and speedup.value > 1 else "slower"
        ends = speedup.interval if speedup else None
        if apart and ends and ends.low <= _OTHER_DAY and ends.high >= 1 / _OTHER_DAY:
            verdict = f"not known: {apart.word}"
        verdict = {None: "unknown", False: "not distinguishable"}.get(differ, verdict)
        judged[place] = replace(pairs[place], verdict=verdict)
    return judged


def _answer(pairs: Sequence[Pair], apart: _Apart | None) -> Iterable[str]:
    compared = {pair.label: pair.speedup for pair in pairs if pair.speedup}
    if not compared:
        yield "No setting is complete in both sweeps, so there is nothing to compare."
        return
    verdicts = Counter(pair.verdict for pair in pairs if pair.speedup)
    doubtful = [pair for pair in pairs if pair.doubt]
    unknown = verdicts["unknown"] - len(doubtful)
    few = f"; {unknown} cannot be judged with fewer than {MIN_REPEATS} runs on a side"
    few = few if unknown else ""
    few += f"; {len(doubtful)} cannot be compared" if doubtful else ""
    explained = verdicts[f"not known: {apart.word}"] if apart else 0
    when = "the difference may come from when the sweeps ran"
    few = f"; in {explained} {when}" * bool(explained) + few
    yield (
        f"Of {counted(len(compared), 'setting')} complete in both sweeps, the second is faster in "
        f"{verdicts['faster']}, slower in {verdicts['slower']}, and not distinguishable in "
        f"{verdicts['not distinguishable']}{few}."
    )
    if apart:
        yield (
            f"The sweeps ran {apart.text}, and a program is often 3 to 10 % faster or slower "
            f"at another time: a speedup between {1 / _OTHER_DAY:.2f} and {_OTHER_DAY:.2f} is not "
            "called a change. Only interleaved runs show a smaller one: make what changed an axis "
            "of one sweep, such as `--grid NAME=OLD,NEW`."
        )
    for pair in doubtful[:_MOST_DOUBTS]:
        yield f"The times of {pair.label} do not compare: {pair.doubt}."
    for pair in doubtful:
        del compared[pair.label]
    if not compared:
        return
    different = {pair.label for pair in pairs if pair.verdict in {"faster", "slower"}}
    sure = {label: one for label, one in compared.items() if label in different}
    caveat = "; it may come from when the sweeps ran" if apart and not sure else ""
    label, largest = max(
        (sure or compared).items(), key=lambda pair: max(pair[1].value, 1 / pair[1].value)
    )
    yield (
        f"The largest {'' if sure else 'apparent '}change is at {label}: the second is "
        f"{estimate_text(largest)} times as fast{caveat}."
    )


def _notices(before: SweepFacts, after: SweepFacts) -> Iterable[Notice]:
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
        text = "The sweeps differ in more than their times."
        yield Notice("Different conditions", text, "loud", details)
    for when, report in (("before", before), ("after", after)):
        for notice in report.notices:
            yield replace(notice, title=f"{notice.title} ({when})", status="")


def _text(value: object) -> str:
    return first_few(value, 4) if value and isinstance(value, list) else str(value or "not known")
