"""Run the best settings of a search or grid again, with random seeds that it has not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.jobfile.sweep import make_sweep
from hpml_orchestrator.sweeps.batches import with_trials
from hpml_orchestrator.sweeps.expand import make_plan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.table import Table

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.plan import SweepPlan

_BEST = 3  # settings, unless another number is asked for
_NAME_CHARS = 57  # of the 64 of a sweep's name


def make_repeat(
    store: Store,
    planned: SweepPlan,
    *,
    best: int | None,
    repeats: int,
    argv: Sequence[str] = (),
    now: float,
) -> SweepPlan:
    """Return the plan of a grid with the best settings of a sweep; nothing is written.

    The best of many trials is partly the luckiest, so its figure is too good; new runs are not
    chosen by their figure.

    Raises:
        InputError: its settings cannot be run again, or none of them has a figure.
    """
    _refuse(planned)
    planned = with_trials(store, planned)
    facts = build(planned, Table(store, planned).rows())
    front = [facts.settings[number] for number in facts.front]
    chosen = [dict(setting.values) for setting in front or facts.ranked[: best or _BEST]]
    if front and best is not None:
        why = "a search by several figures has a front: it is repeated whole"
        raise InputError(why, field="--best", value=best, hint="leave out --best")
    lists = {
        name: [*dict.fromkeys(one[name] for one in chosen if name in one)]
        for name in planned.spec.axes
    }
    if not chosen:
        message = f"has no run that reports {facts.figure.name}"
        raise InputError(message, field="SWEEP", value=planned.id)
    first = max((point.seed for point in planned.points), default=0) + 1
    sweep = make_sweep(
        {
            **planned.sweep,
            "name": f"{planned.name[:_NAME_CHARS]}-repeat",
            "mode": "grid",
            "axes": {name: _axis(planned, name, lists) for name in lists if lists[name]},
            "combinations": chosen,
            "exclude": [],
            "order": "interleaved",
            "repeats": repeats,
            "seeds": {
                "argument": planned.spec.seeds.argument,
                "values": [*range(first, first + repeats)],
            },
            "budget": {**planned.sweep["budget"], "parallel": planned.spec.parallel},
        },
        Path(planned.spec.base),
        where=planned.id,
    )
    made = make_plan(sweep, backend=planned.backend, site=planned.site, argv=argv, now=now)
    seeds = f", with the seeds {first} to {first + repeats - 1}" if sweep.seeds.argument else ""
    note = f"repeats the best {counted(len(chosen), 'setting')} of {planned.id}{seeds}"
    return replace(made, notes=(note, *made.notes))


def _axis(planned: SweepPlan, name: str, lists: Mapping[str, list[object]]) -> object:
    """Return an axis of the chosen values, with the part of its condition that they meet."""
    when = {
        other: [value for value in allowed if value in lists[other]]
        for other, allowed in planned.spec.conditions.get(name, {}).items()
    }
    return {"values": lists[name], "when": when} if when else lists[name]


def _refuse(planned: SweepPlan) -> None:
    why, hint = "", "give a search or a grid"
    if planned.trial:
        why = "is a trial of a change"
    elif planned.mode == "pbt":
        why = "is a population, whose members continue from checkpoints"
        hint = "run the schedule of its best member as a job of its own"
    elif planned.unit:
        why = f"is a {planned.mode} sweep, whose scales are repeated already"
        hint = "run it again with more --repeats"
    if why:
        raise InputError(why, field="SWEEP", value=planned.id, hint=hint)
