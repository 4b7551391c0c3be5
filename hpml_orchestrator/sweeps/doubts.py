"""The reasons against comparing settings.

The rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hpml_orchestrator.document.templates import percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.sweeps.facts import Notice, Setting
from hpml_orchestrator.sweeps.wording import CONSTANT

_SAME_WORK = 0.05  # relative difference of the samples that runs at two scales trained with
# Ends that a scale can cause; evictions (node failure, preemption, cancellation) are the cluster's.
_ERRORS = {"FAILED": "failed", "OUT_OF_MEMORY": "ran out of memory"}
_MOST_DETAILS = 8


def timed_out(timeouts: int, complete: int) -> str:
    """Return why the complete runs are not representative; empty if none timed out."""
    if not timeouts:
        return ""
    return f"{timeouts} of {counted(timeouts + complete, 'run')} reached the time limit"


def other_work(setting: Setting, baseline: Setting) -> str:
    """Return how the amount of work differs from the baseline's; empty if it is the same."""
    names = {"work": "samples", "steps": "steps", "epochs": "epochs"}
    for name in [name for name in names if {name} <= setting.means.keys() & baseline.means.keys()]:
        share = setting.means[name] / baseline.means[name]
        if abs(share - 1) > _SAME_WORK:
            return (
                f"the runs trained with {percent(share)} of the {names[name]} of {baseline.label}"
            )
    return ""


def lost(diverged: Mapping[str, int], missing: Mapping[str, int], planned: int) -> tuple[str, bool]:
    """Return how many runs diverged or ended in an error, and whether that is a third or more."""
    ends = [(f"diverged ({figure})", count) for figure, count in diverged.items()]
    ends += [(text, missing[state]) for state, text in _ERRORS.items() if missing.get(state)]
    whole = f"of {counted(planned, 'run')} "
    text = " and ".join(
        f"{count} {'' if place else whole}{end}" for place, (end, count) in enumerate(ends)
    )
    return text, bool(ends) and 3 * sum(count for _, count in ends) >= planned


def some_lost(settings: Sequence[Setting]) -> Iterable[Notice]:
    """Yield a warning about scales of which fewer than a third of the runs were lost."""
    found = [(one.label, *lost(one.diverged, one.missing, one.planned)) for one in settings]
    texts = [f"{label}: {text}" for label, text, is_third in found if text and not is_third]
    if texts:
        text = (
            "These settings are compared by the runs that completed; diverged ones count in their "
            "times, not in their accuracy."
        )
        yield Notice("Runs that diverged or failed", text, "loud", tuple(texts[:_MOST_DETAILS]))


def mixed_batches(mode: str, settings: Sequence[Setting]) -> str:
    """Return why speedups would compare different problems (rule 1), or nothing."""
    sizes = differing(settings, CONSTANT[mode]) if mode in CONSTANT else []
    what = "global batch" if mode == "strong" else "batch per rank"
    listed = ", ".join(f"{size:g}" for size in sizes)
    return f"{mode} scaling needs the same {what}, but runs had {listed}" if sizes else ""


def differing(settings: Sequence[Setting], name: str) -> list[float]:
    """Return the values of the first series whose runs differ in it (`Setting.ran`), or none."""
    found: dict[str, set[float]] = defaultdict(set)
    for setting in settings:
        if setting.runs:
            found[setting.series].update(setting.ran[name])
    return next((sorted(values) for values in found.values() if len(values) > 1), [])
