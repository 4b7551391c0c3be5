"""Aging evolution and population-based training: the values of one trial from those before it.

Sources: Real et al., "Regularized Evolution for Image Classifier Architecture Search" (2019),
algorithm 1; Jaderberg et al., "Population Based Training of Neural Networks" (2017), section 4.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hpml_orchestrator.errors import InputError

__all__ = ["Axis", "Child", "Member", "evolve", "train_on"]

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of an axis: a list, or a range of fractions or whole numbers."""

_MUTATION_WIDTH = 0.2  # standard deviation of a mutation, as a share of the range
_RESAMPLED = 0.25  # share of the values that a perturbation draws anew
_TRUNCATED = 0.2  # share of a generation that is replaced by copies of an equal share


@dataclass(frozen=True)
class Member:
    """A trial of the search, seen as a possible parent.

    Attributes:
        number: of the trial.
        values: by the axes' names.
        score: what it reached, larger is better; None if it failed, was pruned or still runs.
        generation: 0 for values that were drawn at random.
        checkpoint: file that its training leaves (population-based training).
    """

    number: int
    values: Mapping[str, Any]
    score: float | None
    generation: int = 0
    checkpoint: str = ""


@dataclass(frozen=True)
class Child:
    """A new trial.

    Attributes:
        values: by the axes' names.
        parent, generation: trial that it descends from, and how many lie before it.
        mate: second parent, None without crossover.
        checkpoint: file that its training starts from (population-based training).
    """

    values: Mapping[str, Any]
    parent: int
    generation: int
    mate: int | None = None
    checkpoint: str = ""


def evolve(
    members: Sequence[Member],
    axes: Mapping[str, Axis],
    *,
    population: int,
    tournament: int,
    rng: random.Random,
) -> Child | None:
    """Return the next child of aging evolution.

    The population is the youngest `population` members that completed, so each dies of age, not of
    a bad score. The best of a random tournament is the parent; every second child takes each value
    from it or from the winner of a second tournament. Then one value mutates.

    Returns:
        None while the first population is to be drawn at random.
    """
    alive = [member for member in members if member.score is not None][-population:]
    if len(members) < population or not alive:
        return None

    def winner() -> Member:
        return max(rng.sample(alive, min(tournament, len(alive))), key=_score)

    parent, mate = winner(), winner() if rng.random() < 1 / 2 else None
    values = dict(parent.values)
    if mate is not None:
        values = {name: rng.choice((value, mate.values[name])) for name, value in values.items()}
    mutable = [name for name, axis in axes.items() if not axis.single()]
    if mutable:
        name = rng.choice(mutable)
        values[name] = _mutated(axes[name], values[name], rng)
    generation = 1 + max(parent.generation, mate.generation if mate else 0)
    return Child(values, parent.number, generation, mate.number if mate else None)


def train_on(
    members: Sequence[Member],
    axes: Mapping[str, Axis],
    *,
    population: int,
    rng: random.Random,
) -> Child | None:
    """Return the next child of population-based training; the generation before it has to be over.

    Each place in the population trains on from its own checkpoint, with the same values. A place
    among the worst 20 %, or whose training failed, takes the checkpoint of one of the best 20 %
    and perturbs its values (truncation selection).

    Returns:
        None for the first generation, and for one that follows upon failures alone: these are to
        be drawn at random, and start without a checkpoint.

    Raises:
        InputError: trainings completed, but none of them left a checkpoint.
    """
    generation, place = divmod(len(members), population)
    if generation == 0:
        return None
    before = members[(generation - 1) * population : generation * population]
    completed = [member for member in before if member.score is not None]
    if not completed:
        return None
    ranked = [member for member in completed if Path(member.checkpoint).is_file()]
    if not ranked:
        raise InputError(
            f"no run of generation {generation - 1} left this file; the first is "
            f"{completed[0].checkpoint}",
            field="search.checkpoint",
            hint="have the training write its checkpoint there, "
            "as `--checkpoint {run.dir}/checkpoint.pt` does",
        )
    ranked.sort(key=_score, reverse=True)
    count = max(1, round(_TRUNCATED * population))
    own = before[place]
    if own in ranked[: population - count]:
        return Child(dict(own.values), own.number, generation, checkpoint=own.checkpoint)
    parent = rng.choice(ranked[:count])
    values = {name: _perturbed(axis, parent.values[name], rng) for name, axis in axes.items()}
    return Child(values, parent.number, generation, checkpoint=parent.checkpoint)


def _score(member: Member) -> float:
    return -math.inf if member.score is None else member.score


def _mutated(axis: Axis, value: Any, rng: random.Random) -> Any:
    """Return another value of the axis: any of a list, one nearby of a range."""
    if isinstance(axis, CategoricalDistribution):
        return rng.choice([choice for choice in axis.choices if choice != value])
    low, high, here = _on_scale(axis, axis.low), _on_scale(axis, axis.high), _on_scale(axis, value)
    width, mutant = _MUTATION_WIDTH * (high - low), value
    while mutant == value:  # clipped or rounded to where it was: try again, farther
        target = min(max(rng.gauss(here, width), low), high)
        mutant = _fitted(axis, math.exp(target) if axis.log else target)
        width *= 1.5
    return mutant


def _perturbed(axis: Axis, value: Any, rng: random.Random) -> Any:
    """Return a fifth more or less than a value, in a list the next one; now and then any value."""
    up, anew = rng.random() < 1 / 2, rng.random() < _RESAMPLED
    if isinstance(axis, CategoricalDistribution):
        index = axis.choices.index(value) + (1 if up else -1)
        return rng.choice(axis.choices) if anew else axis.choices[index % len(axis.choices)]
    if anew:
        number = rng.uniform(_on_scale(axis, axis.low), _on_scale(axis, axis.high))
        return _fitted(axis, math.exp(number) if axis.log else number)
    change = max(abs(value) / 5, axis.step or 0)
    return _fitted(axis, value + change if up else value - change)


def _on_scale(axis: FloatDistribution | IntDistribution, number: float) -> float:
    return math.log(number) if axis.log else number


def _fitted(axis: FloatDistribution | IntDistribution, number: float) -> float:
    """Return the value of a range that is nearest to a number."""
    number = min(max(number, axis.low), axis.high)
    if axis.step is not None:
        number = axis.low + round((number - axis.low) / axis.step) * axis.step
    return int(number) if isinstance(axis, IntDistribution) else float(f"{number:.12g}")
