"""A search's points: chosen by Optuna's samplers or by a population, kept in an Optuna study.

The study `study.journal` is a journal file that `optuna.load_study` and optuna-dashboard open. It
is the only record of the search: a trial appears in it with one line, with all of its values, and
nothing is kept in memory between two calls. So a controller can be killed at any moment.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpml_orchestrator import __version__
from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.spec.problems import combined
from hpml_orchestrator.spec.sweep import Range, Search, Sweep
from hpml_orchestrator.sweeps.plan import Point, SweepPlan, point_of
from hpml_orchestrator.sweeps.population import Axis, Child, Member, evolve, train_on
from hpml_orchestrator.sweeps.rows import Row

__all__ = ["STUDY", "Searcher", "check_search", "open_search"]

STUDY = "study.journal"
"""Name of the study in the directory of a sweep."""

_POPULATED = {"evolution", "pbt"}
_PACKAGES = {"cmaes": ("cmaes",), "gp": ("torch", "scipy")}  # beyond Optuna's own, by sampler


class _KernelLock(JournalFileOpenLock):
    """A lock on the journal that goes with its holder; Optuna's own ones stay after a kill.

    There is one controller at a time, but one that was held up may wake beside the next.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        """Wait for the lock; a file system without locks has to do without."""
        self._stream = self._path.open("ab")
        with suppress(OSError):
            fcntl.flock(self._stream, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Give it back."""
        self._stream.close()


def check_search(sweep: Sweep) -> None:
    """Check what a search needs before anything is submitted.

    Raises:
        InputError: settings contradict each other, or a package is missing; all are named.
    """
    search, pbt, evolution = sweep.search, sweep.mode == "pbt", sweep.mode == "evolution"
    sampler = search.sampler if sweep.mode == "bayes" else ""
    trials, size = search.trials, search.population
    populated = pbt or evolution or sampler == "nsga2"
    lists = [name for name, axis in sweep.axes.items() if not isinstance(axis, Range)]
    missing = [name for name in _PACKAGES.get(sampler, ()) if find_spec(name) is None]
    no_ranges, packages = " and ".join(lists), " ".join(missing)
    checks: list[tuple[object, str, str]] = [
        (sampler == "cmaes" and lists, "search.sampler", f"needs a range for {no_ranges}"),
        (missing, "search.sampler", f"needs another package: pip install {packages}"),
        (populated and size > trials, "search.population", f"must be at most the {trials} trials"),
        (
            evolution and search.tournament > size,
            "search.tournament",
            f"must be at most the population, {size}",
        ),
        (pbt and trials % size, "search.trials", f"must be a multiple of the population, {size}"),
        (
            pbt and ".." in Path(search.checkpoint).parts,
            "search.checkpoint",
            "must be a file in the run's directory, such as checkpoint.pt",
        ),
        (pbt and sweep.count > 1, "repeats", "must be 1 in mode pbt"),
        (
            search.pruner != "none" and (pbt or sweep.count > 1),
            "search.pruner",
            "must be none with repeats, and in mode pbt, which replaces bad runs itself",
        ),
        (sweep.exclude, "exclude", "must be empty in a search: leave the values out of the axes"),
    ]
    problems = [
        InputError(message, field=field, value=attrgetter(field)(sweep))
        for wrong, field, message in checks
        if wrong
    ]
    whole = "must be a whole number, as low and high are"
    problems += [
        InputError(whole, field=f"axes.{name}.step", value=axis.step)
        for name, axis in sweep.axes.items()
        if isinstance(axis, Range) and axis.whole and isinstance(axis.step, float)
    ]
    if problems:
        raise combined(problems, "`hpml schema sweep` describes every field")


def open_search(directory: Path, plan: SweepPlan) -> Searcher:
    """Open or create the study of a sweep; only its controller may, one process at a time.

    Args:
        directory: `<records>/sweeps/<id>`.
        plan: of the sweep.

    Raises:
        InputError: the study belongs to another sweep.
        RecordError: the study cannot be read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # its log lines are no output of hpml's
    path = directory / STUDY
    lock = _KernelLock(path)
    try:
        _drop_half_line(path, lock)
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"the study {path} cannot be read: {type(error).__name__}: {error}",
            hint="put it back from a copy; without it the search cannot go on",
        ) from error
    for study in storage.get_all_studies():
        if study.study_name != plan.id:
            raise InputError(
                f"is the study of another sweep, {study.study_name}, not of {plan.id}",
                field=str(path),
                hint="move it away; a sweep makes its study itself",
            )
    return Searcher(directory, plan, storage)


def _drop_half_line(path: Path, lock: _KernelLock) -> None:
    """Cut off what a killed writer left of its last line: Optuna would write on behind it."""
    lock.acquire()
    try:
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    finally:
        lock.release()


class Searcher:
    """The study of a search, and what to try next.

    A trial of the study is one set of values; its `repeats` points have the numbers
    `trial * repeats + repeat`.
    """

    def __init__(self, directory: Path, plan: SweepPlan, storage: JournalStorage) -> None:
        self._runs = directory.parent.parent / "runs"
        self._plan, self._sweep, self._storage = plan, plan.spec, storage
        self._axes = {name: _distribution(axis) for name, axis in self._sweep.axes.items()}
        self._study = optuna.create_study(
            storage=storage,
            study_name=plan.id,
            direction=self._sweep.search.direction,
            pruner=_pruner(self._sweep.search),
            load_if_exists=True,
        )
        self._study_id = storage.get_study_id_from_name(plan.id)
        for name, value in {"sweep": plan.id, "hpml": __version__}.items():
            if name not in self._study.user_attrs:
                self._study.set_user_attr(name, value)

    def propose(self, rows: Sequence[Row], free: int) -> list[Point]:
        """Tell the study which trials ended, and return the next points.

        Points of unfinished trials that no row has are returned again, with the same values: a
        controller may have been killed before it recorded them.

        Args:
            rows: every start of every point; a retry has its row already.
            free: number of points that may be started now.

        Returns:
            At most `free` points; none when all trials are made, or while a generation of
            population-based training has to end first.

        Raises:
            InputError: the runs of a generation left no checkpoint.
            RecordError: the study lacks trials that the rows have.
        """
        known = {row.point for row in rows}
        trials = self._trials()
        if known and max(known) >= len(trials) * self._sweep.count:
            raise RecordError(
                f"the study of {self._plan.id} has {len(trials)} trials, "
                f"and point {max(known)} is of a later one",
                hint=f"put {STUDY} back from a copy; without it the search cannot go on",
            )
        self._tell(rows)
        copy: Study | None = None
        while True:
            points = [
                point
                for trial in self._running()
                for point in self._points(trial)
                if point.number not in known
            ]
            if len(points) >= free or not self._may_ask():
                return points[: max(free, 0)]
            copy = copy or self._copy()
            self._ask(copy)

    def to_stop(
        self, rows: Sequence[Row], evaluations: Mapping[int, Sequence[tuple[int, float]]]
    ) -> set[int]:
        """Report evaluations to the study, and return the numbers of the points to stop early.

        Args:
            rows: every start of every point.
            evaluations: by the point's number, every (step, value) that it reported so far. Of
                several repeats the study keeps those of the first.

        Returns:
            Numbers of points that run; those that were returned before are among them.
        """
        active = {row.point for row in _last(rows) if not row.over}
        doomed = set()
        for trial in self._running():
            number, trial_id = trial.number * self._sweep.count, self._id_of(trial)
            known = trial.intermediate_values
            new = {step: value for step, value in evaluations.get(number, ()) if step not in known}
            for step, value in new.items():
                self._storage.set_trial_intermediate_value(trial_id, step, value)
            if number not in active:
                continue
            if "stopped_at" in trial.user_attrs:
                doomed.add(number)
            elif new and self._study.pruner.prune(self._study, self._storage.get_trial(trial_id)):
                # Kept, as the pruner's answer may change with what the other trials reach.
                self._storage.set_trial_user_attr(trial_id, "stopped_at", max(new))
                doomed.add(number)
        return doomed

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _id_of(self, trial: FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _points(self, trial: FrozenTrial) -> list[Point]:
        count = self._sweep.count
        seeds = self._sweep.seeds.values or range(1, count + 1)
        return [
            point_of(
                self._plan,
                trial.number * count + repeat,
                trial.params,
                repeat=repeat,
                seed=seeds[repeat],
                checkpoint=trial.user_attrs.get("checkpoint", ""),
                sweep=self._sweep,
            )
            for repeat in range(count)
        ]

    def _tell(self, rows: Sequence[Row]) -> None:
        """Finish the trials whose points are all over; what stands in the study stays."""
        count = self._sweep.count
        starts = defaultdict(list)
        for row in rows:
            starts[row.point // count].append(row)
        for trial in self._running():
            last = _last(starts[trial.number])
            if len(last) < count or not all(row.over for row in last):
                continue
            values = [
                row.metric
                for row in last
                if row.state == "COMPLETED" and row.metric is not None and math.isfinite(row.metric)
            ]
            states = [row.state for row in last]
            attributes = {
                "run": ", ".join(row.run for row in last),
                "state": next((state for state in states if state != "COMPLETED"), "COMPLETED"),
                "gpu_hours": sum(row.gpu_hours for row in starts[trial.number]),
            }
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(self._id_of(trial), name, value)
            if values:
                self._study.tell(trial.number, statistics.median(values))
            elif "PRUNED" in states:  # its value is the last that was reported
                self._study.tell(trial.number, state=TrialState.PRUNED)
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)

    def _may_ask(self) -> bool:
        """Whether there is another trial to make now."""
        search, made = self._sweep.search, len(self._trials())
        if self._sweep.mode == "pbt" and made % search.population == 0 and self._running():
            return False
        return made < search.trials

    def _copy(self) -> Study:
        """Return a copy of the study in memory.

        Optuna writes a trial in many steps, and a kill would leave half of one. So a trial is made
        in the copy, and the journal gets it whole.
        """
        copy = optuna.create_study(direction=self._sweep.search.direction)
        copy.add_trials(self._trials())
        return copy

    def _ask(self, copy: Study) -> None:
        """Make the next trial in the study and in its copy."""
        number = len(copy.get_trials(deepcopy=False))
        rng = random.Random(f"{self._sweep.search.seed}:{number}")
        child = self._child(rng)
        if child:
            copy.enqueue_trial(dict(child.values))
        copy.sampler = _sampler(self._sweep, rng.getrandbits(32))
        trial = copy.ask(dict(self._axes))
        trial.set_user_attr("point", number * self._sweep.count)
        if self._sweep.mode in _POPULATED:
            own = {"parent": None, "mate": None, "generation": 0, "checkpoint": ""}
            for name, default in own.items():
                trial.set_user_attr(name, getattr(child, name, default))
        self._study.add_trial(copy.get_trials(deepcopy=False)[number])

    def _child(self, rng: random.Random) -> Child | None:
        """Return the child of earlier trials, None where values are for a sampler to draw."""
        search = self._sweep.search
        if self._sweep.mode not in _POPULATED:
            return None
        sign = 1 if search.direction == "maximize" else -1
        members = [
            Member(
                trial.number,
                trial.params,
                sign * trial.values[0] if trial.state is TrialState.COMPLETE else None,
                trial.user_attrs["generation"],
                str(self._runs / trial.user_attrs.get("run", "") / search.checkpoint),
            )
            for trial in self._trials()
        ]
        if self._sweep.mode == "pbt":
            return train_on(members, self._axes, population=search.population, rng=rng)
        return evolve(
            members,
            self._axes,
            population=search.population,
            tournament=search.tournament,
            rng=rng,
        )


def _last(rows: Iterable[Row]) -> list[Row]:
    """Return the row of each point's last start."""
    last = {row.point: row for row in sorted(rows, key=lambda row: row.start)}
    return list(last.values())


def _distribution(axis: Sequence[Any] | Range) -> Axis:
    if not isinstance(axis, Range):
        return CategoricalDistribution(axis)
    low, high = Decimal(str(axis.low)), Decimal(str(axis.high))
    if axis.step is not None:  # Optuna warns of steps that miss the end
        step = Decimal(str(axis.step))
        high = low + (high - low) // step * step
    if axis.whole:
        return IntDistribution(int(low), int(high), log=axis.log, step=int(axis.step or 1))
    return FloatDistribution(float(low), float(high), log=axis.log, step=axis.step)


def _sampler(sweep: Sweep, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial; its seed is that trial's own, so a resumed search agrees.

    Those of Optuna that can take running trials into account do.
    """
    search, samplers = sweep.search, optuna.samplers
    if sweep.mode != "bayes":
        return samplers.RandomSampler(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # before Optuna 5, of two of these
        match search.sampler:
            case "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=True)
            case "gp":
                return samplers.GPSampler(seed=seed)
            case "cmaes":
                return samplers.CmaEsSampler(seed=seed)
            case "nsga2":
                return samplers.NSGAIISampler(seed=seed, population_size=search.population)


def _pruner(search: Search) -> optuna.pruners.BasePruner:
    match search.pruner:
        case "none":
            return optuna.pruners.NopPruner()
        case "median":
            return optuna.pruners.MedianPruner()
        case "halving":
            return optuna.pruners.SuccessiveHalvingPruner()
