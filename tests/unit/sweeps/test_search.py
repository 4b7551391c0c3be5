"""Searches: what they propose and stop, and that a kill neither loses nor repeats a trial."""

import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.sweeps.plan import Point
from hpml_orchestrator.sweeps.population import Member, evolve
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.search import STUDY, check_search, open_search
from tests.patience import eventually
from tests.unit.sweeps import searches
from tests.unit.sweeps.searches import Controller, hill, make_plan, make_sweep, tried

MODES = [
    pytest.param("random", {}, id="random"),
    *(pytest.param("bayes", {"sampler": name}, id=name) for name in ("tpe", "cmaes", "nsga2")),
    pytest.param("bayes", {"sampler": "gp"}, id="gp"),
    pytest.param("evolution", {"tournament": 3}, id="evolution"),
]
MIXED = {
    "--lr": {"low": 0.001, "high": 0.1, "log": True},
    "--momentum": {"low": 0.0, "high": 0.9, "step": 0.25},
    "--epochs": {"low": 1, "high": 8, "step": 3},
    "--width": {"low": 4, "high": 64, "log": True},
    "--nesterov": [True, False],
    "--augment": ["none", "flip", 3, 0.5],
}


@pytest.mark.parametrize(("mode", "settings"), MODES)
def test_no_trial_is_lost_or_made_twice(
    mode: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Dropped twice, each time with proposals that nobody recorded: all trials are there, once."""
    sweep = make_sweep(mode, trials=14, **settings)
    for ticks in (5, 4):
        killed = Controller(tmp_path, sweep, parallel=4)
        killed.search(ticks)
        lost = killed.propose(5)
        assert Controller(tmp_path, sweep).propose(5) == lost
    last = Controller(tmp_path, sweep, parallel=4)
    study = last.search()
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 14
    assert [row.point for row in last.rows] == [*range(14)]
    for trial, row in zip(study.trials, last.rows, strict=True):
        assert trial.user_attrs["run"] == row.run
        assert trial.value == row.metric
        assert trial.params == last.points[row.point].values
    assert last.propose(4) == []


def test_sigkill_changes_nothing(tmp_path: Path) -> None:
    """A controller killed twice in mid-search ends with the trials of one that was not killed."""
    sweep = make_sweep(trials=20)

    def completed(trials: int) -> bool:
        rows = Controller(tmp_path / "killed", sweep).rows
        return sum(row.state == "COMPLETED" for row in rows) >= trials

    for trials in (6, 13):
        command = [sys.executable, searches.__file__, str(tmp_path / "killed")]
        with subprocess.Popen(command) as process:
            eventually(partial(completed, trials))
            process.kill()
        assert process.returncode == -signal.SIGKILL
    killed = Controller(tmp_path / "killed", sweep)
    assert any(not row.over for row in killed.rows)
    study = killed.search()
    assert tried(study) == tried(Controller(tmp_path / "whole", sweep).search())
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert [row.point for row in killed.rows] == [*range(20)]


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    """A controller killed while it writes a trial leaves half a line: the trial is made again."""
    controller = Controller(tmp_path, make_sweep(trials=20))
    controller.search(12)
    controller.end(-1, 0.5)
    expected = controller.propose(1)
    journal = controller.directory / STUDY
    whole = journal.read_bytes()
    last_line = len(whole.splitlines(keepends=True)[-1])
    for left in (1, last_line // 2, last_line - 1):
        journal.write_bytes(whole[: left - last_line])
        assert controller.propose(1) == expected
        assert len(controller.study().trials) == 13


def test_the_study_is_one_of_optuna(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It opens as any other, even beside a lock that a killed Optuna left, and prints nothing."""
    controller = Controller(tmp_path, make_sweep(trials=3, direction="minimize"))
    lock = controller.directory / f"{STUDY}.lock"
    lock.symlink_to(STUDY)
    controller.search(4)
    lock.unlink()
    study = controller.study()
    assert study.direction.name == "MINIMIZE"
    assert study.user_attrs["sweep"] == searches.ID
    assert study.best_trial.user_attrs == {
        "point": study.best_trial.number,
        "run": f"run-{study.best_trial.number}",
        "state": "COMPLETED",
        "gpu_hours": 0.5,
    }
    assert {path.name for path in controller.directory.iterdir()} == {STUDY, "rows.json"}
    assert capfd.readouterr() == ("", "")


ENDED = {"over": True, "gpu_hours": 1.0}


@pytest.mark.parametrize(
    ("starts", "state", "value"),
    [
        ([{"state": "COMPLETED", "metric": 0.5}], TrialState.COMPLETE, 0.5),
        ([{"state": "COMPLETED"}], TrialState.FAIL, None),
        ([{"state": "COMPLETED", "metric": math.nan}], TrialState.FAIL, None),
        ([{"state": "FAILED", "metric": 0.5}], TrialState.FAIL, None),
        ([{"state": "TIMEOUT"}], TrialState.FAIL, None),
        ([{"state": "OUT_OF_MEMORY"}], TrialState.FAIL, None),
        ([{"state": "REFUSED"}], TrialState.FAIL, None),
        ([{"state": "PRUNED"}], TrialState.PRUNED, 0.25),
        ([{"state": "FAILED"}, {"state": "COMPLETED", "metric": 0.5}], TrialState.COMPLETE, 0.5),
        ([{"state": "FAILED"}, {"state": "RUNNING", "over": False}], TrialState.RUNNING, None),
        ([{"state": "FAILED"}, {"state": "FAILED"}], TrialState.FAIL, None),
    ],
)
def test_ends_of_runs(
    starts: list[dict[str, Any]], state: TrialState, value: float | None, tmp_path: Path
) -> None:
    """The last start of a point decides; the GPU-hours of all starts count."""
    controller = Controller(tmp_path, make_sweep(trials=2))
    controller.propose(1)
    rows = [
        Row(0, start=number, run=f"run-{number}", **{**ENDED, **row})
        for number, row in enumerate(starts)
    ]
    searcher = open_search(controller.directory, controller.plan)
    searcher.to_stop(rows[:1], {0: [(1, 0.125), (2, 0.25)]})
    for _ in range(2):
        assert [point.number for point in searcher.propose(rows[::-1], 1)] == [1]
    trial = controller.study().trials[0]
    assert trial.state is state
    assert trial.value == value
    if state is not TrialState.RUNNING:
        assert trial.user_attrs["gpu_hours"] == len(starts)
        assert trial.user_attrs["state"] == starts[-1]["state"]
        assert trial.user_attrs["run"] == f"run-{len(starts) - 1}"


def test_repeats_are_points_of_one_trial(tmp_path: Path) -> None:
    """Each repeat has its seed, slots may be fewer than repeats, and the median is the value."""
    results: Iterator[float | str] = iter([0.5, 0.75, 1.0, "FAILED", 0.25, 0.5])
    sweep = make_sweep("random", trials=2, repeats=3, seeds={"values": [7, 8, 9]})
    controller = Controller(tmp_path, sweep, lambda _point: next(results), parallel=2)
    study = controller.search()
    assert [trial.value for trial in study.trials] == [0.75, 0.375]
    assert study.trials[1].user_attrs["state"] == "FAILED"
    assert study.trials[1].user_attrs["point"] == 3
    points = [controller.points[number] for number in range(6)]
    assert [(point.repeat, point.seed) for point in points] == [(0, 7), (1, 8), (2, 9)] * 2
    assert [point.values == points[0].values for point in points] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("mode", ["random", "bayes", "evolution", "pbt"])
def test_values_are_those_of_the_axes(mode: str, tmp_path: Path) -> None:
    """Ranges keep their limits, steps and kind of number, lists their values."""

    def train(point: Point) -> float:
        leave_checkpoint(tmp_path, point)
        return float(point.values["--width"])

    sweep = make_sweep(mode, axes=MIXED, trials=32, population=8)
    for values in tried(Controller(tmp_path, sweep, train, parallel=8).search()):
        assert 0.001 <= values["--lr"] <= 0.1
        assert values["--momentum"] in (0.0, 0.25, 0.5, 0.75)
        assert values["--epochs"] in (1, 4, 7)
        assert values["--width"] in range(4, 65)
        assert values["--nesterov"] in (True, False)
        assert values["--augment"] in ("none", "flip", 3, 0.5)
        assert [type(values[name]) for name in ("--epochs", "--width", "--nesterov")] == [
            int,
            int,
            bool,
        ]


def miss(values: Mapping[str, float]) -> float:
    """Return how far values are from the bottom of a smooth valley."""
    return sum(((value - 0.3) ** 2 for value in values.values()), 0.0)


def random_miss(axes: Iterable[str], trials: int) -> float:
    """Return how near random search comes on average."""
    rng = random.Random(1)
    return mean(
        min(miss({axis: rng.random() for axis in axes}) for _ in range(trials)) for _ in range(200)
    )


def test_tpe_learns(tmp_path: Path) -> None:
    """On average it comes nearer to the bottom than random search."""
    axes = {f"--x{axis}": {"low": 0.0, "high": 1.0} for axis in range(4)}
    found = []
    for seed in range(2):
        sweep = make_sweep(axes=axes, trials=40, seed=seed, direction="minimize")
        controller = Controller(tmp_path / str(seed), sweep, lambda point: miss(point.values))
        found.append(controller.search().best_value)
    assert mean(found) < random_miss(axes, 40) / 2


def test_evolution_learns() -> None:
    """On average it comes nearer to the bottom than random search."""
    axes = {f"--x{axis}": FloatDistribution(0.0, 1.0) for axis in range(4)}
    found = []
    for seed in range(20):
        rng, members = random.Random(seed), list[Member]()
        for number in range(80):
            child = evolve(members, axes, population=16, tournament=4, rng=rng)
            values = child.values if child else {axis: rng.random() for axis in axes}
            members.append(Member(number, values, -miss(values)))
        found.append(min(miss(member.values) for member in members))
    assert mean(found) < random_miss(axes, 80) / 2


def test_evolution_follows_its_parents(tmp_path: Path) -> None:
    """A parent is among the best of the youngest; a child differs from its parents in one value."""
    sweep = make_sweep(
        "evolution", axes=MIXED, trials=30, population=6, tournament=5, direction="minimize"
    )
    controller = Controller(tmp_path, sweep, lambda point: float(point.values["--lr"]))
    trials = controller.search().trials
    assert [trial.user_attrs["parent"] for trial in trials[:6]] == [None] * 6
    for trial in trials[6:]:
        youngest = trials[trial.number - 6 : trial.number]
        second = sorted(member.params["--lr"] for member in youngest)[1]
        numbers = [trial.user_attrs["parent"], trial.user_attrs["mate"]]
        parents = [trials[number] for number in numbers if number is not None]
        assert all(parent in youngest and parent.params["--lr"] <= second for parent in parents)
        inherited = [
            any(trial.params[name] == parent.params[name] for parent in parents) for name in MIXED
        ]
        assert inherited.count(False) == 1 or len(parents) == 2
        assert inherited.count(False) <= 1
        generations = [parent.user_attrs["generation"] for parent in parents]
        assert trial.user_attrs["generation"] == 1 + max(generations)
    assert {trial.user_attrs["mate"] is None for trial in trials[6:]} == {True, False}


def leave_checkpoint(records: Path, point: Point) -> int:
    """Go on from the parent's checkpoint: write and return how many trainings it holds."""
    parent = point.variables.get("checkpoint")
    done = 1 + (int(Path(parent).read_text()) if parent else 0)
    path = records / "runs" / f"run-{point.number}" / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(done))
    return done


def test_population_based_training_goes_on_from_checkpoints(tmp_path: Path) -> None:
    """The best 80 % go on from their own checkpoint, the rest from one of the best 20 %."""

    def train(point: Point) -> float | str:
        if point.number == 12:  # in the second generation, after which it has to be replaced
            return "FAILED"
        return leave_checkpoint(tmp_path, point) + hill(point) / 2

    sweep = make_sweep("pbt", trials=40, population=10)
    controller = Controller(tmp_path, sweep, train, parallel=7)
    study = controller.search()
    generations = [study.trials[first : first + 10] for first in range(0, 40, 10)]
    assert all(trial.user_attrs["checkpoint"] == "" for trial in generations[0])
    for before, now in pairwise(generations):
        order = sorted(before, key=lambda trial: -(trial.value or 0))
        best, kept = [trial.number for trial in order[:2]], [trial.number for trial in order[:8]]
        for own, trial in zip(before, now, strict=True):
            parent = study.trials[trial.user_attrs["parent"]]
            run = parent.user_attrs["run"]
            checkpoint = str(tmp_path / "runs" / run / "checkpoint.pt")
            assert controller.points[trial.number].variables == {"checkpoint": checkpoint}
            assert trial.user_attrs["checkpoint"] == checkpoint
            if own.number in kept:
                assert parent.number == own.number
                assert trial.params == own.params
            else:
                assert parent.number in best
                assert trial.params != parent.params
    assert all(int(trial.value or 0) == 4 for trial in generations[3])


def test_a_generation_waits_for_the_one_before(tmp_path: Path) -> None:
    """No member is proposed before all of the generation before ended; failures start anew."""
    controller = Controller(tmp_path, make_sweep("pbt", trials=8, population=4), parallel=9)
    controller.tick()
    assert [row.point for row in controller.rows] == [0, 1, 2, 3]
    for index in range(3):
        controller.end(index, "FAILED")
        assert controller.propose(4) == []
    controller.end(3, "TIMEOUT")
    points = controller.propose(9)
    assert [point.number for point in points] == [4, 5, 6, 7]
    assert [point.variables for point in points] == [{}] * 4


def test_a_training_without_checkpoint_is_named(tmp_path: Path) -> None:
    """Population-based training cannot go on when no run left the file that the sweep names."""
    controller = Controller(tmp_path, make_sweep("pbt", trials=8, population=2))
    with pytest.raises(InputError, match=r"^search.checkpoint: .*runs/run-0/checkpoint\.pt"):
        controller.search()


@pytest.mark.parametrize("pruner", ["median", "halving"])
def test_a_bad_trial_is_stopped(pruner: str, tmp_path: Path) -> None:
    """It stays stopped until it ends, and the study has its last value; a good one goes on."""
    controller = Controller(tmp_path, make_sweep(trials=20, pruner=pruner))
    evaluations = {}
    for number in range(9):
        controller.tick()
        evaluations[number] = [(step, 0.5 + number / 100) for step in range(1, 9)]
        searcher = open_search(controller.directory, controller.plan)
        searcher.to_stop(controller.rows, evaluations)
        controller.end(-1, 0.5 + number / 100)
    controller.parallel = 2
    controller.tick()
    evaluations |= {9: [(1, 0.1), (2, 0.2)], 10: [(1, 0.8), (2, 0.9)]}
    for _ in range(2):
        searcher = open_search(controller.directory, controller.plan)
        assert searcher.to_stop(controller.rows, evaluations) == {9}
    controller.end(9, "PRUNED")
    assert searcher.to_stop(controller.rows, evaluations) == set()
    controller.propose(1)
    trials = controller.study().trials
    assert (trials[9].state, trials[9].value) == (TrialState.PRUNED, 0.2)
    assert trials[10].state is TrialState.RUNNING
    assert trials[10].intermediate_values == {1: 0.8, 2: 0.9}


LIST = {"--lr": {"low": 0.1, "high": 1.0}, "--opt": ["sgd", "adam"]}
STEP = {"--width": {"low": 4, "high": 64, "step": 0.5}}


@pytest.mark.parametrize(
    ("mode", "settings", "field", "message"),
    [
        ("bayes", {"sampler": "cmaes", "axes": LIST}, "search.sampler", "a range for --opt"),
        ("bayes", {"sampler": "nsga2", "trials": 4}, "search.population", "the 4 trials (got 8)"),
        ("evolution", {"trials": 4}, "search.population", "the 4 trials (got 8)"),
        ("evolution", {"tournament": 9}, "search.tournament", "the population, 8 (got 9)"),
        ("pbt", {"trials": 4}, "search.population", "the 4 trials (got 8)"),
        ("pbt", {"trials": 20}, "search.trials", "multiple of the population, 8 (got 20)"),
        ("pbt", {"trials": 16, "repeats": 2}, "repeats", "must be 1 in mode pbt"),
        ("pbt", {"trials": 16, "checkpoint": "a/../../b"}, "search.checkpoint", "run's directory"),
        ("pbt", {"trials": 16, "pruner": "median"}, "search.pruner", "must be none"),
        ("bayes", {"pruner": "halving", "repeats": 2}, "search.pruner", "must be none"),
        ("random", {"exclude": [{"--lr": 0.1}]}, "exclude", "leave the values out"),
        ("random", {"axes": STEP}, "axes.--width.step", "must be a whole number"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    mode: str, settings: dict[str, Any], field: str, message: str
) -> None:
    """At planning, with the field, the value and what would be right."""
    with pytest.raises(InputError) as caught:
        check_search(make_sweep(mode, **settings))
    assert caught.value.field == field
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sampler", "package"), [("cmaes", "cmaes"), ("gp", "torch"), ("gp", "scipy")]
)
def test_a_missing_package_is_named(
    sampler: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is submitted, with the command that installs it; others need it not."""
    monkeypatch.setitem(sys.modules, package, None)
    check_search(make_sweep(sampler="tpe"))
    with pytest.raises(InputError, match=f"pip install {package}"):
        check_search(make_sweep(sampler=sampler))


def test_studies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another sweep's study, one that lost trials, and one that is no journal."""
    controller = Controller(tmp_path, make_sweep(trials=9))
    controller.search(6)
    journal = controller.directory / STUDY
    with pytest.raises(InputError, match=f"another sweep, {searches.ID}, not of mine"):
        open_search(controller.directory, make_plan(make_sweep(), "mine"))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:3]))
    with pytest.raises(RecordError, match="has 0 trials"):
        controller.propose(1)
    journal.write_text("no journal\n" * 3)
    with pytest.raises(RecordError, match="cannot be read"):
        controller.propose(1)
