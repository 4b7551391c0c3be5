"""Aging evolution and population-based training: the next trial of a study from those before it.

Sources: Real et al., "Regularized Evolution for Image Classifier Architecture Search" (2019),
algorithm 1; Jaderberg et al., "Population Based Training of Neural Networks" (2017), section 4.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.sweep import Search, Sweep

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of an axis: a list, or a range of fractions or whole numbers."""

# Standard deviations of a mutation and of a perturbation, as a share of the range.
_MUTATION, _PERTURBATION = 0.2, 0.05
_TRUNCATED = 0.2  # share of a generation that is replaced by copies of an equal share


def evolve(
    trials: Sequence[FrozenTrial], axes: Mapping[str, Axis], sweep: Sweep, rng: random.Random
) -> FrozenTrial | None:
    """Return the next trial of aging evolution.

    The population is the youngest `population` trials that completed, so each dies of age, not of
    a bad score. The best of a random tournament is the parent; every second trial takes each value
    from it or from the winner of a second tournament. Then one value mutates. An axis that applied
    to no parent gets a random value.

    Returns:
        A running trial with its `parents` and `generation` as attributes; None while the first
        population is drawn at random.
    """
    search = sweep.search
    alive = [trial for trial in trials if trial.state is TrialState.COMPLETE][-search.population :]
    # All trials count here, not only completed ones: otherwise parallel runs would draw more than
    # one population at random before the first run ends.
    if len(trials) < search.population or not alive:
        return None
    size = min(search.tournament, len(alive))
    parents = [_ranked(rng.sample(alive, size), search)[0] for _ in range(rng.choice((1, 2)))]
    values = {}
    for name, axis in axes.items():
        known = [parent.params[name] for parent in parents if name in parent.params]
        values[name] = rng.choice(known) if known else value_at(axis, rng.random())
    # An axis with a single value cannot mutate, nor one that does not apply; choosing it would run
    # a copy of the parent.
    applying = sweep.applying(values)
    name = rng.choice([name for name in applying if not axes[name].single()] or [*axes])
    values[name] = _changed(axes[name], values[name], _MUTATION, rng)
    generation = 1 + max(parent.user_attrs.get("generation", 0) for parent in parents)
    return _child(parents, values, axes, generation=generation)


def train_on(
    trials: Sequence[FrozenTrial],
    axes: Mapping[str, Axis],
    search: Search,
    rng: random.Random,
    *,
    runs: Path,
) -> FrozenTrial | None:
    """Return the next trial of population-based training; the generation before it is over.

    Each place in the population trains on from its own checkpoint, with the same values. A place
    among the worst 20 %, or whose training failed, takes the checkpoint of one of the best 20 %
    and perturbs its values (truncation selection).

    The checkpoints are in the trials' directories under `runs`.

    Returns:
        A running trial with its `parents`, `generation` and `checkpoint` as attributes; None for
        the first generation, and after a generation that failed completely: their members are drawn
        at random and start without a checkpoint.

    Raises:
        InputError: trainings completed, but none of them left a checkpoint.
    """
    generation, place = divmod(len(trials), search.population)
    before = trials[-search.population - place :][: search.population]
    completed = _ranked((one for one in before if one.state is TrialState.COMPLETE), search)
    if generation == 0 or not completed:
        return None
    files = {one.number: runs / one.user_attrs["run"] / search.checkpoint for one in completed}
    able = [trial for trial in completed if files[trial.number].exists()]
    if not able:
        raise InputError(
            f"no run of generation {generation - 1} left this file; that of the best is "
            f"{files[completed[0].number]}",
            field="search.checkpoint",
            hint="have the training write its checkpoint there, "
            "as `--checkpoint {run.dir}/checkpoint.pt` does",
        )
    count = max(1, round(_TRUNCATED * search.population))
    parent, values = before[place], dict(before[place].params)
    if parent not in able[: search.population - count]:
        parent = rng.choice(able[:count])
        values = {
            name: _changed(axis, parent.params[name], _PERTURBATION, rng)
            for name, axis in axes.items()
        }
    checkpoint = str(files[parent.number])
    return _child([parent], values, axes, generation=generation, checkpoint=checkpoint)


def _ranked(trials: Iterable[FrozenTrial], search: Search) -> list[FrozenTrial]:
    return sorted(trials, key=lambda trial: trial.values[0], reverse=search.maximize)


def _child(
    parents: Sequence[FrozenTrial],
    values: Mapping[str, object],
    axes: Mapping[str, Axis],
    **attributes: object,
) -> FrozenTrial:
    return create_trial(
        state=TrialState.RUNNING,
        params=dict(values),
        distributions=dict(axes),
        user_attrs={"parents": [parent.number for parent in parents], **attributes},
    )


def _changed(axis: Axis, value: Any, width: float, rng: random.Random) -> Any:
    """Return another value of the axis, normally distributed about this one.

    Distances are those of positions in a list, and of logarithms in a logarithmic range. The
    standard deviation is the share `width` of the axis; it grows until the value is another.
    """
    if axis.single():
        return value
    if isinstance(axis, CategoricalDistribution):
        places = IntDistribution(0, len(axis.choices) - 1)
        return axis.choices[_changed(places, axis.choices.index(value), width, rng)]
    on_scale, from_scale = (math.log, math.exp) if axis.log else (float, float)
    low, high = on_scale(axis.low), on_scale(axis.high)
    changed = value
    while changed == value:
        target = rng.gauss(on_scale(value), width * (high - low))
        number = from_scale(min(max(target, low), high))
        if axis.step is not None:
            number = axis.low + round((number - axis.low) / axis.step) * axis.step
        changed = axis.to_external_repr(min(max(number, axis.low), axis.high))
        # A standard deviation far below the step of the axis would almost never reach another
        # value.
        width *= 1.5
    return changed


def value_at(axis: Axis, share: float) -> object:
    """Return the value of an axis at a share of its length, from 0 to below 1."""
    if isinstance(axis, CategoricalDistribution):
        return axis.choices[int(share * len(axis.choices))]
    if axis.log:
        edge = 0.5 if isinstance(axis, IntDistribution) else 0.0  # before rounding
        low, high = math.log(axis.low - edge), math.log(axis.high + edge)
        number = math.exp(low + share * (high - low))
        number = round(number) if edge else number
    elif axis.step:
        steps = round((axis.high - axis.low) / axis.step) + 1
        number = axis.low + axis.step * int(share * steps)
    else:
        number = axis.low + share * (axis.high - axis.low)
    return axis.to_external_repr(min(max(number, axis.low), axis.high))
