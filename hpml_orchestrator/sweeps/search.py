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
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import GPSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.spec.problems import combined
from hpml_orchestrator.spec.sweep import Range, Sweep
from hpml_orchestrator.sweeps.plan import Point, SweepPlan, point_of
from hpml_orchestrator.sweeps.population import Axis, evolve, train_on
from hpml_orchestrator.sweeps.rows import PointRow

STUDY = "study.journal"
"""Name of the study in the directory of a sweep."""

_PRUNERS = {"none": NopPruner, "median": MedianPruner, "halving": SuccessiveHalvingPruner}
_RESTORE = "restore it from a copy; the search cannot continue without it"


def check_search(sweep: Sweep) -> None:
    """Check what a search needs before anything is submitted.

    Raises:
        InputError: settings contradict each other, or a package is missing; all are named.
    """
    search, trials, pbt = sweep.search, sweep.search.trials, sweep.mode == "pbt"
    needs_torch = sweep.mode == "bayes" and search.sampler == "gp" and not find_spec("torch")
    too_large = sweep.mode in ("evolution", "pbt") and search.population > trials
    pruned = search.pruner != "none" and (pbt or sweep.count > 1)
    checks: list[tuple[object, str, str]] = [
        (needs_torch, "search.sampler", "needs `pip install torch`"),
        (too_large, "search.population", f"must be at most the {trials} trials"),
        (pbt and sweep.count > 1, "repeats", "must be 1 in mode pbt"),
        (pruned, "search.pruner", "must be none with repeats and in mode pbt"),
        (sweep.exclude, "exclude", "must be empty in a search: leave the values out of the axes"),
    ]
    problems = [
        InputError(message, field=field, value=attrgetter(field)(sweep))
        for wrong, field, message in checks
        if wrong
    ]
    if problems:
        raise combined(problems, "`hpml schema sweep` describes every field")


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
        self._axes = {name: _distribution(axis) for name, axis in self._sweep.axes.items()}
        self._study = optuna.create_study(
            storage=storage,
            study_name=plan.id,
            direction=self._sweep.search.direction,
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
            InputError: the runs of a generation left no checkpoint, or no run reports the metric.
            RecordError: the study lacks trials that the rows have.
        """
        completed = [row for row in rows if row.state == "COMPLETED"]
        if completed and all(row.metric is None for row in completed):
            figures = ", ".join(sorted(completed[0].result)) or "nothing"
            raise InputError(
                "is not a figure of the results",
                field="search.metric",
                value=self._sweep.search.metric,
                hint=f"the first run reported {figures}; start the sweep again with one of them",
            )
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
            values = [
                row.metric
                for row in last
                if row.state == "COMPLETED" and row.metric is not None and math.isfinite(row.metric)
            ]
            if values:
                self._study.tell(trial.number, statistics.median(values))
            else:  # the value of a pruned one is the last that was reported
                state = TrialState.PRUNED if "PRUNED" in states else TrialState.FAIL
                self._study.tell(trial.number, state=state)

    def _may_ask(self) -> bool:
        search, made = self._sweep.search, len(self._trials())
        # Truncation selection ranks a whole generation, so the next one waits until its last
        # member has ended.
        between = self._sweep.mode == "pbt" and made % search.population == 0
        return made < search.trials and not (between and self._running())

    def _ask(self) -> FrozenTrial:
        """Make the next trial; it has its own seed, so a resumed search makes the same one."""
        trials, search, mode = self._trials(), self._sweep.search, self._sweep.mode
        rng = random.Random(f"{search.seed}:{len(trials)}")
        trial = None
        if mode == "evolution":
            trial = evolve(trials, self._axes, search, rng)
        elif mode == "pbt":
            trial = train_on(trials, self._axes, search, rng, runs=self._runs)
        if trial is None:
            # Optuna writes a trial in many steps, and a kill would leave half of one. So it is
            # made in a copy of the study in memory, and the journal gets it whole.
            sampler = _sampler(self._sweep, rng.getrandbits(32))
            copy = optuna.create_study(direction=search.direction, sampler=sampler)
            if mode == "bayes":
                copy.add_trials(trials)
            copy.ask(dict(self._axes))
            trial = copy.get_trials(deepcopy=False)[-1]
        self._study.add_trial(trial)
        return self._trials()[-1]


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
    """Return the sampler for one trial; TPE takes running trials into account."""
    if sweep.mode != "bayes":
        return RandomSampler(seed)
    if sweep.search.sampler == "gp":
        return GPSampler(seed=seed)
    return TPESampler(seed=seed, constant_liar=True)
