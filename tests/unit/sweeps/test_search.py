"""Searches: what they propose and stop, and that a kill neither loses nor repeats a trial."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hpml_orchestrator.cli.sweep import print_summary
from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.jobfile.sweep import SEARCHES, Sweep
from hpml_orchestrator.sweeps.plan import Point, directory_of
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.search import STUDY, Searcher, check_search, open_search
from tests.unit.sweeps.conftest import SweepFolder

AXES = {"--lr": {"low": 1e-4, "high": 1.0, "log": True}, "--momentum": {"low": 0.0, "high": 0.99}}
MIXED = {
    "--lr": {"low": 0.001, "high": 0.1, "log": True},
    "--momentum": {"low": 0.0, "high": 0.9, "step": 0.25},
    "--epochs": {"low": 1, "high": 8, "step": 3},
    "--width": {"low": 4, "high": 64, "log": True},
    "--dropout": {"low": 0, "high": 1, "step": 0.5},
    "--nesterov": [True, False],
    "--augment": ["none", "flip", 3, 0.5],
    "--depth": [2],
}

NETS = {
    "--model": ["cnn", "vit"],
    "--heads": {"low": 1, "high": 8, "when": {"--model": "vit"}},
    "--depth": {"values": [1, 2], "when": {"--heads-kind": "deep"}},
    "--heads-kind": {"values": ["flat", "deep"], "when": {"--model": "vit"}},
}
FIGURES: dict[str, Any] = {
    "metric": ["validation_accuracy", "total_seconds"],
    "direction": ["maximize", "minimize"],
}


@pytest.fixture
def folder() -> Iterator[SweepFolder]:
    """A folder in memory if possible: a study makes many small writes."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield SweepFolder(Path(directory))


def fields_of(mode: str, **settings: Any) -> dict[str, Any]:
    """Return the fields of a sweep file; settings are of `search`, but for the sweep's own."""
    own = {name: settings.pop(name) for name in list(settings) if name in Sweep.model_fields}
    return {"mode": mode, "axes": AXES, "search": settings, **own}


def hill(point: Point) -> float:
    """Return an accuracy whose top, 1, is at a learning rate of 0.02 and a momentum of 0.8."""
    rate, momentum = point.values["--lr"], point.values["--momentum"]
    return 1 - (math.log10(rate / 0.02) / 4) ** 2 - (float(momentum) - 0.8) ** 2


class Trials:
    """The trials of a search, whose runs are calls of a function.

    `train` returns the accuracy of a point, or the state in which its run ends. `parallel` points
    run at the same time; each tick the oldest of them ends.
    """

    def __init__(
        self,
        folder: SweepFolder,
        mode: str = "bayes",
        train: Callable[[Point], float | str] = hill,
        parallel: int = 1,
        **settings: Any,
    ) -> None:
        self.plan = folder.local_plan(**fields_of(mode, **settings))
        self.train, self.parallel, self.runs = train, parallel, folder.store.runs_dir
        self.directory = directory_of(folder.store, self.plan.id)
        self.rows: list[PointRow] = []
        self.points: list[Point] = []
        self.searcher = self.reopened()

    def reopened(self) -> Searcher:
        """Open the search as the next controller does."""
        return open_search(self.directory, self.plan)

    def propose(self, free: int) -> list[Point]:
        """Return new points from the search opened anew, without recording them."""
        return self.reopened().propose(self.rows, free)

    def end(self, number: int, result: float | str | None = None) -> None:
        """End a run with its accuracy, or in a state; by default that of `train`."""
        result = self.train(self.points[number]) if result is None else result
        metric = result if isinstance(result, float) else None
        state = "COMPLETED" if isinstance(result, float) else result
        row = self.rows[number]
        self.rows[number] = replace(row, state=state, metric=metric, over=True, gpu_hours=0.5)

    def tick(self) -> bool:
        """End the oldest run and start new ones; whether anything happened."""
        running = [row.point for row in self.rows if not row.over]
        if len(running) == self.parallel or (running and not self.searcher.propose(self.rows, 1)):
            self.end(running[0])
        free = self.parallel - sum(not row.over for row in self.rows)
        new = self.searcher.propose(self.rows, free)
        self.points += new
        self.rows += [PointRow(point.number, run=f"run-{point.number}") for point in new]
        return bool(running or new)

    def search(self, ticks: int = 10_000) -> optuna.Study:
        """Make so many ticks, or all, and return the study as a user opens it."""
        for _ in range(ticks):
            if not self.tick():
                break
        return self.study()

    def study(self) -> optuna.Study:
        """Open the study as a user does."""
        storage = JournalStorage(JournalFileBackend(str(self.directory / STUDY)))
        return optuna.load_study(study_name=self.plan.id, storage=storage)


def leave_checkpoint(trials: Trials, point: Point) -> int:
    """Go on from the parent's checkpoint: write and return how many trainings it holds."""
    parent = point.variables.get("checkpoint")
    done = 1 + (int(Path(parent).read_text()) if parent else 0)
    path = trials.runs / f"run-{point.number}" / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(done))
    return done


@pytest.mark.parametrize("name", ["tpe", "gp", "cmaes", "random", "evolution", "pbt"])
def test_no_trial_is_lost_or_made_twice(name: str, folder: SweepFolder) -> None:
    """Dropped twice, with a proposal that nobody recorded: it ends as one that was not dropped."""

    def train(point: Point) -> float:
        leave_checkpoint(dropped, point)
        return hill(point)

    mode, sampler = (name, "tpe") if name in SEARCHES else ("bayes", name)
    settings: dict[str, Any] = {"trials": 12, "population": 4, "sampler": sampler}
    dropped = Trials(folder, mode, train, parallel=3, **settings)
    for ticks in (4, 3):
        dropped.search(ticks)
        dropped.end(next(row.point for row in dropped.rows if not row.over))
        lost = dropped.propose(1)
        dropped.searcher = dropped.reopened()
        assert dropped.propose(1) == lost
    study = dropped.search()
    whole = Trials(folder, mode, train, parallel=3, **settings).search()
    assert [trial.params for trial in study.trials] == [trial.params for trial in whole.trials]
    assert [row.point for row in dropped.rows] == [*range(12)]
    for trial, row, point in zip(study.trials, dropped.rows, dropped.points, strict=True):
        assert trial.state is TrialState.COMPLETE
        assert (trial.user_attrs["run"], trial.value) == (row.run, row.metric)
        assert trial.params == point.values


def test_a_line_cut_short_is_dropped(folder: SweepFolder) -> None:
    """A controller killed while it writes a trial leaves half a line: the trial is made again."""
    trials = Trials(folder, trials=20)
    trials.search(12)
    trials.end(-1)
    expected = trials.propose(1)
    journal = trials.directory / STUDY
    whole = journal.read_bytes()
    last_line = len(whole.splitlines(keepends=True)[-1])
    for left in (1, last_line // 2, last_line - 1):
        journal.write_bytes(whole[: left - last_line])
        assert trials.propose(1) == expected
        assert len(trials.study().trials) == 13


def test_the_study_is_one_of_optuna(folder: SweepFolder, capfd: pytest.CaptureFixture[str]) -> None:
    """It opens normally, even with a lock that a killed process left, and prints nothing."""
    trials = Trials(folder, trials=3, direction="minimize")
    (trials.directory / f"{STUDY}.lock").symlink_to(STUDY)
    trials.searcher = trials.reopened()
    study = trials.search()
    assert study.direction.name == "MINIMIZE"
    assert study.best_trial.user_attrs == {
        "run": f"run-{study.best_trial.number}",
        "state": "COMPLETED",
        "gpu_hours": 0.5,
    }
    assert not (trials.directory / f"{STUDY}.lock").exists()
    assert capfd.readouterr() == ("", "")


FAIL = (TrialState.FAIL, None)
ENDS: list[tuple[list[dict[str, Any]], tuple[TrialState, float | None]]] = [
    ([{"state": "COMPLETED", "metric": 0.5}], (TrialState.COMPLETE, 0.5)),
    ([{"state": "COMPLETED"}], FAIL),
    ([{"state": "COMPLETED", "metric": math.nan}], FAIL),
    ([{"state": "FAILED", "metric": 0.5}], FAIL),
    ([{"state": "REFUSED"}], FAIL),
    ([{"state": "PRUNED"}], (TrialState.PRUNED, 0.25)),
    ([{"state": "FAILED"}, {"state": "COMPLETED", "metric": 0.5}], (TrialState.COMPLETE, 0.5)),
    ([{"state": "FAILED"}, {"state": "FAILED"}], FAIL),
    ([{"state": "FAILED"}, {"state": "RUNNING", "over": False}], (TrialState.RUNNING, None)),
]


def test_the_last_start_of_a_point_decides(folder: SweepFolder) -> None:
    """The GPU-hours of all starts count; what a pruned run reported last is its value."""
    trials = Trials(folder, "random")
    trials.propose(len(ENDS))
    trials.rows = [
        PointRow(point, start=start, run=f"run-{start}", **{"over": True, "gpu_hours": 1.0, **row})
        for point, (starts, _) in enumerate(ENDS)
        for start, row in enumerate(starts)
    ]
    trials.searcher.to_stop(trials.rows, {5: [(1, 0.125), (2, 0.25)]})
    for _ in range(2):
        assert trials.propose(0) == []
    found = trials.study().trials
    for (starts, end), trial in zip(ENDS, found, strict=True):
        assert (trial.state, trial.value) == end, starts
        if trial.state is not TrialState.RUNNING:
            assert trial.user_attrs["gpu_hours"] == len(starts)
            assert trial.user_attrs["state"] == starts[-1]["state"]
            assert trial.user_attrs["run"] == f"run-{len(starts) - 1}"


def test_repeats_are_points_of_one_trial(folder: SweepFolder) -> None:
    """Each repeat has its seed, slots may be fewer than repeats, and the median is the value."""
    results: Iterator[float | str] = iter([0.5, 0.75, 1.0, "FAILED", 0.25, 0.5])
    repeats: dict[str, Any] = {"repeats": 3, "seeds": {"values": [7, 8, 9]}}
    trials = Trials(folder, "random", lambda _: next(results), parallel=2, trials=2, **repeats)
    study = trials.search()
    assert [trial.value for trial in study.trials] == [0.75, 0.375]
    assert study.trials[1].user_attrs["state"] == "FAILED"
    points = trials.points
    assert [(point.repeat, point.seed) for point in points] == [(0, 7), (1, 8), (2, 9)] * 2
    assert [point.values == points[0].values for point in points] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("mode", ["random", "bayes", "evolution", "pbt"])
def test_values_are_those_of_the_axes(mode: str, folder: SweepFolder) -> None:
    """Ranges keep their limits, steps and kind of number, lists their values."""

    def train(point: Point) -> float:
        return float(leave_checkpoint(trials, point) * point.values["--width"])

    trials = Trials(folder, mode, train, parallel=8, axes=MIXED, trials=23, population=6)
    for values in [trial.params for trial in trials.search().trials]:
        assert 0.001 <= values["--lr"] <= 0.1
        assert values["--momentum"] in (0.0, 0.25, 0.5, 0.75)
        assert values["--epochs"] in (1, 4, 7)
        assert values["--width"] in range(4, 65)
        assert values["--dropout"] in (0.0, 0.5, 1.0)
        assert values["--augment"] in ("none", "flip", 3, 0.5)
        assert values["--depth"] == 2
        kinds = [type(values[name]) for name in ("--epochs", "--width", "--dropout", "--nesterov")]
        assert kinds == [int, int, float, bool]


@pytest.mark.parametrize("mode", ["random", "bayes", "evolution"])
def test_an_axis_is_drawn_only_if_it_applies(mode: str, folder: SweepFolder) -> None:
    """A trial has no value of the others, in the study and in its points."""
    train = lambda point: float(point.values.get("--heads", 2))  # noqa: E731
    trials = Trials(folder, mode, train, axes=NETS, trials=24, population=6, repeats=1)
    made = [trial.params for trial in trials.search().trials]
    assert [point.values for point in trials.points] == made
    for values in made:
        wanted = {"--model"} | (
            {"--heads", "--heads-kind"} if values["--model"] == "vit" else set()
        )
        wanted |= {"--depth"} if values.get("--heads-kind") == "deep" else set()
        assert values.keys() == wanted
    assert len({frozenset(values) for values in made}) == 3


def test_a_trial_of_several_figures_has_all_of_them(folder: SweepFolder) -> None:
    """Or it failed; the study is one of Optuna with both directions, which learns from both."""
    trials = Trials(folder, "bayes", trials=20, repeats=1, **FIGURES)
    trials.propose(4)
    for number, accuracy in enumerate([0.9, 0.8, None, 0.7]):
        told = {} if accuracy is None else {"validation_accuracy": accuracy}
        seconds = 10.0 * (number + 1)
        row = PointRow(number, run="run", state="COMPLETED", over=True, result=told)
        trials.rows.append(replace(row, total_seconds=seconds, metric=accuracy))
    trials.propose(16)
    study = trials.study()
    assert [one.name for one in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [one.values for one in study.trials[:4]] == [[0.9, 10.0], [0.8, 20.0], None, [0.7, 40.0]]
    assert [one.number for one in study.best_trials] == [0]
    assert len(study.trials) == 20


def test_evolution_follows_its_parents(folder: SweepFolder) -> None:
    """A parent is among the best of the youngest; a child differs from its parents in one value."""
    settings: dict[str, Any] = {"population": 6, "tournament": 5, "direction": "minimize"}
    settings |= {"axes": MIXED, "trials": 30}
    trials = Trials(folder, "evolution", lambda p: float(p.values["--lr"]), **settings)
    made = trials.search().trials
    assert all("parents" not in trial.user_attrs for trial in made[:6])
    for trial in made[6:]:
        youngest = made[trial.number - 6 : trial.number]
        second = sorted(member.params["--lr"] for member in youngest)[1]
        parents = [made[number] for number in trial.user_attrs["parents"]]
        assert all(parent in youngest and parent.params["--lr"] <= second for parent in parents)
        changed = [
            all(trial.params[name] != parent.params[name] for parent in parents) for name in MIXED
        ]
        assert changed.count(True) == 1 or (len(parents) == 2 and not any(changed))
        generations = [parent.user_attrs.get("generation", 0) for parent in parents]
        assert trial.user_attrs["generation"] == 1 + max(generations)
    assert {len(trial.user_attrs["parents"]) for trial in made[6:]} == {1, 2}


def test_population_based_training_goes_on_from_checkpoints(folder: SweepFolder) -> None:
    """The best 80 % resume their own checkpoint, the rest one of the best 20 %."""

    def train(point: Point) -> float | str:
        if point.number == 12:  # in the second generation, after which it has to be replaced
            return "FAILED"
        return leave_checkpoint(trials, point) + hill(point) / 2

    trials = Trials(folder, "pbt", train, parallel=7, trials=30, population=10)
    made = trials.search().trials
    generations = [made[first : first + 10] for first in range(0, 30, 10)]
    for before, now in pairwise(generations):
        order = sorted(before, key=lambda trial: -(trial.value or 0))
        best, kept = [trial.number for trial in order[:2]], [trial.number for trial in order[:8]]
        for own, trial in zip(before, now, strict=True):
            (parent,) = (made[number] for number in trial.user_attrs["parents"])
            checkpoint = str(trials.runs / parent.user_attrs["run"] / "checkpoint.pt")
            assert trials.points[trial.number].variables["checkpoint"] == checkpoint
            assert (parent.number == own.number) == (own.number in kept)
            assert (trial.params == parent.params) == (own.number in kept)
            assert own.number in kept or parent.number in best
    assert all(int(trial.value or 0) == 3 for trial in generations[2])


def test_a_generation_waits_for_the_one_before(folder: SweepFolder) -> None:
    """No member is proposed before all of the generation before ended; failures start anew."""
    trials = Trials(folder, "pbt", parallel=9, trials=8, population=4)
    trials.tick()
    assert [row.point for row in trials.rows] == [0, 1, 2, 3]
    for number in range(4):
        assert trials.propose(4) == []
        trials.end(number, "FAILED")
    points = trials.propose(9)
    assert [point.number for point in points] == [4, 5, 6, 7]
    assert all("checkpoint" not in point.variables for point in points)


def test_a_training_without_checkpoint_is_named(folder: SweepFolder) -> None:
    """Population-based training cannot continue if no run left the file that the sweep names."""
    trials = Trials(folder, "pbt", trials=8, population=2)
    with pytest.raises(InputError, match=r"^search.checkpoint: .*runs/run-\d/checkpoint\.pt"):
        trials.search()


@pytest.mark.parametrize("pruner", ["median", "halving"])
def test_a_bad_trial_is_stopped(pruner: str, folder: SweepFolder) -> None:
    """It stays stopped until it ends, and the study has its last value; a good one continues."""
    trials = Trials(folder, parallel=11, pruner=pruner)
    trials.tick()
    told = {number: [(step, 0.5 + number / 100) for step in range(1, 9)] for number in range(9)} | {
        9: [(1, 0.1), (2, 0.2)],
        10: [(1, 0.8), (2, 0.9)],
    }
    for number in range(9):
        trials.reopened().to_stop(trials.rows, {number: told[number]})
        trials.end(number, 0.5 + number / 100)
        trials.propose(0)
    for _ in range(2):
        assert trials.reopened().to_stop(trials.rows, told) == {9}
    trials.end(9, "PRUNED")
    assert trials.reopened().to_stop(trials.rows, told) == set()
    trials.propose(0)
    bad, good = trials.study().trials[9:11]
    assert (bad.state, bad.value) == (TrialState.PRUNED, 0.2)
    assert good.state is TrialState.RUNNING
    assert good.intermediate_values == {1: 0.8, 2: 0.9}


@pytest.mark.parametrize(
    ("mode", "settings", "error"),
    [
        ("bayes", {"sampler": "gp"}, "search.sampler: needs `pip install torch`"),
        (
            "evolution",
            {"trials": 10, "population": 8},
            r"search.population: must be at most 5, half of the 10 trials, .* to 16 \(got 8\)",
        ),
        ("pbt", {"trials": 15}, "search.population: must be at most 7"),
        ("bayes", {"metric": "seconds_to_accuracy"}, "search.direction: must be minimize, since"),
        ("pbt", {"repeats": 2}, "repeats: must be 1 in mode pbt"),
        ("pbt", {"pruner": "median"}, "search.pruner: must be none"),
        ("bayes", {"pruner": "halving", "repeats": 2}, "search.pruner: must be none"),
        ("random", {"exclude": [{"--lr": 0.1}]}, "exclude: .* leave the values out"),
        ("bayes", {"sampler": "cmaes"}, "search.sampler: needs `pip install cmaes`"),
        ("bayes", {"sampler": "cmaes", "axes": MIXED}, "two or more axes, all of them ranges"),
        ("bayes", {"sampler": "cmaes", **FIGURES}, "is for one figure; use tpe for several"),
        ("bayes", {"sampler": "gp", "axes": NETS}, "draws axes with `when` at random; use tpe"),
        ("pbt", {"axes": NETS}, "axes: must have no `when` in mode pbt"),
        ("random", {"pruner": "median", **FIGURES}, "must be none with several figures"),
        (
            "random",
            {**FIGURES, "metric": ["score", "seconds_to_accuracy"]},
            "a time to a target is none of several figures",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    mode: str, settings: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At planning, with the field and what would be right; here torch is missing too."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(InputError, match=error):
        check_search(Sweep.model_validate({"base": "/job.yaml", **fields_of(mode, **settings)}))


@pytest.mark.parametrize(
    ("mode", "settings", "text"),
    [
        ("bayes", {}, "GP (Gaussian process); the first 8 of 20 trials are spread evenly (Sobol)"),
        ("bayes", {"trials": 10}, "GP (Gaussian process); the first 4 of 10 trials are spread"),
        ("bayes", {"trials": 100}, "TPE; the first 8 of 100 trials are spread evenly (Sobol)"),
        ("bayes", {"axes": MIXED}, "TPE; the first 8 of 20 trials are spread evenly (Sobol)"),
        ("bayes", {"sampler": "tpe"}, "TPE; the first 8 of 20 trials are spread evenly (Sobol)"),
        ("bayes", {"budget": {"parallel": 12}}, "GP (Gaussian process); the first 12 of 20 trials"),
        ("bayes", {"sampler": "cmaes"}, "CMA-ES, from the middle of the ranges; the first 4 of 20"),
        ("bayes", FIGURES, "TPE; the first 8 of 20 trials are spread evenly (Sobol)"),
        ("random", {}, "random: all 20 trials"),
        (
            "evolution",
            {},
            "evolution; the first 8 of 20 trials are random; better than mode random",
        ),
        ("pbt", {}, "population-based training; the first 8 of 20 trials are random"),
    ],
)
def test_the_plan_says_how_trials_are_chosen(
    mode: str,
    settings: dict[str, Any],
    text: str,
    folder: SweepFolder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which sampler, and how many trials no result guides."""
    print_summary(folder.local_plan(**fields_of(mode, **settings)))
    assert f"\nsampler   {text}" in capsys.readouterr().out


def test_without_torch_the_sampler_is_tpe(
    folder: SweepFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says so, and what would help."""
    monkeypatch.setitem(sys.modules, "torch", None)
    print_summary(folder.local_plan(**fields_of("bayes")))
    said = capsys.readouterr().out
    assert "sampler   TPE; the first 8 of 20" in said
    assert "note      the sampler is TPE: for these axes" in said
    assert "pip install torch" in said


def test_the_first_trials_are_spread_evenly(folder: SweepFolder) -> None:
    """Each eighth of a range has one of the first eight trials, failed ones included."""
    axes = {"--a": {"low": 0.0, "high": 8.0}, "--b": {"low": 1, "high": 256, "log": True}}
    trials = Trials(folder, train=lambda _: "FAILED", parallel=3, axes=axes, trials=20)
    made = [trial.params for trial in trials.search(25).trials[:8]]
    assert {int(values["--a"]) for values in made} == {*range(8)}
    assert sum(values["--b"] <= 16 for values in made) in (4, 5)


def test_seeds_of_trials_differ(folder: SweepFolder) -> None:
    """A search whose trials share a seed tunes its values to that seed; a file may name seeds."""
    trials = Trials(folder, "random", trials=3, repeats=2)
    trials.search()
    assert [point.seed for point in trials.points] == [1, 2, 3, 4, 5, 6]
    assert [point.variables["seed"] for point in trials.points] == ["1", "2", "3", "4", "5", "6"]


def test_evolution_tries_no_values_twice(folder: SweepFolder) -> None:
    """While there are others on finite axes; then it goes on."""
    axes = {"--a": [1, 2, 3, 4], "--b": {"low": 1, "high": 4}}
    train = lambda point: float(point.values["--a"] * point.values["--b"])  # noqa: E731
    trials = Trials(folder, "evolution", train, axes=axes, trials=18, population=4)
    made = [tuple(trial.params.values()) for trial in trials.search().trials]
    assert len({*made[:12]}) == 12
    assert len(made) == 18


def test_a_missed_target_is_worse_than_any_that_was_reached(folder: SweepFolder) -> None:
    """A trial whose runs missed it counts as twice as slow as the slowest that reached it."""
    metric: dict[str, Any] = {"metric": "seconds_to_accuracy", "direction": "minimize"}
    times = [4.0, None, 10.0, None, 6.0, 30.0]

    ended: dict[str, Any] = {"state": "COMPLETED", "over": True, "run": "run"}
    ended |= {"target_accuracy": 0.9, "training_seconds": 9.0}
    trials = Trials(folder, "bayes", trials=20, sampler="tpe", repeats=1, **metric)
    for number, time in enumerate(times):
        assert trials.propose(1)
        trials.rows.append(PointRow(number, metric=time, **ended))
    trials.propose(1)
    values = [trial.value for trial in trials.study().trials]
    assert values == [4.0, 9.0, 10.0, 20.0, 6.0, 30.0, None]
    assert trials.study().trials[3].user_attrs["missed_target"] is True


def test_a_trial_with_a_run_that_reports_nothing_has_no_value(folder: SweepFolder) -> None:
    """The median of the others would be that of the lucky runs."""
    trials = Trials(folder, "random", trials=2, repeats=3)
    trials.propose(3)
    trials.rows = [
        PointRow(number, run="run", state="COMPLETED", over=True, metric=metric)
        for number, metric in enumerate([0.9, None, 0.8])
    ]
    trials.propose(0)
    assert trials.study().trials[0].state is TrialState.FAIL


def test_studies_that_do_not_fit_are_refused(folder: SweepFolder) -> None:
    """Another sweep's study, one that lost trials, and one that is not a journal."""
    trials = Trials(folder, trials=9)
    trials.search(6)
    journal = trials.directory / STUDY
    with pytest.raises(InputError, match=f"another sweep, {trials.plan.id}, not of mine"):
        open_search(trials.directory, replace(trials.plan, id="mine"))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0])
    with pytest.raises(RecordError, match="has 0 trials"):
        trials.propose(1)
    journal.write_text("no journal\n" * 3)
    with pytest.raises(RecordError, match="cannot be read"):
        trials.propose(1)
