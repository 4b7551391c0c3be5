"""A controller for tests: it runs the points of a search as calls of a function.

python searches.py RECORDS    # goes on with the search of RECORDS until it is over or killed
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.spec.sweep import Sweep
from hpml_orchestrator.sweeps.plan import Estimate, Point, Shape, SweepPlan
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.search import STUDY, Searcher, open_search

ID = "digits-bayes-20261122-120000-abcdef"
AXES = {"--lr": {"low": 1e-4, "high": 1.0, "log": True}, "--momentum": {"low": 0.0, "high": 0.99}}


def make_sweep(mode: str = "bayes", **settings: Any) -> Sweep:
    """Return a sweep of that mode; settings are of `search`, but for the sweep's own."""
    own = {name: settings.pop(name) for name in list(settings) if name in Sweep.model_fields}
    fields = {"base": "/job.yaml", "mode": mode, "axes": AXES, "search": settings, **own}
    return Sweep.model_validate(fields)


def make_plan(sweep: Sweep, plan_id: str = ID) -> SweepPlan:
    """Return a plan of one shape, whose points get a checkpoint where they have one."""
    return SweepPlan(
        id=plan_id,
        name="digits",
        mode=sweep.mode,
        sweep=sweep.model_dump(mode="json"),
        backend="local",
        host="",
        site="",
        argv=(),
        created=0.0,
        unit="",
        baseline=None,
        base_batch=None,
        base_learning_rate=None,
        placeholders={"checkpoint": "checkpoint"},
        shapes=(Shape(0, {}, {}, nodes=1, ranks=1, gpus=0, cores=1, seconds=60),),
        points=(),
        blocks=(),
        estimate=Estimate(0, 0, 0, 0),
    )


def hill(point: Point) -> float:
    """Return an accuracy whose top, 1, is at a learning rate of 0.02 and a momentum of 0.8."""
    rate, momentum = point.values["--lr"], point.values["--momentum"]
    return 1 - (math.log10(rate / 0.02) / 4) ** 2 - (float(momentum) - 0.8) ** 2


class Controller:
    """Runs a search in this process; its rows are in a file, so that it can be killed.

    Args:
        records: directory of the records.
        sweep: the search.
        train: returns the accuracy of a point, or the state in which its run ends.
        parallel: points that run at the same time; each tick the oldest of them ends.
    """

    def __init__(
        self,
        records: Path,
        sweep: Sweep,
        train: Callable[[Point], float | str] = hill,
        parallel: int = 1,
    ) -> None:
        self.plan, self.train, self.parallel = make_plan(sweep), train, parallel
        self.directory = records / "sweeps" / ID
        self.directory.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self.points: dict[int, Point] = {}
        self._file = self.directory / "rows.json"
        if self._file.exists():
            for values, variables, row in read_json(self._file)["rows"]:
                self._add(Point(row["point"], 0, values=values, variables=variables), row)

    @cached_property
    def searcher(self) -> Searcher:
        return open_search(self.directory, self.plan)

    def _add(self, point: Point, row: Mapping[str, Any]) -> None:
        self.points[point.number] = point
        self.rows.append(Row(**row))

    def tick(self) -> bool:
        """End the oldest run and start new ones; whether anything happened."""
        running = [index for index, row in enumerate(self.rows) if not row.over]
        if len(running) == self.parallel or (running and not self.searcher.propose(self.rows, 1)):
            self.end(running[0], self.train(self.points[self.rows[running[0]].point]))
        free = self.parallel - sum(not row.over for row in self.rows)
        new = self.searcher.propose(self.rows, free)
        for point in new:
            self._add(point, {"point": point.number, "run": f"run-{point.number}"})
        rows = [
            (self.points[row.point].values, self.points[row.point].variables, self._record(row))
            for row in self.rows
        ]
        write_json(self._file, {"rows": rows})
        return bool(running or new)

    @staticmethod
    def _record(row: Row) -> dict[str, Any]:
        return {
            name: value for name, value in vars(row).items() if value != getattr(Row, name, None)
        }

    def propose(self, free: int) -> list[Point]:
        """Open the study anew and return new points, without recording them."""
        return open_search(self.directory, self.plan).propose(self.rows, free)

    def end(self, index: int, result: float | str) -> None:
        """End a run with its accuracy, or in a state."""
        metric = result if isinstance(result, float) else None
        state = "COMPLETED" if isinstance(result, float) else result
        self.rows[index] = replace(
            self.rows[index], state=state, metric=metric, over=True, gpu_hours=0.5
        )

    def search(self, ticks: int = 10_000) -> optuna.Study:
        """Make so many ticks, or all, and return the study as a user opens it."""
        for _ in range(ticks):
            if not self.tick():
                break
        return self.study()

    def study(self) -> optuna.Study:
        """Open the study as a user does."""
        storage = JournalStorage(JournalFileBackend(str(self.directory / STUDY)))
        return optuna.load_study(study_name=ID, storage=storage)


def tried(study: optuna.Study) -> list[Mapping[str, Any]]:
    """Return the values of all trials in order."""
    return [trial.params for trial in study.trials]


if __name__ == "__main__":
    Controller(Path(sys.argv[1]), make_sweep(trials=20)).search()
