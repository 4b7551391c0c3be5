"""`hpml report RUN --try`: does the proposed change help? A sweep of a job and the changed one.

Both jobs run in turn, repeat after repeat, and the order changes from repeat to repeat, so that a
drift of the machine hits both. Runs are stopped after some minutes of training if the program
reports its steps through the channel, else they run to their end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.apply import Chosen, changed_job
from hpml_orchestrator.errors import counted
from hpml_orchestrator.jobfile.rules import combined, wrong_fields
from hpml_orchestrator.jobfile.sweep import make_sweep
from hpml_orchestrator.jobfile.text import with_texts
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.apply import job_of_run, refuse_unchangeable
from hpml_orchestrator.sweeps.plan import (
    JOB_AXIS,
    SEED_ARGUMENTS,
    Point,
    ProgramArguments,
    Shape,
    SweepEstimate,
    SweepPlan,
    Trial,
    check_base,
)
from hpml_orchestrator.sweeps.rows import setup_seconds
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.sweeps.rows import PointRow

_NAMES = ("original", "changed")
_SPARE_SECONDS = 1800  # of a shortened run's time limit, for slow nodes and the end


def make_trial(
    submission: Submission,
    facts: Facts,
    chosen: Chosen,
    *,
    repeats: int | None,
    minutes: float,
    chosen_site: str = "",
    argv: Sequence[str] = (),
    now: float,
) -> SweepPlan:
    """Return the plan of a trial; nothing is written or submitted.

    Args:
        submission: the run.
        facts: what is known of it.
        chosen: the changes to try.
        repeats: pairs of runs; default: six, the fewest that give a 95 % interval.
        minutes: of training after which a run is stopped; 0: runs are whole.
        chosen_site: the word of `--site`.
        argv: the command line, for the record.
        now: seconds since the epoch.

    Raises:
        InputError: nothing can be tried, or the run cannot be repeated.
    """
    record, label = submission.record(), submission.label
    ran = job_of_run(submission)
    refuse_unchangeable(ran, label, chosen)
    count, seconds = repeats or MIN_REPEATS, minutes * 60 if facts.channel else 0.0
    original = _single(ran, submission.index)
    changed = changed_job(original, chosen.fields)
    jobs = [_shortened(job, facts, seconds) for job in (original, changed)]
    seed = ProgramArguments(jobs[0].args).first(SEED_ARGUMENTS)
    if seed is not None and ProgramArguments(jobs[1].args).value(seed) is not None:
        jobs = [_with_seed(job, seed) for job in jobs]
    else:
        seed = None
    for job in jobs:
        if problems := wrong_fields(job.to_json()):
            raise combined(problems, "")
        check_base(job, record["job_file"])
    plan = plan_of_jobs(
        dict(zip(_NAMES, jobs, strict=True)),
        name=f"{jobs[0].name[:36]}-try",
        base=submission.directory / str(record["job_file"]),
        metric="samples_per_second",
        repeats=count,
        seed=seed,
        backend=str(record["backend"]),
        now=now,
    )
    return replace(
        plan,
        site=chosen_site,
        argv=tuple(argv),
        notes=tuple(f"changed: {one.reason}" for one in chosen.made),
        trial=Trial(
            run=label,
            seconds=seconds,
            touches_accuracy=chosen.touches_accuracy,
            expected_seconds=_expected(facts, seconds),
            whole_seconds=facts.elapsed_seconds if facts.state == "COMPLETED" else None,
        ),
    )


def plan_of_jobs(
    jobs: Mapping[str, Job],
    *,
    name: str,
    base: Path,
    metric: str,
    repeats: int = 1,
    seed: str | None = None,
    backend: str = "",
    now: float = 0.0,
) -> SweepPlan:
    """Return the plan of a sweep of two jobs.

    Args:
        jobs: by the values of the axis.
        name: of the sweep.
        base: the job file of the first.
        metric: the figure that ranks the jobs: `samples_per_second` or `total_seconds`.
        repeats: runs of each.
        seed: the argument of the program that is its random seed, if both jobs have it.
        backend: `slurm` or `local`.
        now: seconds since the epoch.
    """
    sweep = make_sweep(
        {
            "base": str(base),
            "mode": "grid",
            "axes": {JOB_AXIS: [*jobs]},
            "repeats": repeats,
            "seeds": {"argument": seed} if seed else {},
            "budget": {"parallel": 1},
            "search": {
                "metric": metric,
                "direction": "maximize" if metric == "samples_per_second" else "minimize",
            },
        },
        base,
    )
    shapes = tuple(_shape(number, *pair) for number, pair in enumerate(jobs.items()))
    points = tuple(_points([*jobs], repeats, seeded=bool(seed)))
    hours = [shapes[point.shape] for point in points]
    return SweepPlan(
        id=new_id(name, now=now),
        name=name,
        mode="grid",
        sweep=sweep.model_dump(mode="json"),
        backend=backend,
        host=socket.gethostname() if backend == "local" else "",
        site="",
        argv=(),
        created=now,
        unit="",
        baseline=None,
        base_batch=None,
        base_learning_rate=None,
        placeholders={"seed": "seed"} if seed else {},
        shapes=shapes,
        points=points,
        blocks=tuple((first, first + 1) for first in range(0, 2 * repeats, 2)),
        estimate=SweepEstimate(
            len(points),
            *(
                sum(getattr(shape, unit) * shape.seconds for shape in hours) / 3600
                for unit in ("nodes", "cores", "gpus")
            ),
        ),
    )


def _single(job: Job, index: int | None) -> Job:
    resources = replace(job.resources, mail=None)
    if job.array is not None:
        job = with_texts(job, lambda _, text: text.replace("{array.index}", str(index or 0)))
    return replace(job, array=None, after=(), collect=(), resources=resources)


def _shortened(job: Job, facts: Facts, seconds: float) -> Job:
    if not seconds:
        return job
    needed = int(2 * setup_seconds(facts.phases) + seconds + _SPARE_SECONDS)
    if needed >= job.resources.time:
        return job
    return replace(job, resources=replace(job.resources, time=needed))


def _with_seed(job: Job, seed: str) -> Job:
    arguments = ProgramArguments(job.args)
    arguments.set(seed, "{point.seed}")
    return replace(job, args=tuple(arguments.words))


def _shape(number: int, name: str, job: Job) -> Shape:
    resources = job.resources
    ranks = resources.nodes * resources.ranks
    return Shape(
        number=number,
        fixed={JOB_AXIS: name},
        job=job,
        nodes=resources.nodes,
        ranks=ranks,
        gpus=resources.nodes * resources.gpu_count,
        cores=ranks * resources.cpus_per_rank,
        seconds=resources.time,
    )


def _points(names: Sequence[str], count: int, *, seeded: bool) -> Iterator[Point]:
    """Yield both runs of each repeat; their order alternates, so that a drift favours neither."""
    for repeat in range(count):
        for place in (0, 1):
            shape = (repeat + place) % 2
            yield Point(
                number=2 * repeat + place,
                shape=shape,
                values={JOB_AXIS: names[shape]},
                repeat=repeat,
                seed=repeat + 1,
                variables={"seed": str(repeat + 1)} if seeded else {},
            )


def _expected(facts: Facts, seconds: float) -> float | None:
    if facts.elapsed_seconds is None:
        return None
    short = setup_seconds(facts.phases) + facts.phases.get("end", 0.0) + seconds
    return min(facts.elapsed_seconds, short) if seconds else facts.elapsed_seconds


def summary_lines(plan: SweepPlan) -> list[str]:
    """Return what a trial will do and cost, for the prompt before it starts."""
    count, trial = plan.spec.count, _trial(plan)
    runs = counted(plan.estimate.points, "run")
    how = "whole runs"
    if trial.seconds:
        how = f"each is stopped after {seconds_text(trial.seconds)} of training"
    each = f"{count} of the job and {count} of the changed one"
    lines = [f"try      {runs} in turn: {each}"]
    lines += [f"         {note}" for note in plan.notes]
    lines.append(f"length   {how}")
    nodes, expected = plan.shapes[0].nodes + plan.shapes[1].nodes, trial.expected_seconds
    most = f"at most {plan.estimate.node_hours:.2g} node-hours, by their time limits"
    if expected is not None:
        hours = nodes * count * expected / 3600
        most = f"about {hours:.2g} node-hours, by what {trial.run} took; {most}"
    return [*lines, f"cost     {most}"]


def _trial(plan: SweepPlan) -> Trial:
    if plan.trial is None:
        raise ValueError(f"{plan.id} is not a trial")
    return plan.trial


_STOPPED = "stopped after"


def stopped_reason(plan: SweepPlan) -> str:
    """Return why a run of a trial ended early."""
    return f"{_STOPPED} {seconds_text(_trial(plan).seconds)} of training"


def is_stopped(row: PointRow) -> bool:
    """Return whether a run was stopped before the program was done."""
    return row.state == "PRUNED" or _STOPPED in row.reason
