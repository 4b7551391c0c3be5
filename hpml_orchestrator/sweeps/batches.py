"""A batch: points of one shape that are submitted as one job array, and the states of its tasks.

`batches/<number>.json` names its points and the id of its submission before anything else happens.
It is created exclusively, so a process that continues a sweep after a kill continues the same
batch; `runs/` makes the submission itself exactly once. Afterwards, tasks that completed according
to their own records are over; for all others the scheduler is queried once.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpml_orchestrator.errors import InputError, SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.files import (
    create_json,
    read_json,
    write_json,
    write_text,
)
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.run import PRUNED
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.backend import cluster_name
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.runs.select import pending_dependencies
from hpml_orchestrator.runs.state import State, run_of
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.runs.submit import resume, submit
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.script.template import variable
from hpml_orchestrator.sweeps.plan import Point, directory_of, job_of, site_of
from hpml_orchestrator.sweeps.rows import DEFAULT_METRICS, PointRow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.sweeps.plan import SweepPlan

_LOST_SECONDS = 600.0
_RECORDED = ("sid", "shape", "throttle", "created")


@dataclass(frozen=True)
class Task:
    """One start of a point: 0 is the first, 1 the first retry."""

    point: Point
    start: int

    @property
    def key(self) -> tuple[int, int]:
        """Number of the point and of the start."""
        return self.point.number, self.start


@dataclass
class Batch:
    """Tasks that are submitted together, by array index from 0.

    The scheduler's answer, `job_id` or `refusal`, is empty while it is not known.
    """

    number: int  # its place among the sweep's batches, from 0
    sid: str  # id of its submission, which need not exist yet
    shape: int  # number of the shape of all its points
    throttle: int | None  # how many of its tasks may run at once; None for as many as fit
    created: float  # seconds since the epoch
    tasks: tuple[Task, ...]
    job_id: str = ""  # of the array
    refusal: str = ""  # why the scheduler refused it

    def submission(self, store: Store, index: int | None = None) -> Submission:
        """Return its submission, or one task of it; the directory need not exist."""
        return Submission(store.submissions_dir / self.sid, index)

    def read_answer(self, store: Store) -> None:
        """Read the scheduler's answer, if it is recorded."""
        submission = self.submission(store)
        if self.refusal:  # and its records may be gone
            return
        if job := submission.job():
            self.job_id = job["job_id"]
        elif refused := submission.refused():
            self.refusal = refused["reason"]

    def indices(self, keys: Container[tuple[int, int]]) -> list[int]:
        """Return the array indices of its tasks that are among these; none if it was refused."""
        if self.refusal:
            return []
        return [index for index, task in enumerate(self.tasks) if task.key in keys]

    def rows(self) -> dict[tuple[int, int], PointRow]:
        """Return the rows of its tasks before they have a state; none if it was refused."""
        state, job = ("PENDING", f"{self.job_id}_{{}}") if self.job_id else ("WAITING", "")
        return {
            task.key: PointRow(
                *task.key, f"{self.sid}.{index}", job.format(index), state, queued=self.created
            )
            for index, task in enumerate(() if self.refusal else self.tasks)
        }


def read_batches(directory: Path, plan: SweepPlan, start: int = 0) -> list[Batch]:
    """Return the batches of a sweep in order, from number `start` on."""
    # Batches are never removed, not even refused ones, so their numbers have no gaps and the count
    # is the next number.
    count = len(list((directory / "batches").glob("*.json")))
    batches = []
    for number in range(start, count):
        record = read_json(directory / "batches" / f"{number}.json")
        chosen = {point["number"]: Point(**point) for point in record["chosen"]}
        tasks = tuple(
            Task(chosen.get(point) or plan.points[point], start) for point, start in record["tasks"]
        )
        known = {name: record[name] for name in _RECORDED}
        refusal = record.get("refusal", "")
        batches.append(Batch(number, tasks=tasks, refusal=refusal, **known))
    return batches


def with_trials(store: Store, plan: SweepPlan) -> SweepPlan:
    """Return the plan with the points that a search has chosen so far, which are in its batches."""
    if not plan.spec.searches:
        return plan
    batches = read_batches(directory_of(store, plan.id), plan)
    points = {task.point.number: task.point for batch in batches for task in batch.tasks}
    return replace(plan, points=tuple(points[number] for number in sorted(points)))


def create_batch(
    directory: Path,
    plan: SweepPlan,
    number: int,
    tasks: Sequence[Task],
    throttle: int | None,
    now: float,
) -> Batch | None:
    """Record durably that these tasks are submitted as the batch of that number.

    Returns:
        None if another controller has made a batch of that number; then the next batch must be
        decided again.
    """
    sid, shape = new_id(plan.name, now=now), tasks[0].point.shape
    batch = Batch(number, sid, shape, throttle, now, tuple(tasks))
    record = {
        **{name: getattr(batch, name) for name in _RECORDED},
        "tasks": [task.key for task in tasks],
        # The plan does not have the points of a search, so the batch records them.
        "chosen": [] if plan.points else [asdict(task.point) for task in tasks],
    }
    path = directory / "batches" / f"{number}.json"
    path.parent.mkdir(exist_ok=True)
    return batch if create_json(path, record) else None


def send(
    store: Store,
    plan: SweepPlan,
    batch: Batch,
    scheduler: Scheduler,
    environment: Mapping[str, str],
    clock: Callable[[], float],
) -> None:
    """Submit a batch, or find the job of an interrupted submission, and read the answer.

    Raises:
        InputError: its job cannot be rendered.
        RecordError: the records cannot be written.
        SchedulerUnavailable: the outcome is unknown; a later call determines it.
    """
    submission = batch.submission(store)
    try:
        # An existing directory means that a process may have called sbatch before it died.
        # `resume` looks for that job first; a plain second submission would run every point twice.
        if not submission.directory.is_dir():
            _prepare(store, plan, batch, cluster_name(scheduler), environment, now=clock())
            submit(submission, scheduler, environment=environment, clock=clock)
        else:
            resume(
                store,
                submission,
                scheduler,
                environment=environment,
                clock=clock,
                notice=_do_not_wait,
            )
    except (InputError, SchedulerError):
        # A recorded refusal is the scheduler's answer, from which the controller learns its
        # limits. Any other error leaves the batch undecided, for the caller to report.
        if submission.refused() is None:
            raise
    batch.read_answer(store)


def forget(store: Store, directory: Path, batch: Batch) -> None:
    """Remove the records of a refused submission; its points are submitted in other batches.

    First the batch's own record gets the refusal: without it the batch would be submitted again.
    """
    submission = batch.submission(store)
    if submission.refused() is None or submission.job() is not None:
        return
    path = directory / "batches" / f"{batch.number}.json"
    write_json(path, {**read_json(path), "refusal": batch.refusal})
    shutil.rmtree(submission.directory, ignore_errors=True)


def _do_not_wait(reason: str) -> NoReturn:
    raise SchedulerUnavailable(reason)


def _prepare(
    store: Store,
    plan: SweepPlan,
    batch: Batch,
    cluster: str,
    environment: Mapping[str, str],
    *,
    now: float,
) -> None:
    """Write the batch's submission: the job array with its script, and `points.sh`."""
    throttle = "" if batch.throttle is None else f"%{batch.throttle}"
    array = f"0-{len(batch.tasks) - 1}{throttle}"
    resolved = job_of(plan, plan.shapes[batch.shape], array, site_of(plan, environment))
    script = _points_script(plan, batch)
    prepare(
        store,
        render_job(resolved),
        cluster=cluster,
        argv=["hpml", "sweep", "tick", plan.id],
        environment=environment,
        after=pending_dependencies(store, resolved.job.after, backend=plan.backend),
        now=now,
        sid=batch.sid,
        fill=lambda directory: write_text(directory / "points.sh", script),
        record={
            "sweep": plan.id,
            "points": [task.point.number for task in batch.tasks],
            "values": [_values(plan, task.point) for task in batch.tasks],
            **({"started_by": "hpml report --try"} if plan.trial else {}),
        },
    )


def _values(plan: SweepPlan, point: Point) -> dict[str, object]:
    scale = {plan.unit: point.scale} if plan.unit else {}
    seed = {"seed": point.seed} if "seed" in plan.placeholders else {}
    return {**scale, **point.values, **seed}


def _points_script(plan: SweepPlan, batch: Batch) -> str:
    """Return `points.sh`, which sets the values of the task's point from its array index."""
    lines = [f"export HPML_SWEEP={shlex.quote(plan.id)}", 'case "$SLURM_ARRAY_TASK_ID" in']
    for index, task in enumerate(batch.tasks):
        values = {"HPML_POINT": str(task.point.number)}
        for name, value in task.point.variables.items():
            values[variable(f"point.{name}")] = value
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        lines.append(f"{index}) export {words} ;;")
    return "\n".join([*lines, "esac", ""])


def completed(store: Store, batch: Batch, indices: Collection[int]) -> Iterator[tuple[int, State]]:
    """Yield index and state of the tasks that completed according to their own records."""
    record = batch.submission(store).record()
    for index in indices:
        task = batch.submission(store, index)
        attempt = run_of(task).newest()
        end = attempt.ended if attempt else None
        # Only success is final by the task's own record. After any other end Slurm may requeue the
        # task, which only the scheduler knows.
        if attempt and end and end.get("state") == JobState.COMPLETED and not end.get("goes_on"):
            begun = attempt.started
            done = replace(
                State.of(task, record),
                job_id=f"{batch.job_id}_{index}",
                state="COMPLETED",
                over=True,
                nodes=attempt.nodes,
                started=begun.time if begun else None,
                ended=end["time"],
            )
            yield index, done


def query(
    store: Store, batches: Collection[Batch], backends: Backends, now: Callable[[], float]
) -> Iterator[tuple[Batch, int, State]]:
    """Ask the scheduler once and yield the state of every task of the batches.

    A task that the scheduler has not known for ten minutes is over.
    """
    submissions = [batch.submission(store) for batch in batches]
    arrays = states(store, submissions, backends=backends, now=now)
    for batch, array in zip(batches, arrays, strict=True):
        for state in array.tasks:
            index = state.submission.index
            if index is None or state.state == UNREADABLE:
                continue
            over = state.over
            if state.lost:
                # A task that still writes records is not lost, though the scheduler does not list
                # it: the ten minutes count from its last write.
                attempt = state.run.newest()
                seen = max(batch.created, (attempt.last_written if attempt else None) or 0.0)
                over = now() - seen > _LOST_SECONDS
            yield batch, index, replace(state, over=over)


def evaluations(task: Submission, metric: str) -> list[tuple[int, float]]:
    """Return step (the epoch, if reported) and value of a run's evaluations so far.

    Args:
        task: one task of an array.
        metric: a figure of the result, by default the first of `DEFAULT_METRICS` that they have;
            evaluations may call them just `accuracy`.
    """
    names = [metric] if metric else [*DEFAULT_METRICS]
    names.append(names[-1].removeprefix("test_").removeprefix("validation_"))
    values: dict[int, float] = {}
    events = (event for attempt in run_of(task).attempts() for event in attempt.milestones())
    for event in events:
        data = event.data
        value = next((data[name] for name in names if data.get(name) is not None), None)
        if event.event == "evaluation" and not data.get("final") and value is not None:
            step = data.get("epoch", data.get("step", len(values) + 1))
            # An attempt that resumes from a checkpoint repeats some epochs; the later value
            # replaces the earlier one.
            values[int(step)] = float(value)
    return sorted(values.items())


def trained_since(task: Submission) -> float | None:
    """Return when the newest attempt of a run reported its first steps; None if it has not."""
    attempt = run_of(task).newest()
    events = attempt.milestones() if attempt else ()
    return min((event.time for event in events if event.event == "step"), default=None)


def ask_to_stop(task: Submission, now: float) -> float:
    """Ask a run to stop at its next step, for good; return when it was first asked."""
    # The controller cancels a run some time after the first request, so a later tick must not
    # renew it.
    attempt, asked_at = run_of(task).newest(), stop_asked_at(task)
    if attempt is not None and asked_at is None:
        attempt.request_stop(PRUNED, by="search", now=now)
    return now if asked_at is None else asked_at


def stop_asked_at(task: Submission) -> float | None:
    """Return when the search asked a run to stop; None if it did not.

    An attempt that already stops for another reason is not asked; the next attempt is.
    """
    attempt = run_of(task).newest()
    for request in attempt.stop_requests() if attempt else ():
        if request["reason"] == PRUNED:
            return float(request["time"])
    return None
