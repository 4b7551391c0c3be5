"""The warnings of a sweep's report, and the reasons against comparing scales.

The rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.sweeps.conditions import above_ideal, conditions
from hpml_orchestrator.sweeps.course import course
from hpml_orchestrator.sweeps.doubts import differing, some_lost
from hpml_orchestrator.sweeps.facts import CONTINUED, MEASURED, Notice, SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS
from hpml_orchestrator.sweeps.wording import UNFINISHED, attempts_text

_MOST_DETAILS = 8


def notices(
    plan: SweepPlan, report: SweepFacts, *, aim: float | None, one_after_other: bool
) -> Iterable[Notice]:
    """Return the warnings of a report, the most serious first.

    Args:
        plan: the plan.
        report: everything else in the report.
        aim: the accuracy that reported times refer to, if any.
        one_after_other: whether all repeats of a setting come before those of the next.
    """
    rows = [attempt.row for attempt in report.attempts]
    for name in ("code", "environment", "hardware", "device"):
        found = Counter(text for row in rows if (text := getattr(row, name)))
        if len(found) > 1:
            text = f"Attempts differ in {name}, so differences may not come from the settings."
            silent = sum(row.started is not None and not getattr(row, name) for row in rows)
            details = [f"not recorded: {counted(silent, 'attempt')}"] * bool(silent)
            yield Notice(f"Different {name}", text, "loud", (*_tally(found, "attempt"), *details))
    yield from conditions(report)
    yield from _deviations(plan, report)
    yield from _targets(plan, report, aim)
    yield from _missed(report)
    several = report.scaling and len([one for one in report.settings if one.planned]) > 1
    if several and one_after_other:
        text = (
            "The plan submits all runs of one setting before those of the next: a drift of the "
            "cluster over time looks like an effect of the scale."
        )
        yield Notice("Order of the runs", text, "loud")
    yield from course(report)
    yield from above_ideal(report)
    if few := [one.runs for one in report.settings if 0 < one.runs < MIN_REPEATS]:
        text = (
            f"No 95 % CI for {counted(len(few), 'setting')} with fewer than {MIN_REPEATS} "
            f"complete runs (down to {min(few)}), so differences there may be chance."
        )
        yield Notice("Few repeats", text)
    if missing := set(report.states) - {MEASURED, "PRUNED", "EXCLUDED", CONTINUED}:
        title = "Not finished" if missing & UNFINISHED else "Not completed"
        yield Notice(title, f"{attempts_text({name: report.states[name] for name in missing})}.")
    if left := Counter(row.reason for row in rows if row.state == "EXCLUDED"):
        text = f"{counted(left.total(), 'point')} of the plan will not run."
        yield Notice("Left out", text, details=_tally(left, "point"))
    if dirty := sum("+dirty" in row.code for row in rows):
        text = f"{counted(dirty, 'attempt')} ran code with uncommitted changes."
        yield Notice("Uncommitted changes", text)


def _tally(found: Counter[str], noun: str) -> tuple[str, ...]:
    return tuple(f"{text}: {counted(n, noun)}" for text, n in found.most_common(_MOST_DETAILS))


def _deviations(plan: SweepPlan, report: SweepFacts) -> Iterable[Notice]:
    """Yield warnings about runs that were placed or trained differently than planned."""
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
    if not report.search:
        yield from some_lost(report.settings)
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
    used = differing(report.settings, "learning_rate")
    if report.mode == "strong" and not plan.spec.learning_rate and used:
        text = (
            f"The scales trained with learning rates from {used[0]:g} to {used[-1]:g} at "
            "the same global batch, so their accuracies and times to accuracy do not compare."
        )
        yield Notice("Different learning rates", text, "loud")
    measured = [one for one in report.settings if one.runs]
    if report.mode == "strong" and not all(
        {"work", "steps", "epochs"} & one.means.keys() for one in measured
    ):
        text = "Not all runs reported steps or epochs: that all scales do the same work is assumed."
        yield Notice("Amount of work not recorded", text)
    steps = {one.label: one.ran["steps"] for one in report.settings if len(one.ran["steps"]) > 1}
    if steps and report.scaling:
        listed = first_few([f"{label}: {min(n)}-{max(n)}" for label, n in steps.items()], 4)
        text = f"Runs of the same setting trained different numbers of steps ({listed})."
        yield Notice("Different steps", text)


def _missed(report: SweepFacts) -> Iterable[Notice]:
    """Yield which settings have runs that missed the target, and runs that took part later."""
    missed = [
        f"{one.label}: {one.target.reached} of {counted(one.target.seconds.n, 'run')} reached it"
        for one in report.settings
        if one.target and one.target.reached < one.target.seconds.n
    ]
    if missed and report.scaling:
        text = "Not all runs reached the target accuracy; speedups compare whole runs all the same."
        yield Notice("Target missed", text, details=tuple(missed[:_MOST_DETAILS]))
    later = [one for one in report.attempts if one.row.start and one.row.state == MEASURED]
    if later and any(one.blocks for one in report.settings):
        text = (
            f"{counted(len(later), 'complete run')} started again, later than the others of the "
            "same repeat, with which times are compared: the program or the cluster may have "
            "changed in between."
        )
        yield Notice("Runs at another time", text)


def _targets(plan: SweepPlan, report: SweepFacts, aim: float | None) -> Iterable[Notice]:
    """Yield warnings about times to accuracy that are not to the sweep file's target."""
    rows = [attempt.row for attempt in report.attempts]
    told = sorted({row.target_accuracy for row in rows if row.target_accuracy is not None})
    listed = ", ".join(f"{target:g}" for target in told)
    wanted = plan.spec.target_accuracy
    unknown = sum(one.target.unknown for one in report.settings if one.target)
    if wanted is not None and aim != wanted and report.states.get(MEASURED):
        text = f"The sweep file's target accuracy is {wanted:g}, but no run reported evaluations"
        text += f", and the program measured its times to {listed}" if told else ""
        text += f": the times below are to {aim:g}." if aim else ": no time to it is known."
        yield Notice("Another target", text, "loud")
    elif aim is None and len(told) > 1:
        text = f"The program measured its times to different accuracies ({listed}): none is given."
        yield Notice("Different targets", text, "loud")
    elif unknown:
        text = f"{counted(unknown, 'complete run')} reported no time to the accuracy {aim:g}."
        yield Notice("Unknown times to the target", text, "loud")
    elif aim is not None and any(target != aim for target in told):
        text = (
            f"The program measured its times to {listed}; those to the sweep file's {aim:g} are "
            "computed from the evaluations that it reported, from the start of its warm-up."
        )
        yield Notice("Computed times to the target", text)
