"""Two settings compared: of a trial, of two runs, or of two sweeps, setting by setting.

The sentences are in `templates/report/answers.j2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from hpml_orchestrator.records.texts import clock_text, first_few
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.doubts import lost, other_work, timed_out
from hpml_orchestrator.sweeps.facts import (
    MEASURED,
    TIMED_OUT,
    Costs,
    Notice,
    Setting,
    SweepFacts,
    is_complete,
)
from hpml_orchestrator.sweeps.plan import JOB_AXIS, SweepPlan
from hpml_orchestrator.sweeps.quality import kept
from hpml_orchestrator.sweeps.rows import PointRow, setup_seconds
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Speedup
from hpml_orchestrator.sweeps.wording import sentences

_MOST_DOUBTS = 3
_OTHER_DAY = 4 / 3  # two days whose times each vary by 10 % (sd) differ by more in 1 of 20 pairs
_COMMON = 0.5  # of the shorter sweep's duration: with less in common, two sweeps were not mixed
_CONDITIONS = ("base job", "scheduler", "code", "environment", "hardware", "device", "binding")
_SMALL_SECONDS = 1.0


@dataclass(frozen=True)
class Pair:
    """A setting before and after a change; None if it has no complete run."""

    label: str
    before: Setting | None
    after: Setting | None
    speedup: Speedup | None  # above 1 if `after` is faster
    # `faster`, `slower`, `not distinguishable`, `unknown` (with too few runs, or if `doubt` gives a
    # reason against comparing the times), `not known: different days` or `different times` (the
    # difference may come from when the sweeps ran)
    verdict: str
    doubt: str = ""  # runs timed out, did another amount of work, or are not shown to train as well


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs or sweeps, and whether noise explains them."""

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


def question(before: str, after: str) -> str:
    """Return the question that a comparison answers."""
    return f"What changed from {before} to {after}?"


def compare_sweeps(before: SweepFacts, after: SweepFacts) -> Comparison:
    """Compare two reports setting by setting: equal scales and values of the axes."""
    old, new = (
        {repr((one.scale, one.values)): one for one in report.settings if one.runs}
        for report in (before, after)
    )
    apart = _apart(before, after)
    pairs = _judged([_pair(old.get(key), new.get(key)) for key in {**old, **new}], apart)
    return Comparison(
        version=1,
        name=f"{before.name} and {after.name}",
        question=question(before.id, after.id),
        answer=_answer(pairs, apart),
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
    if not before or not after:
        label = "".join(one.label for one in (before, after) if one)
        return Pair(label, before, after, None, "unknown")
    doubts = [
        timed_out(sum(one.missing.get(state, 0) for state in TIMED_OUT), one.runs)
        for one in (before, after)
    ]
    for one in (before, after):
        text, is_third = lost(one.diverged, one.missing, one.planned)
        doubts += [text] * is_third
    speedup = statistics.speedup(before.samples["total_seconds"], after.samples["total_seconds"])
    # Only the faster side can owe its time to a model that was trained less well.
    sides = [(after, before, "the first sweep"), (before, after, "the second sweep")]
    ours, theirs, whose = sides[speedup.value < 1]
    doubts += [other_work(after, before), kept(ours.quality, theirs.quality, whose)[1]]
    doubt = "; ".join(dict.fromkeys(filter(None, doubts)))
    return Pair(before.label, before, after, speedup, "unknown", doubt)


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


def _answer(pairs: Sequence[Pair], apart: _Apart | None) -> tuple[str, ...]:
    complete = [pair for pair in pairs if pair.speedup]
    doubtful = [pair for pair in complete if pair.doubt]
    compared = [pair for pair in complete if not pair.doubt]
    sure = [pair for pair in compared if pair.verdict in {"faster", "slower"}]
    speedups = {pair.label: pair.speedup for pair in sure or compared if pair.speedup}
    verdicts = Counter(pair.verdict for pair in complete)
    return sentences(
        "sweeps",
        complete=len(complete),
        verdicts=verdicts,
        unknown=verdicts["unknown"] - len(doubtful),
        explained=verdicts[f"not known: {apart.word}"] if apart else 0,
        doubtful=doubtful,
        named=doubtful[:_MOST_DOUBTS],
        apart=apart,
        other_day=_OTHER_DAY,
        fewest=MIN_REPEATS,
        sure=bool(sure),
        largest=max(
            speedups.items(), key=lambda pair: max(pair[1].value, 1 / pair[1].value), default=None
        ),
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


def trial_answer(plan: SweepPlan, report: SweepFacts) -> tuple[str, ...]:
    """Return the answer of a trial: the speed in the first sentence, then what else changed.

    Raises:
        ValueError: the plan is not one of a trial.
    """
    if plan.trial is None:
        raise ValueError(f"{plan.id} is not a trial")
    last = {one.row.point: one for one in report.attempts}  # in the order of the starts
    names = {setting.number: str(setting.values[JOB_AXIS]) for setting in report.settings}
    usable: dict[str, dict[int, PointRow]] = {name: {} for name in names.values()}
    failed: dict[str, list[PointRow]] = {}
    for one in last.values():
        if is_complete(plan, one.row):
            usable[names[one.setting]][one.repeat] = one.row
        elif one.row.over and one.row.state != "EXCLUDED":
            failed.setdefault(names[one.setting], []).append(one.row)
    before, after = usable.values()
    source = report.figure.source
    pairs = [
        (before[repeat], after[repeat])
        for repeat in sorted(before.keys() & after.keys())
        if getattr(before[repeat], source) and getattr(after[repeat], source)
    ]
    power = -1 if report.figure.maximize else 1  # 1 / rate is the time of one sample
    values = [[getattr(row, source) ** power for row in side] for side in zip(*pairs, strict=True)]
    return sentences(
        "trial",
        trial=plan.trial,
        speedup=statistics.speedup(*values, paired=True) if values else None,
        planned=plan.spec.count,
        pairs=len(pairs),
        fewest=MIN_REPEATS,
        # Stopped runs differ in how long they ran: then the rates are compared, not the times.
        whole=not report.figure.maximize,
        waits=_medians(pairs, lambda row: row.data_wait_ratio),
        rates=_medians(pairs, lambda row: row.samples_per_second),
        accuracies=_medians(pairs, lambda row: row.accuracy),
        accuracy_name=report.accuracy_name,
        setup=_medians(pairs, lambda row: setup_seconds(row.phases)),
        small=_SMALL_SECONDS,
        failed=failed,
        unfinished=any(not one.row.over for one in last.values()),
    )


def _medians(
    pairs: Sequence[tuple[PointRow, PointRow]], figure: Callable[[PointRow], float | None]
) -> tuple[float, float] | None:
    """Return the median of a figure before and after; None unless all runs have it."""
    sides = [[figure(row) for row in side] for side in zip(*pairs, strict=True)]
    known = [[value for value in side if value is not None] for side in sides]
    if not pairs or any(len(values) < len(pairs) for values in known):
        return None
    return median(known[0]), median(known[1])
