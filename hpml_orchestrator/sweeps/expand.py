"""From a sweep file to its plan: every point, seed and batch, their order, and what they may cost.

What cannot be believed afterwards is refused here, with the reason: a strong sweep without a
batch size, a global batch that the ranks do not divide, a base job that is an array.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.paths import is_one_machine
from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.scheduler.local.resources import cpu_ids
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.load import read_fields
from hpml_orchestrator.spec.sweep import MAX_POINTS, Range, Sweep
from hpml_orchestrator.spec.values import parse_time
from hpml_orchestrator.sweeps import call
from hpml_orchestrator.sweeps.batchsize import (
    base_batch,
    base_learning_rate,
    batch_note,
    with_batch,
)
from hpml_orchestrator.sweeps.plan import (
    Estimate,
    Point,
    Shape,
    SweepPlan,
    point_of,
)
from hpml_orchestrator.sweeps.scaling import Arguments, check_function, scaled

if TYPE_CHECKING:
    from hpml_orchestrator.spec.site import ResolvedSite

__all__ = ["make_plan"]

_SEEDS = "--seed --random-seed --random_seed".split()
_MOST_SUBMISSIONS = 60
_SECONDS_PER_HOUR = 3600


def make_plan(
    sweep: Sweep,
    *,
    backend: str,
    site: ResolvedSite | None = None,
    chosen_site: str = "",
    argv: Sequence[str] = (),
    now: float,
) -> SweepPlan:
    """Return the plan of a sweep; nothing is written or submitted.

    Args:
        sweep: the sweep, with the base job's absolute path.
        backend: `slurm` or `local`.
        site: the site profile in use.
        chosen_site: the word of `--site`, kept for the submissions.
        argv: the command line, for the record.
        now: seconds since the epoch.

    Raises:
        InputError: something in the sweep is wrong; names the field, the value and what would be
            right.
    """
    return _Expansion(sweep, backend, site).plan(chosen_site, argv, now)


class _Expansion:
    """What the steps from a sweep to its plan have in common."""

    def __init__(self, sweep: Sweep, backend: str, site: ResolvedSite | None) -> None:
        self.backend, self.site = backend, site
        self.settings = list(sweep.set.items())
        if sweep.function:
            program = {"script": call.__file__, "module": None, "command": None}
            words = [sweep.function, sweep.search.metric]
            self.settings += [*program.items(), ("args", words)]
        self.fields = read_fields(sweep.base)  # once, however many shapes there are
        self.base = load_job(sweep.base, self.settings, site, fields=self.fields).job
        self.arguments = Arguments(self.base.args)
        self.notes: list[str] = []
        if self.base.array is not None:
            raise InputError(
                "a sweep makes arrays of its own; the base job must be a single one",
                field="array",
                value=self.base.array,
                hint=f"remove `array` from {sweep.base}",
            )
        self.base_ranks = self.base.resources.nodes * self.base.resources.ranks
        self._check_axes(sweep)
        if sweep.function:
            check_function(sweep)
        self.sweep = with_batch(sweep, self.arguments, self.base_ranks)
        if sweep.scale is not None and self.sweep.batch is not None:
            self.notes.append(batch_note(sweep.mode, self.sweep.batch))
        self.seed = sweep.seeds.argument or self.arguments.first(_SEEDS)
        if sweep.function:
            self.seed = "seed"
        if self.seed is None and self.sweep.count > 1:
            self.notes.append(
                "no argument for the random seed is known: repeats differ in timing alone; "
                "name it with seeds.argument"
            )
        self.placeholders = self._placeholders()
        self._note_arguments()
        if backend == "local" and sweep.scale is not None and sweep.budget.parallel is None:
            alone = sweep.budget.model_copy(update={"parallel": 1})
            self.sweep = self.sweep.model_copy(update={"budget": alone})
            self.notes.append("one run at a time, so that none disturbs another's timing")

    def _note_arguments(self) -> None:
        """Note what the sweep gives to a program that the base job does not, and what it keeps."""
        named = [axis for axis in self.sweep.axes if axis.startswith("-")]
        named += [self.sweep.seeds.argument] if self.sweep.seeds.argument else []
        new = [
            name
            for name in named
            if name not in self.base.args and self.arguments.value(name) is None
        ]
        if new and not self.sweep.function:
            self.notes.append(f"not among the job's arguments, and appended: {', '.join(new)}")
        if self.sweep.scale is not None and self.sweep.learning_rate is None:
            self.notes.append(
                "the learning rate is left as it is: where the program multiplies it by the ranks, "
                "it differs between scales (see learning_rate in the sweep file)"
            )
        if self.backend == "local" and self.sweep.scale is None and self.sweep.parallel != 1:
            self.notes.append(
                "runs side by side disturb each other's times: budget.parallel: 1 prevents that"
            )

    def plan(self, chosen_site: str, argv: Sequence[str], now: float) -> SweepPlan:
        sweep = self.sweep
        name = sweep.name or f"{self.base.name}-{sweep.mode}"
        scales: Sequence[int | None] = sweep.scale.sizes if sweep.scale else [None]
        empty = SweepPlan(
            id=new_id(name, now=now),
            name=name,
            mode=sweep.mode,
            sweep=sweep.model_dump(mode="json"),
            backend=self.backend,
            host=socket.gethostname() if self.backend == "local" else "",
            site=chosen_site,
            argv=tuple(argv),
            created=now,
            unit=sweep.scale.unit if sweep.scale else "",
            baseline=(sweep.baseline or sweep.scale.sizes[0]) if sweep.scale else None,
            base_batch=base_batch(sweep, self.base_ranks),
            base_learning_rate=base_learning_rate(sweep, self.arguments, self.base_ranks),
            placeholders=self.placeholders,
            shapes=tuple(self._shapes(scales)),
            points=(),
            blocks=(),
            estimate=Estimate(0, 0, 0, 0),
        )
        points = [] if sweep.searches else [*self._points(empty, scales)]
        blocks = self._blocks(points, len(empty.shapes))
        order = list(itertools.chain.from_iterable(blocks))
        order += [index for index, point in enumerate(points) if point.excluded]
        place = {index: number for number, index in enumerate(order)}
        whole = replace(
            empty,
            points=tuple(replace(points[index], number=place[index]) for index in order),
            blocks=tuple(tuple(place[index] for index in block) for block in blocks),
        )
        if not sweep.searches and not blocks:
            raise InputError("leave nothing to run", field="exclude", value=sweep.exclude)
        estimate = self._estimate(whole)
        return replace(whole, estimate=estimate, notes=tuple(self.notes))

    def _check_axes(self, sweep: Sweep) -> None:
        for name, axis in sweep.axes.items():
            place = f"axes.{name}"
            if not self._is_field(sweep, name):
                continue
            if isinstance(axis, Range):
                raise InputError(
                    "a field of the job needs a list of values",
                    field=place,
                    hint=f"{name}: [{axis.low}, {axis.high}]",
                )
            top = name.partition(".")[0]
            if top not in Job.model_fields:
                given = [word.partition("=")[0] for word in self.base.args]
                argument = nearest(f"--{name}", [*given, f"--{name}"])
                raise InputError(
                    "is neither an argument nor a field of the job",
                    field=place,
                    value=name,
                    hint=f"an argument is written with its dashes, such as {argument}; "
                    "`hpml schema job` prints every field of a job",
                )
            if top in ("array", "after", "name", "args"):
                raise InputError("cannot be varied: the sweep sets it", field=place, value=name)

    @staticmethod
    def _is_field(sweep: Sweep, name: str) -> bool:
        """Whether an axis is a field of the job, and not an argument of program or function."""
        if name.startswith("-") or name.endswith("="):
            return False
        return not (sweep.function and name.isidentifier() and name not in Job.model_fields)

    def _placeholders(self) -> dict[str, str]:
        """Return the placeholder of each value that goes into arguments or variables."""
        wanted: dict[str, str] = {}
        for axis, values in self.sweep.axes.items():
            if axis.startswith("environment.variables."):
                wanted[axis] = axis.rpartition(".")[2]
            elif not self._is_field(self.sweep, axis) and not _is_flag(axis, values):
                wanted[axis] = axis
        if self.sweep.learning_rate is not None:
            wanted[self.sweep.learning_rate.argument] = self.sweep.learning_rate.argument
        if self.sweep.batch is not None and self.sweep.scale is not None:
            wanted["batch"] = self.sweep.batch.argument
        if self.seed is not None:
            wanted["seed"] = "seed"
        if self.sweep.mode == "pbt":
            wanted["checkpoint"] = "checkpoint"
        names: dict[str, str] = {}
        for key, text in wanted.items():
            word = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower() or "value"
            spare = (f"{word}_{number}" for number in itertools.count(2))
            while word in names.values():
                word = next(spare)
            names[key] = word
        return names

    def _shapes(self, scales: Sequence[int | None]) -> Iterator[Shape]:
        """Yield a shape for each scale and combination of fields and flags."""
        sweep = self.sweep
        varied = {
            name: axis
            for name, axis in sweep.axes.items()
            if not isinstance(axis, Range)
            and name not in self.placeholders
            and (self._is_field(sweep, name) or _is_flag(name, axis))
        }
        resumes = (False, True) if sweep.mode == "pbt" else (False,)
        number = itertools.count()
        for scale, resumed in itertools.product(scales, resumes):
            for chosen in itertools.product(*varied.values()):
                values = dict(zip(varied, chosen, strict=True))
                yield self._shape(next(number), scale, values, resumed=resumed)

    def _shape(
        self, number: int, scale: int | None, values: Mapping[str, Any], *, resumed: bool
    ) -> Shape:
        settings = self._settings(values, resumed=resumed)
        fixed = {**values, **({"": resumed} if self.sweep.mode == "pbt" else {})}
        if scale is not None and self.sweep.scale is not None:
            settings += scaled(self.base.resources, self.sweep.scale.unit, scale)
            fixed[self.sweep.scale.unit] = scale
        job = self._load(settings, fixed)
        resources = job.resources
        ranks = resources.nodes * resources.ranks
        cores = ranks * resources.cpus_per_rank
        here = self.backend == "local" or is_one_machine(os.environ)
        crowded = here and cores > len(cpu_ids())
        if crowded and self.backend == "local" and resources.nodes == 1:
            settings.append(("resources.extra", [*resources.extra, "--overcommit"]))
            job = self._load(settings, fixed)
        if crowded:
            self.notes.append(
                f"{ranks} ranks share the {len(cpu_ids())} cores of this machine: such rows are "
                "marked as oversubscribed, and their speedup means nothing"
            )
        return Shape(
            number=number,
            fixed=fixed,
            job=job.model_dump(mode="json"),
            nodes=resources.nodes,
            ranks=ranks,
            gpus=resources.nodes * resources.gpu_count,
            cores=min(cores, len(cpu_ids())) if crowded else cores,
            seconds=parse_time(resources.time),
            oversubscribed=crowded,
        )

    def _settings(self, values: Mapping[str, Any], *, resumed: bool) -> list[tuple[str, Any]]:
        """Return the fields of a shape's job that differ from the base job's."""
        sweep, arguments = self.sweep, Arguments(self.base.args)
        settings = list(self.settings)
        for name, value in values.items():
            if self._is_field(sweep, name):
                settings.append((name, value))
            else:
                arguments.flag(name, on=bool(value))
        of_role = {
            "batch": sweep.batch.argument if sweep.batch else "",
            "seed": self.seed or "",
            "checkpoint": sweep.search.resume_argument if resumed else "",
        }
        for axis, placeholder in self.placeholders.items():
            word, argument = f"{{point.{placeholder}}}", of_role.get(axis, axis)
            if axis.startswith("environment.variables."):
                settings.append((axis, word))
            elif sweep.function:
                arguments.set(f"{argument}=", word)
            elif argument.startswith("-") or argument.endswith("="):
                arguments.set(argument, word)
        return [*settings, ("args", arguments.words)]

    def _load(self, settings: Collection[tuple[str, Any]], fixed: Mapping[str, Any]) -> Job:
        """Return the job of a shape; its errors name the axis or the scale."""
        try:
            return load_job(
                self.sweep.base,
                list(settings),
                self.site,
                points=self.placeholders.values(),
                fields=self.fields,
            ).job
        except InputError as error:
            axis = next((name for name in fixed if error.field and name in error.field), None)
            if axis is not None:
                error.hint = f"axes.{axis} has {fixed[axis]!r}: {error.hint}"
            raise

    def _points(self, plan: SweepPlan, scales: Sequence[int | None]) -> Iterator[Point]:
        """Yield all points as the file has them: repeats of a combination after one another."""
        sweep = self.sweep
        axes = {name: axis for name, axis in sweep.axes.items() if not isinstance(axis, Range)}
        count = math.prod(map(len, axes.values())) * len(scales) * sweep.count
        if count > MAX_POINTS:
            raise InputError(
                f"has {count} points, and at most {MAX_POINTS} are possible",
                field="axes",
                hint="fewer values or repeats, or a search: mode: random",
            )
        seeds = sweep.seeds.values or range(1, sweep.count + 1)
        for scale in scales:
            for chosen in itertools.product(*axes.values()):
                values = dict(zip(axes, chosen, strict=True))
                for repeat in range(sweep.count):
                    point = point_of(
                        plan,
                        0,
                        values,
                        repeat=repeat,
                        seed=seeds[repeat],
                        scale=scale,
                        sweep=sweep,
                    )
                    excluded = self._excluded(plan.unit, point)
                    yield replace(point, excluded=excluded) if excluded else point

    def _excluded(self, unit: str, point: Point) -> str:
        """Return the rule that leaves a point out; empty where it is to run."""
        known = {**point.values, "repeat": point.repeat, "seed": point.seed}
        if unit:
            known[unit] = point.scale
        for number, rule in enumerate(self.sweep.exclude):
            for name in rule:
                if name not in known:
                    near = nearest(name, known)
                    raise InputError(
                        "is no axis of this sweep",
                        field=f"exclude.{number}.{name}",
                        value=name,
                        hint=f"did you mean {near}?" if near else f"use {', '.join(known)}",
                    )
            if all(
                known[name] in (value if isinstance(value, list) else [value])
                for name, value in rule.items()
            ):
                return f"exclude rule {number + 1}: {json.dumps(rule)}"
        return ""

    def _blocks(self, points: Sequence[Point], shapes: int) -> list[list[int]]:
        """Return the points' indices in the order of submission; excluded ones are in none."""
        sweep = self.sweep
        kept = [index for index, point in enumerate(points) if not point.excluded]
        shuffler = random.Random(0)  # the plan has to be the same for the same file
        if sweep.order == "random":
            shuffler.shuffle(kept)
        by_repeat = []
        if sweep.order == "interleaved":
            for repeat in range(sweep.count):
                block = [index for index in kept if points[index].repeat == repeat]
                shuffler.shuffle(block)
                by_repeat.append(block)
            kept = list(itertools.chain.from_iterable(by_repeat))
        if sweep.order == "written" or shapes == 1 or not kept:
            return [kept] if kept else []
        if shapes * sweep.count > _MOST_SUBMISSIONS:
            self.notes.append(
                f"{shapes} different jobs: their repeats are not interleaved, since each job "
                "array has to be of one kind"
            )
            return [kept]
        if sweep.order == "interleaved":
            return [block for block in by_repeat if block]
        size = -(-len(kept) // sweep.count)
        return [kept[start : start + size] for start in range(0, len(kept), size)]

    def _estimate(self, plan: SweepPlan) -> Estimate:
        """Return what the sweep costs at most.

        Raises:
            InputError: the budget does not suffice for one point.
        """
        sweep = self.sweep
        if sweep.searches:
            largest = max(plan.shapes, key=lambda shape: (shape.gpus, shape.cores))
            shapes = [largest] * (sweep.search.trials * sweep.count)
        else:
            runs = (point for point in plan.points if not point.excluded)
            shapes = [plan.shapes[point.shape] for point in runs]

        def hours(noun: str) -> float:
            seconds = sum(int(getattr(shape, noun)) * shape.seconds for shape in shapes)
            return seconds / _SECONDS_PER_HOUR

        estimate = Estimate(len(shapes), hours("nodes"), hours("cores"), hours("gpus"))
        for name, most in (
            ("gpu_hours", sweep.budget.gpu_hours),
            ("core_hours", sweep.budget.core_hours),
        ):
            noun = name.partition("_")[0] + "s"
            needed = max(getattr(shape, noun) * shape.seconds for shape in shapes)
            if most is not None and needed / _SECONDS_PER_HOUR > most:
                raise InputError(
                    "does not suffice for one point, which may take "
                    f"{needed / _SECONDS_PER_HOUR:.3g} {name.replace('_', '-')} until its time "
                    "limit",
                    field=f"budget.{name}",
                    value=most,
                    hint="raise the budget, or lower resources.time",
                )
            if most is not None and getattr(estimate, name) > most:
                self.notes.append(
                    f"the budget of {most:g} {name.replace('_', '-')} is less than the "
                    f"{getattr(estimate, name):.3g} that all points may take: what goes beyond "
                    "it is not submitted"
                )
        if sweep.seconds is not None and sweep.seconds < min(shape.seconds for shape in shapes):
            raise InputError(
                "is shorter than the time limit of one point",
                field="budget.time",
                value=sweep.budget.time,
                hint="raise it, or lower resources.time",
            )
        self.notes = list(dict.fromkeys(self.notes))
        return estimate


def _is_flag(name: str, axis: object) -> bool:
    """Whether an axis is an argument that is given or not, without a value."""
    has_bool = isinstance(axis, list) and any(isinstance(value, bool) for value in axis)
    return name.startswith("-") and has_bool
