"""A search's points: chosen by Optuna's samplers or by a population, kept in an Optuna study.

The study `study.journal` is a journal file that `optuna.load_study` and optuna-dashboard open. It
is the only record of the search: a trial appears in it with one line, with all of its values, and
nothing is kept in memory between two calls. So a controller can be killed at any moment.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import CmaEsSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.stats import qmc

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.jobfile.rules import combined
from hpml_orchestrator.jobfile.sweep import MetricPattern, Range, Sweep
from hpml_orchestrator.sweeps.plan import Point, SweepPlan, point_of
from hpml_orchestrator.sweeps.population import Axis, evolve, train_on, value_at
from hpml_orchestrator.sweeps.rows import PointRow, is_time_to_target, objective
from hpml_orchestrator.sweeps.selection import seconds_to_target

STUDY = "study.journal"
"""Name of the study in the directory of a sweep."""

_PRUNERS = {"none": NopPruner, "median": MedianPruner, "halving": SuccessiveHalvingPruner}
_RESTORE = "restore it from a copy; the search cannot continue without it"
_MISSED = "missed_target"  # attribute of trials whose runs did not reach the target
_DRAWS = 100  # after so many draws of values that were tried before, they are tried again
_MANY_TRIALS = 100  # from which evolution is better than random search


def check_search(sweep: Sweep) -> None:
    """Check what a search needs before anything is submitted.

    Raises:
        InputError: settings contradict each other, or a package is missing; all are named.
    """
    search, trials, pbt = sweep.search, sweep.search.trials, sweep.mode == "pbt"
    gp = sweep.mode == "bayes" and search.sampler == "gp"
    too_large = sweep.mode in ("evolution", "pbt") and 2 * search.population > trials
    fed = (
        f"must be at most {trials // 2}, half of the {trials} trials, as a population needs two "
        f"generations; or raise search.trials to {2 * search.population}"
    )
    several, cmaes = search.objectives, sweep.mode == "bayes" and search.sampler == "cmaes"
    ranges = sum(isinstance(axis, Range) for axis in sweep.axes.values())
    backwards = search.maximize and is_time_to_target(search.metric_name)
    pruned = search.pruner != "none" and (pbt or sweep.count > 1)
    checks: list[tuple[object, str, str]] = [
        (gp and not find_spec("torch"), "search.sampler", "needs `pip install torch`"),
        (cmaes and not find_spec("cmaes"), "search.sampler", "needs `pip install cmaes`"),
        (
            cmaes and ranges < max(2, len(sweep.axes)),  # Optuna would draw the others at random
            "search.sampler",
            "needs two or more axes, all of them ranges; use tpe for lists of values",
        ),
        (several and (cmaes or gp), "search.sampler", "is for one figure; use tpe for several"),
        (gp and sweep.conditions, "search.sampler", "draws axes with `when` at random; use tpe"),
        (sweep.mode == "pbt" and sweep.conditions, "axes", "must have no `when` in mode pbt"),
        (too_large, "search.population", fed),
        (
            several and any(map(is_time_to_target, several)),
            "search.metric",
            "a time to a target is none of several figures: a run that misses it has none",
        ),
        (
            several and search.pruner != "none",
            "search.pruner",
            "must be none with several figures",
        ),
        (
            not several and backwards,
            "search.direction",
            f"must be minimize, since {search.metric} is a time",
        ),
        (pbt and sweep.count > 1, "repeats", "must be 1 in mode pbt"),
        (pruned, "search.pruner", "must be none with repeats and in mode pbt"),
        (
            search.pruner != "none" and isinstance(search.metric, MetricPattern),
            "search.pruner",
            "must be none with a pattern as search.metric: it is read when a run has ended",
        ),
        (sweep.exclude, "exclude", "must be empty in a search: leave the values out of the axes"),
    ]
    problems = [
        InputError(message, field=field, value=attrgetter(field)(sweep))
        for wrong, field, message in checks
        if wrong
    ]
    if problems:
        raise combined(problems, "`hpml schema sweep` describes every field")


def sampler_text(sweep: Sweep) -> str:
    """Return how a search chooses its trials, and how many of them no result guides."""
    mode, trials = sweep.mode, sweep.search.trials
    if mode == "random":
        return f"random: all {trials} trials"
    kind = {
        "gp": "GP (Gaussian process)",
        "cmaes": "CMA-ES, from the middle of the ranges",
        "evolution": "evolution",
        "pbt": "population-based training",
    }.get(sweep.search.sampler if mode == "bayes" else mode, "TPE")
    how = "spread evenly (Sobol)" if mode == "bayes" else "random"
    text = f"{kind}; the first {_first_trials(sweep)} of {trials} trials are {how}"
    if mode == "evolution" and trials < _MANY_TRIALS:
        text += f"; better than mode random only from about {_MANY_TRIALS} trials"
    return text


def _first_trials(sweep: Sweep) -> int:
    search = sweep.search
    if sweep.mode != "bayes":
        return search.population
    # Powers of two keep Sobol's points balanced. Trials that start at the same time cannot learn
    # from each other.
    at_once = -(-(sweep.parallel or 1) // sweep.count)
    if search.sampler == "cmaes":  # it learns from its own trials only
        return min(search.trials, at_once)
    return min(search.trials, max(8 if search.trials >= 20 else 4, at_once))  # noqa: PLR2004


def open_search(directory: Path, plan: SweepPlan) -> Searcher:
    """Open or create the study of a sweep; only its controller may, one process at a time.

    Raises:
        InputError: the study belongs to another sweep.
        RecordError: the study cannot be read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # its messages are not hpml's output
    warnings.simplefilter("ignore", ExperimentalWarning)  # of samplers, before Optuna 5
    path = directory / STUDY
    try:
        # A controller that was killed may have left a lock, and half a line at the end.
        Path(f"{path}.lock").unlink(missing_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        # Optuna's default symlink lock stays after a kill, and the next process waits forever
        # (optuna #5921).
        lock = JournalFileOpenLock(str(path))
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecordError(f"the study {path} cannot be read: {reason}", hint=_RESTORE) from error
    for name in optuna.get_all_study_names(storage):
        if name != plan.id:
            raise InputError(
                f"is the study of another sweep, {name}, not of {plan.id}",
                field=str(path),
                hint="move it away; a sweep makes its study itself",
            )
    return Searcher(directory, plan, storage)


class Searcher:
    """The study of a search, and what to try next.

    A trial of the study is one set of values; its `repeats` points have the numbers
    `trial * repeats + repeat`.
    """

    def __init__(self, directory: Path, plan: SweepPlan, storage: JournalStorage) -> None:
        self._runs = directory.parent.parent / "runs"
        self._plan, self._sweep, self._storage = plan, plan.spec, storage
        self._axes = {name: _distribution(axis) for name, axis in self._sweep.domains.items()}
        self._study = optuna.create_study(
            storage=storage,
            study_name=plan.id,
            directions=self._sweep.search.directions,
            pruner=_PRUNERS[self._sweep.search.pruner](),
            load_if_exists=True,
        )
        self._study_id = storage.get_study_id_from_name(plan.id)

    def propose(self, rows: Sequence[PointRow], free: int) -> list[Point]:
        """Report the ended trials to the study, and return the next points.

        Points of unfinished trials that no row has are returned again, with the same values: a
        controller may have been killed before it recorded them.

        Args:
            rows: every start of every point, in order; a retry has its row already.
            free: number of points that may be started now.

        Returns:
            At most `free` points; none when all trials are made, or while a generation of
            population-based training must end first.

        Raises:
            InputError: the runs of a generation left no checkpoint.
            RecordError: the study lacks trials that the rows have.
        """
        known = {row.point for row in rows}
        made = len(self._trials())
        # A journal that is older than the rows, restored from a copy for example, would give the
        # same numbers to other values.
        if known and max(known) >= made * self._sweep.count:
            raise RecordError(
                f"the study of {self._plan.id} has {made} trials, "
                f"and point {max(known)} is of a later one",
                hint=_RESTORE,
            )
        self._tell(rows)
        points = [point for trial in self._running() for point in self._points(trial)]
        points = [point for point in points if point.number not in known]
        while len(points) < free and self._may_ask():
            points += self._points(self._ask())
        return points[:free]

    def to_stop(
        self, rows: Sequence[PointRow], evaluations: Mapping[int, Sequence[tuple[int, float]]]
    ) -> set[int]:
        """Report evaluations to the study, and return the numbers of the points to stop early.

        Args:
            rows: every start of every point, in order.
            evaluations: by the point's number, every (step, value) that it reported so far. Of
                several repeats the study keeps those of the first.

        Returns:
            Numbers of running points, including those returned before.
        """
        over = {row.point: row.over for row in rows}
        doomed = set()
        for trial in self._running():
            number, trial_id = trial.number * self._sweep.count, self._id_of(trial)
            known = trial.intermediate_values
            new = {step: value for step, value in evaluations.get(number, ()) if step not in known}
            for step, value in new.items():
                self._storage.set_trial_intermediate_value(trial_id, step, value)
            if over.get(number, True):
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
        count, checkpoint = self._sweep.count, trial.user_attrs.get("checkpoint", "")
        return [
            point_of(
                self._plan, trial.number * count + n, trial.params, repeat=n, checkpoint=checkpoint
            )
            for n in range(count)
        ]

    def _tell(self, rows: Sequence[PointRow]) -> None:
        """Finish the trials whose points are all over: the last start of each decides."""
        count = self._sweep.count
        starts = defaultdict(list)
        for row in rows:
            starts[row.point // count].append(row)
        for trial in self._running():
            last = {row.point: row for row in starts[trial.number]}.values()
            if len(last) < count or not all(row.over for row in last):
                continue
            states = [row.state for row in last]
            attributes = {
                "run": ", ".join(row.run for row in last),
                "state": next((state for state in states if state != "COMPLETED"), "COMPLETED"),
                "gpu_hours": sum(row.gpu_hours for row in starts[trial.number]),
            }
            # Optuna refuses to change a finished trial, so the attributes come before `tell`.
            # After a kill in between they are simply written again.
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(self._id_of(trial), name, value)
            names = self._sweep.search.objectives
            figures = [_median(last, partial(objective, name=name)) for name in names]
            figures = figures or [self._figure(trial, last)]
            known = [figure for figure in figures if figure is not None]
            if len(known) == len(figures):
                self._study.tell(trial.number, known)
            else:  # the value of a pruned one is the last that was reported
                state = TrialState.PRUNED if "PRUNED" in states else TrialState.FAIL
                self._study.tell(trial.number, state=state)

    def _figure(self, trial: FrozenTrial, rows: Collection[PointRow]) -> float | None:
        """Return the figure of a trial, the median of its runs; None if it has none.

        A trial that missed its target counts as twice as slow as the slowest that reached it, and
        at least as the time that it trained.
        """
        if is_time_to_target(self._sweep.search.metric_name):
            time, _ = seconds_to_target(rows, self._sweep.search.metric_name)
            if time is None or math.isfinite(time.value):
                return time.value if time else None
            self._storage.set_trial_user_attr(self._id_of(trial), _MISSED, value=True)
            trained = statistics.median(row.training_seconds or 0.0 for row in rows)
            return max(trained, 2 * _slowest(self._trials()))
        return _median(rows, attrgetter("metric"))

    def _may_ask(self) -> bool:
        search, made = self._sweep.search, len(self._trials())
        # Truncation selection ranks a whole generation, so the next one waits until its last
        # member has ended.
        between = self._sweep.mode == "pbt" and made % search.population == 0
        return made < search.trials and not (between and self._running())

    def _ask(self) -> FrozenTrial:
        """Make the next trial; it has its own seed, so a resumed search makes the same one."""
        trials = _censored(self._trials())
        rng = random.Random(f"{self._sweep.search.seed}:{len(trials)}")
        tried = [trial.params for trial in trials] if self._sweep.mode == "evolution" else []
        for _ in range(_DRAWS):
            trial = self._draw(trials, rng)
            values = self._sweep.applying(trial.params)
            trial.distributions = {name: trial.distributions[name] for name in values}
            trial.params = values
            if trial.params not in tried:
                break
        self._study.add_trial(trial)
        return self._trials()[-1]

    def _draw(self, trials: Sequence[FrozenTrial], rng: random.Random) -> FrozenTrial:
        search, mode, trial = self._sweep.search, self._sweep.mode, None
        if mode == "evolution":
            trial = evolve(trials, self._axes, self._sweep, rng)
        elif mode == "pbt":
            trial = train_on(trials, self._axes, search, rng, runs=self._runs)
        elif mode == "bayes":
            ended = any(trial.state is TrialState.COMPLETE for trial in trials)
            if not ended or len(trials) < _first_trials(self._sweep):
                trial = _evenly(self._axes, search.seed, len(trials))
        if trial is not None:
            return trial
        # Optuna writes a trial in many steps, and a kill would leave half of one. So it is made in
        # a copy of the study in memory, and the journal gets it whole.
        sampler = _sampler(self._sweep, rng.getrandbits(32))
        study = optuna.create_study(directions=search.directions, sampler=sampler)
        if mode == "bayes":
            study.add_trials(trials)
        study.ask(dict(self._axes))
        return study.get_trials(deepcopy=False)[-1]


def _median(rows: Collection[PointRow], figure: Callable[[PointRow], float | None]) -> float | None:
    values = [figure(row) for row in rows if row.state == "COMPLETED"]
    known = [value for value in values if value is not None and math.isfinite(value)]
    # Without the runs that diverged, the median would be that of the lucky ones.
    return statistics.median(known) if known and len(known) == len(values) else None


def _slowest(trials: Sequence[FrozenTrial]) -> float:
    """Return the longest time of a trial that reached its target; 0 if none did."""
    ended = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return max((one.values[0] for one in ended if _MISSED not in one.user_attrs), default=0.0)


def _censored(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials as samplers see them: none that missed its target beats one that did not.

    The study keeps the values that were known when the trials ended.
    """
    least, seen = 2 * _slowest(trials), [*trials]
    for trial in trials:
        if _MISSED in trial.user_attrs and trial.values:
            seen[trial.number] = copy(trial)
            seen[trial.number].values = [max(trial.values[0], least)]
    return seen


def _distribution(axis: Sequence[bool | int | float | str] | Range) -> Axis:
    if not isinstance(axis, Range):
        return CategoricalDistribution(axis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that miss the end: the range ends before it
        if axis.whole and not isinstance(axis.step, float):
            low, high = int(axis.low), int(axis.high)
            return IntDistribution(low, high, log=axis.log, step=axis.step or 1)
        return FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)


def _sampler(sweep: Sweep, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial after the first ones; both consider running trials."""
    if sweep.mode != "bayes":
        return RandomSampler(seed)
    if sweep.search.sampler == "gp":
        return GPSampler(seed=seed, n_startup_trials=1)
    if sweep.search.sampler == "cmaes":
        return CmaEsSampler(seed=seed, n_startup_trials=1)
    return TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)


def _evenly(axes: Mapping[str, Axis], seed: int, number: int) -> FrozenTrial:
    """Return a running trial whose values are a point of Sobol's sequence."""
    points = qmc.Sobol(len(axes), seed=seed)
    if number:
        points.fast_forward(number)
    pairs = zip(axes.items(), points.random()[0].tolist(), strict=True)
    values = {name: value_at(axis, share) for (name, axis), share in pairs}
    return create_trial(state=TrialState.RUNNING, params=values, distributions=dict(axes))
