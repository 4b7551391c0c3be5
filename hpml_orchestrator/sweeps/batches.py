"""A batch: points of one shape that go out as one job array, with one call of sbatch.

`batches/<number>.json` names its points and the id of its submission before anything else happens.
It is created exclusively, so whoever continues a sweep after a kill continues that very batch; the
submission itself is made exactly once by `runs/`.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    InputError,
    RecordError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.records.files import create_json, read_json
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.store import Store, Submission
from hpml_orchestrator.runs.after import outstanding
from hpml_orchestrator.runs.prepare import Rendered, prepare, render_job
from hpml_orchestrator.runs.submit import resume, submit
from hpml_orchestrator.script.template import variable
from hpml_orchestrator.sweeps.plan import Point, job_of, site_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.sweeps.plan import SweepPlan

__all__ = ["Batch", "Sent", "Task", "create_batch", "points_script", "read_batches", "send"]

POINTS_FILE = "points.sh"


@dataclass(frozen=True)
class Task:
    """One start of a point: 0 is the first, 1 the first retry."""

    point: Point
    start: int

    @property
    def key(self) -> tuple[int, int]:
        """Number of the point and of the start."""
        return self.point.number, self.start


@dataclass(frozen=True)
class Batch:
    """Tasks that are submitted together, by array index.

    Attributes:
        number: its place among the sweep's batches, from 0.
        sid: id of its submission, which need not exist yet.
        shape: number of the shape of all its points.
        throttle: how many of its tasks may run at once; None for as many as fit.
        created: seconds since the epoch.
        tasks: by array index, from 0.
    """

    number: int
    sid: str
    shape: int
    throttle: int | None
    created: float
    tasks: tuple[Task, ...]

    def submission(self, store: Store) -> Submission:
        """Return its submission, whose directory need not exist."""
        return Submission(store.submissions_dir / self.sid)


@dataclass(frozen=True)
class Sent:
    """What came of submitting a batch; one of the three.

    Attributes:
        job_id: the scheduler's id of the array.
        refused: the scheduler's reason; there is no job.
        undecided: why it is not known yet; a later tick finds out.
    """

    job_id: str = ""
    refused: str = ""
    undecided: str = ""


def read_batches(directory: Path, plan: SweepPlan, start: int = 0) -> list[Batch]:
    """Return the batches of a sweep, in order, from a number on."""
    try:
        count = sum(name.endswith(".json") for name in os.listdir(directory / "batches"))
    except FileNotFoundError:
        return []
    paths = [directory / "batches" / f"{number}.json" for number in range(start, count)]
    return [_read(path, plan) for path in paths]


def _read(path: Path, plan: SweepPlan) -> Batch:
    record = read_json(path)
    chosen = {point["number"]: Point(**point) for point in record["chosen"]}
    return Batch(
        number=int(path.stem),
        sid=record["sid"],
        shape=record["shape"],
        throttle=record["throttle"],
        created=record["created"],
        tasks=tuple(
            Task(chosen.get(number) or plan.points[number], start)
            for number, start in record["tasks"]
        ),
    )


def create_batch(
    directory: Path,
    plan: SweepPlan,
    number: int,
    tasks: Sequence[Task],
    *,
    throttle: int | None,
    now: float,
) -> Batch | None:
    """Record durably that these tasks go out as the batch of that number.

    Returns:
        None where another controller has made a batch of that number: what was decided from the
        earlier ones has to be decided again.
    """
    batch = Batch(
        number, new_id(plan.name, now=now), tasks[0].point.shape, throttle, now, tuple(tasks)
    )
    path = directory / "batches" / f"{number}.json"
    path.parent.mkdir(exist_ok=True)
    record = {
        "sid": batch.sid,
        "shape": batch.shape,
        "throttle": throttle,
        "created": now,
        "tasks": [task.key for task in tasks],
        # The plan has all points but those of a search.
        "chosen": [] if plan.points else [asdict(task.point) for task in tasks],
    }
    return batch if create_json(path, record) else None


def send(
    store: Store,
    plan: SweepPlan,
    batch: Batch,
    scheduler: Scheduler,
    *,
    environment: Mapping[str, str],
    clock: Callable[[], float],
) -> Sent:
    """Submit a batch, or find out what became of its submission; never waits.

    Raises:
        InputError: its job cannot be rendered.
        RecordError: the records cannot be written.
    """
    submission = batch.submission(store)
    notes: list[str] = []
    try:
        if _prepare(store, plan, batch, environment, now=clock()):
            return Sent(submit(submission, scheduler, environment=environment, clock=clock))
        return Sent(
            resume(
                store,
                submission,
                scheduler,
                environment=environment,
                clock=clock,
                sleep=_do_not_wait,
                notice=notes.append,
            )
        )
    except SchedulerUnavailable as error:
        return Sent(undecided=notes[-1] if notes else str(error))
    except (InputError, SchedulerError):
        refused = submission.refused()
        if refused is None:
            raise
        return Sent(refused=str(refused["reason"]))


def _do_not_wait(_: float) -> None:
    raise SchedulerUnavailable("it is not known yet whether there is a job")


def _prepare(
    store: Store, plan: SweepPlan, batch: Batch, environment: Mapping[str, str], *, now: float
) -> bool:
    """Write the batch's submission; False where it is there already."""
    submission = batch.submission(store)
    if submission.directory.is_dir():
        return False
    rendered = render_batch(plan, batch, environment)
    script = points_script(plan, batch)
    after = outstanding(store, rendered.resolved.job.after, backend=plan.backend)
    try:
        prepare(
            store,
            rendered,
            backend=plan.backend,
            argv=["hpml", "sweep", "tick", plan.id],
            environment=environment,
            after=after,
            now=now,
            sid=batch.sid,
            fill=lambda directory: _fill(directory, script),
            record={"sweep": plan.id, "points": [task.point.number for task in batch.tasks]},
        )
    except RecordError:
        if submission.directory.is_dir():  # another controller was faster
            return False
        raise
    return True


def render_batch(plan: SweepPlan, batch: Batch, environment: Mapping[str, str]) -> Rendered:
    """Return the job array of a batch with its script.

    Raises:
        InputError: the job cannot be rendered.
    """
    throttle = "" if batch.throttle is None else f"%{batch.throttle}"
    array = f"0-{len(batch.tasks) - 1}{throttle}"
    resolved = job_of(plan, plan.shapes[batch.shape], array)
    return render_job(resolved, site=site_of(plan, environment), here=plan.backend == "local")


def points_script(plan: SweepPlan, batch: Batch) -> str:
    """Return `points.sh`, which sets the values of the task's point from its array index."""
    lines = [f"export HPML_SWEEP={shlex.quote(plan.id)}", 'case "$SLURM_ARRAY_TASK_ID" in']
    for index, task in enumerate(batch.tasks):
        values = {"HPML_POINT": str(task.point.number)}
        for name, value in task.point.variables.items():
            values[variable(f"point.{name}")] = value
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        lines.append(f"{index}) export {words} ;;")
    return "\n".join([*lines, "esac", ""])


def _fill(directory: Path, script: str) -> None:
    (directory / POINTS_FILE).write_text(script, encoding="utf-8")
