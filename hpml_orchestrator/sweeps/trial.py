"""`hpml report RUN --try`: does the proposed change help? A sweep of a job and the changed one.

Both jobs run in turn, repeat after repeat, and the order changes from repeat to repeat, so that a
drift of the machine hits both. Runs are stopped after some minutes of training if the program
reports its steps through the channel, else they run to their end.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
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
    SEED_ARGUMENTS,
    Point,
    ProgramArguments,
    Shape,
    SweepEstimate,
    SweepPlan,
    Trial,
    check_base,
)
from hpml_orchestrator.sweeps.statistics import MIN_REPEATS, Speedup, speedup
from hpml_orchestrator.sweeps.wording import accuracy_text

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.sweeps.rows import PointRow

_AXIS = "job"
_NAMES = _BEFORE, _AFTER = "original", "changed"
_USABLE = ("COMPLETED", "PRUNED")
_SETUP = ("start-up", "staging", "launch", "rendezvous", "preparation", "warm-up")
_SPARE_SECONDS = 1800  # of a shortened run's time limit, for slow nodes and the end
_SMALL_SECONDS = 1.0
_TIMES = 3.0  # from this speedup on it is given as a factor


@dataclass(frozen=True)
class TrialOutcome:
    """What the runs of a trial showed."""

    planned: int  # pairs in the plan
    pairs: int  # those of which both runs can be compared
    speedup: Speedup | None  # of the changed job over the original one; None without a pair
    # Whether all of these runs ended by themselves: their total times are compared; else their
    # samples per second
    whole: bool
    # Of both jobs, before and after: `samples_per_second`, `data_wait_ratio`, `setup_seconds`,
    # `accuracy`, if known for both
    medians: Mapping[str, tuple[float, float]]
    accuracy_name: str  # what `accuracy` is
    # Runs that are over and cannot be compared, by job: state and reason of the last
    failed: Mapping[str, tuple[int, str]]
    unfinished: bool  # whether runs are still to come


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
    placeholders = {}
    seed = ProgramArguments(jobs[0].args).first(SEED_ARGUMENTS)
    if seed is not None and ProgramArguments(jobs[1].args).value(seed) is not None:
        placeholders = {"seed": "seed"}
        jobs = [_with_seed(job, seed) for job in jobs]
    for job in jobs:
        if problems := wrong_fields(job.to_json()):
            raise combined(problems, "")
        check_base(job, record["job_file"])
    backend = str(record["backend"])
    sweep = make_sweep(
        {
            "base": str(record["job_file"]),
            "mode": "grid",
            "axes": {_AXIS: [_BEFORE, _AFTER]},
            "repeats": count,
            "seeds": {"argument": seed} if placeholders else {},
            "budget": {"parallel": 1},
            "search": {"metric": "samples_per_second"},
        },
        submission.directory / "trial",
        where="a trial",
    )
    shapes = tuple(_shape(number, name, jobs[number]) for number, name in enumerate(_NAMES))
    points = tuple(_points(count, seeded=bool(placeholders)))
    hours = [shapes[point.shape] for point in points]
    name = f"{jobs[0].name[:36]}-try"
    return SweepPlan(
        id=new_id(name, now=now),
        name=name,
        mode="grid",
        sweep=sweep.model_dump(mode="json"),
        backend=backend,
        host=socket.gethostname() if backend == "local" else "",
        site=chosen_site,
        argv=tuple(argv),
        created=now,
        unit="",
        baseline=None,
        base_batch=None,
        base_learning_rate=None,
        placeholders=placeholders,
        shapes=shapes,
        points=points,
        blocks=tuple((first, first + 1) for first in range(0, 2 * count, 2)),
        estimate=SweepEstimate(
            len(points),
            *(
                sum(getattr(shape, unit) * shape.seconds for shape in hours) / 3600
                for unit in ("nodes", "cores", "gpus")
            ),
        ),
        notes=tuple(f"changed: {one.reason}" for one in chosen.made),
        trial=Trial(
            run=label,
            seconds=seconds,
            touches_accuracy=chosen.touches_accuracy,
            expected_seconds=_expected(facts, seconds),
            whole_seconds=facts.elapsed_seconds if facts.state == "COMPLETED" else None,
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
    needed = int(2 * _setup(facts.phases) + seconds + _SPARE_SECONDS)
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
        fixed={_AXIS: name},
        job=job,
        nodes=resources.nodes,
        ranks=ranks,
        gpus=resources.nodes * resources.gpu_count,
        cores=ranks * resources.cpus_per_rank,
        seconds=resources.time,
    )


def _points(count: int, *, seeded: bool) -> Iterator[Point]:
    """Yield both runs of each repeat; their order alternates, so that a drift favours neither."""
    for repeat in range(count):
        for place in (0, 1):
            shape = (repeat + place) % 2
            yield Point(
                number=2 * repeat + place,
                shape=shape,
                values={_AXIS: _NAMES[shape]},
                repeat=repeat,
                seed=repeat + 1,
                variables={"seed": str(repeat + 1)} if seeded else {},
            )


def _setup(phases: Mapping[str, float]) -> float:
    return sum(phases.get(name, 0.0) for name in _SETUP)


def _expected(facts: Facts, seconds: float) -> float | None:
    if facts.elapsed_seconds is None:
        return None
    short = _setup(facts.phases) + facts.phases.get("end", 0.0) + seconds
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


def outcome(plan: SweepPlan, rows: Sequence[PointRow]) -> TrialOutcome:
    """Return what a trial showed so far."""
    points = {point.number: point for point in plan.points}
    last = {row.point: row for row in sorted(rows, key=lambda row: row.start)}
    usable: dict[str, dict[int, PointRow]] = {name: {} for name in _NAMES}
    failed: dict[str, tuple[int, str]] = {}
    for number, row in last.items():
        name = str(points[number].values[_AXIS])
        if row.state in _USABLE and row.total_seconds:
            usable[name][points[number].repeat] = row
        elif row.over and row.state != "EXCLUDED":
            text = f"{row.state}, {row.reason}" if row.reason else row.state
            failed[name] = failed.get(name, (0, ""))[0] + 1, f"{text} ({row.run})"
    repeats = sorted(usable[_BEFORE].keys() & usable[_AFTER].keys())
    pairs = [(usable[_BEFORE][repeat], usable[_AFTER][repeat]) for repeat in repeats]
    runs = [row for pair in pairs for row in pair]
    whole = not any(row.state == "PRUNED" or _STOPPED in row.reason for row in runs)
    # Stopped runs differ in how long they ran, so their total times mean nothing; their rates
    # still compare.
    if not whole:
        pairs = [pair for pair in pairs if all(row.samples_per_second for row in pair)]
    times = [
        tuple(
            (row.total_seconds or math.nan) if whole else 1 / (row.samples_per_second or math.nan)
            for row in pair
        )
        for pair in pairs
    ]
    return TrialOutcome(
        planned=plan.spec.count,
        pairs=len(pairs),
        speedup=speedup(*zip(*times, strict=True), paired=True) if times else None,
        whole=whole,
        medians=dict(_medians(pairs)),
        accuracy_name=accuracy_text({row.accuracy_name for row in runs}),
        failed=failed,
        unfinished=any(not row.over for row in last.values()) or len(last) < len(points),
    )


_STOPPED = "stopped after"


def stopped_reason(plan: SweepPlan) -> str:
    """Return why a run of a trial ended early."""
    return f"{_STOPPED} {seconds_text(_trial(plan).seconds)} of training"


def _medians(
    pairs: Sequence[tuple[PointRow, PointRow]],
) -> Iterator[tuple[str, tuple[float, float]]]:
    for name in ("samples_per_second", "data_wait_ratio", "setup_seconds", "accuracy"):
        both = [
            [_setup(row.phases) if name == "setup_seconds" else getattr(row, name) for row in rows]
            for rows in zip(*pairs, strict=True)
        ]
        if both and all(value is not None for values in both for value in values):
            yield name, (median(both[0]), median(both[1]))


def sentences(plan: SweepPlan, rows: Sequence[PointRow]) -> list[str]:
    """Return the answer of a trial: the speed in the first sentence, then what else changed."""
    found, trial = outcome(plan, rows), _trial(plan)
    lines = []
    if found.speedup is None:
        lines.append(
            "No pair of runs can be compared yet."
            if found.unfinished
            else "No pair of runs can be compared."
        )
    else:
        lines.append(f"{_speed_text(found.speedup, found)}{_waits(found)}.")
    lines += [
        f"Of the {name} job {counted(count, 'run')} cannot be compared: {why}."
        for name, (count, why) in found.failed.items()
    ]
    if found.unfinished and found.pairs:
        lines.append(f"{found.pairs} of {found.planned} pairs are done.")
    lines += _whole_run(found, trial)
    if trial.touches_accuracy and found.pairs:
        lines.append(_accuracy(found))
    return lines


def _speed_text(speed: Speedup, found: TrialOutcome) -> str:
    """Return how much faster the changed job is, such as `18% faster [15, 21] (6 pairs)`."""
    pairs = counted(found.pairs, "pair")
    ends, sign = speed.interval, 1 if speed.value >= 1 else -1
    values = [speed.value] if ends is None else [speed.value, ends.low, ends.high]
    unit = " times as fast"
    if speed.value < _TIMES:
        unit = "% faster" if sign > 0 else "% slower"
        values = [100 * sign * (value - 1) for value in values]
    digits = 0 if max(map(abs, values)) >= 10 else 1  # noqa: PLR2004 - two digits are enough
    value, *bounds = [f"{value:.{digits}f}" for value in values]
    if ends is None:
        verb = "is" if found.pairs == 1 else "are"
        few = f"{pairs} {verb} not enough to exclude noise, {MIN_REPEATS} are"
        return f"The changed job was {value}{unit}, but {few}"
    bounds = bounds[::sign] if speed.value < _TIMES else bounds
    text = f"{value}{unit} [{', '.join(bounds)}] ({pairs})"
    if not speed.distinguishable:
        return f"Not distinguishable: the changed job is {text}"
    return f"The changed job is {text}"


def _waits(found: TrialOutcome) -> str:
    if "data_wait_ratio" not in found.medians:
        return ""
    before, after = found.medians["data_wait_ratio"]
    return f", waiting for data {before:.0%} -> {after:.0%}"


def _whole_run(found: TrialOutcome, trial: Trial) -> Iterator[str]:
    if found.speedup is None:
        return
    if "samples_per_second" in found.medians:
        before, after = found.medians["samples_per_second"]
        yield f"Samples per second: {before:.4g} -> {after:.4g}."
    before, after = found.medians.get("setup_seconds", (0.0, 0.0))
    if found.whole or abs(after - before) < _SMALL_SECONDS:
        return
    text = f"Until the training begins it takes {before:.0f} -> {after:.0f} s"
    took = trial.whole_seconds
    if took and took > before:
        # The start-up changes by seconds, the rest of the run by a factor.
        share = took / (after + (took - before) / found.speedup.value) - 1
        word = "faster" if share >= 0 else "slower"
        text += f", so all of {trial.run} would be {abs(share):.0%} {word}"
    yield f"{text}."


def _accuracy(found: TrialOutcome) -> str:
    if found.whole and "accuracy" in found.medians:
        before, after = found.medians["accuracy"]
        name = found.accuracy_name
        return f"{name[:1].upper()}{name[1:]}: {before:.4f} -> {after:.4f}."
    if found.whole:
        return "The change can alter the accuracy, which the program does not report."
    return "The change can alter the accuracy: `--minutes 0` compares it in whole runs."
