"""The reasons against comparing settings.

The rules are those of docs/sweeps.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hpml_orchestrator.diagnosis.templates import percent
from hpml_orchestrator.errors import counted
from hpml_orchestrator.sweeps.facts import Setting
from hpml_orchestrator.sweeps.statistics import distinguishable
from hpml_orchestrator.sweeps.wording import CONSTANT, value_text

_SAME_WORK = 0.05  # relative difference of the samples that runs at two scales trained with
_SMALL_LOSS, _LARGE_LOSS = 0.01, 0.05  # of accuracy: if distinguishable from noise, and if not


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


def unequal(setting: Setting, baseline: Setting) -> str:
    """Return how the accuracy differs from the baseline's; empty if it is about the same."""
    pair = setting.samples["accuracy"], baseline.samples["accuracy"]
    if not all(pair):
        return ""
    ours, theirs = (one.means["accuracy"] for one in (setting, baseline))
    (sure,) = distinguishable([pair], comparisons=1)
    usual = max(_LARGE_LOSS, max(pair[1]) - min(pair[1]))  # two runs may differ by chance
    if abs(ours - theirs) > (_SMALL_LOSS if sure else usual):
        means = f"{value_text(ours)}, against {value_text(theirs)}"
        return f"the mean accuracy is {means} with {baseline.label}"
    return ""


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
