"""From a sweep file to its plan: every point, seed and batch, their order, and what they may cost.

Sweeps without a meaningful result are refused here, with the reason: a strong sweep without a
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

from hpml_orchestrator.errors import InputError, did_you_mean
from hpml_orchestrator.jobfile.load import read_fields
from hpml_orchestrator.jobfile.sweep import MAX_POINTS, Range, Sweep
from hpml_orchestrator.jobfile.text import PLACEHOLDER
from hpml_orchestrator.records.ids import new_id
from hpml_orchestrator.records.job import JOB_FIELDS, Job
from hpml_orchestrator.records.units import format_time
from hpml_orchestrator.runs.load import SiteChoice, load_job
from hpml_orchestrator.scheduler.local.processes import cpu_ids
from hpml_orchestrator.scheduler.slurm.client import is_one_machine
from hpml_orchestrator.sweeps.plan import (
    GIVEN,
    RESUMED,
    SEED_ARGUMENTS,
    Point,
    ProgramArguments,
    Shape,
    SweepEstimate,
    SweepPlan,
    base_batch,
    base_learning_rate,
    check_base,
    point_of,
    scaled,
    with_batch,
)

_VARIABLES = "environment.variables."
_MOST_SUBMISSIONS = 60
_GP_TRIALS = 100  # from here on a Gaussian process takes long, and TPE is as good
_SECONDS_PER_HOUR = 3600


def make_plan(
    sweep: Sweep,
    *,
    backend: str,
    site: SiteChoice = None,
    argv: Sequence[str] = (),
    now: float,
) -> SweepPlan:
    """Return the plan of a sweep; nothing is written or submitted.

    Raises:
        InputError: something in the sweep is wrong; names the field, the value and what would be
            right.
    """
    planner = _Planner(sweep, backend, site)
    sweep = planner.sweep
    name = sweep.name or f"{planner.base.name}-{sweep.mode}"
    plan = SweepPlan(
        id=new_id(name, now=now),
        name=name,
        mode=sweep.mode,
        sweep=sweep.model_dump(mode="json"),
        backend=backend,
        host=socket.gethostname() if backend == "local" else "",
        site=site if isinstance(site, str) else "",
        argv=tuple(argv),
        created=now,
        unit=sweep.scale.unit if sweep.scale else "",
        baseline=(sweep.baseline or sweep.scale.sizes[0]) if sweep.scale else None,
        base_batch=base_batch(sweep, planner.base_ranks),
        base_learning_rate=base_learning_rate(sweep, planner.arguments, planner.base_ranks),
        placeholders=planner.placeholders,
        shapes=tuple(planner.shapes()),
        points=(),
        blocks=(),
        estimate=SweepEstimate(0, 0, 0, 0),
    )
    if not sweep.searches:
        plan = planner.with_points(plan)
    estimate = planner.estimate(plan)
    return replace(plan, estimate=estimate, notes=tuple(dict.fromkeys(planner.notes)))


def _kind(sweep: Sweep, axis: str) -> Literal["argument", "flag", "variable", "field"]:
    values = sweep.domains[axis]
    if axis.startswith("-") and isinstance(values, list):
        return "flag" if any(isinstance(value, bool) for value in values) else "argument"
    if axis.startswith("-") or axis.endswith("="):
        return "argument"
    return "variable" if axis.startswith(_VARIABLES) else "field"


class _Planner:
    """The base job of a sweep and what each axis sets in it, for the steps of planning.

    Attributes:
        sweep: the sweep with the values that its file leaves open: batch, seed, parallel runs.
        base: the base job; base_ranks: how many it has; arguments: its own.
        kinds: what each axis sets.
        placeholders: the placeholder of each value that goes into arguments or variables.
        notes: decisions and warnings for the user.
    """

    def __init__(self, sweep: Sweep, backend: str, site: SiteChoice) -> None:
        self._backend = backend
        self._settings = list(sweep.set.items())
        self._fields = read_fields(sweep.base)  # once, however many shapes there are
        base = load_job(sweep.base, self._settings, site, backend=backend, fields=self._fields)
        self.base, self._site = base.job, base.site
        check_base(self.base, sweep.base)
        self.arguments = ProgramArguments(self.base.args)
        self.base_ranks = self.base.resources.nodes * self.base.resources.ranks
        self.kinds = {axis: _kind(sweep, axis) for axis in sweep.axes}
        self._check_fields(sweep)
        self.notes: list[str] = []
        self.sweep = self._completed(sweep)
        self._targets = self._value_targets()
        self.placeholders = _placeholders(self._targets)

    def _check_fields(self, sweep: Sweep) -> None:
        """Check that axes other than arguments are fields of the job that may vary."""
        for name, axis in sweep.domains.items():
            for value in axis if isinstance(axis, list) else ():
                if isinstance(value, str) and PLACEHOLDER.search(value):
                    raise InputError(
                        "has no placeholders: they are replaced in the base job only",
                        field=f"axes.{name}",
                        value=value,
                        hint="write it in `args` of the base job",
                    )
        for name in (axis for axis, kind in self.kinds.items() if kind in ("field", "variable")):
            axis, place, top = sweep.domains[name], f"axes.{name}", name.partition(".")[0]
            if top not in JOB_FIELDS:
                raise InputError(
                    "is neither an argument nor a field of the job",
                    field=place,
                    value=name,
                    hint=f"an argument is written with its dashes, such as --{name}; "
                    "`hpml schema job` prints every field of a job",
                )
            if top in ("array", "after", "name", "args"):
                raise InputError("cannot be varied: the sweep sets it", field=place, value=name)
            if isinstance(axis, Range):
                raise InputError(
                    "a field of the job needs a list of values",
                    field=place,
                    hint=f"{name}: [{axis.low}, {axis.high}]",
                )

    def _completed(self, sweep: Sweep) -> Sweep:
        """Return the sweep with its batch, seed and parallel runs, and note what was decided."""
        sweep = with_batch(sweep, self.arguments, self.base_ranks)
        if sweep.scale is not None and sweep.batch is not None:
            whose = "one rank" if sweep.batch.per == "rank" else "all ranks"
            kept = "global batch" if sweep.mode == "strong" else "batch of a rank"
            self.notes.append(
                f"{sweep.batch.argument} is the batch of {whose}; the {kept} stays "
                f"{sweep.batch.size}"
            )
        seed = sweep.seeds.argument or self.arguments.first(SEED_ARGUMENTS)
        if sweep.mode == "grid" and sweep.repeats is None and seed is None:
            sweep = sweep.model_copy(update={"repeats": 1})
            self.notes.append(
                "each combination runs once, since nothing random is known to vary: name the "
                "argument of the random seed with seeds.argument, or give repeats"
            )
        if seed is None and sweep.count > 1:
            self.notes.append(
                "no argument for the random seed is known: repeats differ in timing alone; "
                "name it with seeds.argument"
            )
        named = [axis for axis in sweep.axes if axis.startswith("-")] + [seed] * bool(seed)
        new = [
            name
            for name in named
            if name and name not in self.base.args and self.arguments.value(name) is None
        ]
        if new:
            self.notes.append(f"not among the job's arguments, and appended: {', '.join(new)}")
        if sweep.scale is not None and sweep.learning_rate is None:
            self.notes.append(
                "the learning rate is left as it is: if the program multiplies it by the ranks, "
                "it differs between scales (see learning_rate in the sweep file)"
            )
        budget = sweep.budget
        if self._backend == "local" and sweep.scale is not None and budget.parallel is None:
            # Ranks of two runs on one machine would share its cores and caches, and a scaling
            # curve would measure that.
            budget = budget.model_copy(update={"parallel": 1})
            self.notes.append(
                "one run at a time: the sweep's runs do not disturb each other's times, but other "
                "programs on this machine can"
            )
        if self._backend == "local" and sweep.scale is None and sweep.parallel != 1:
            self.notes.append(
                "runs side by side disturb each other's times: budget.parallel: 1 prevents that"
            )
        seeds = sweep.seeds.model_copy(update={"argument": seed})
        search = sweep.search.model_copy(update={"sampler": self._sampler(sweep)})
        return sweep.model_copy(update={"budget": budget, "seeds": seeds, "search": search})

    def _sampler(self, sweep: Sweep) -> str:
        # Decided here and not by each controller, as the login nodes may differ in their packages.
        if sweep.mode != "bayes" or sweep.search.sampler != "auto":
            return sweep.search.sampler
        numeric = all(isinstance(axis, Range) for axis in sweep.axes.values())
        if not numeric or sweep.search.objectives or sweep.search.trials >= _GP_TRIALS:
            return "tpe"
        if find_spec("torch"):
            return "gp"
        self.notes.append(
            "the sampler is TPE: for these axes a Gaussian process finds better values with few "
            "trials, but needs `pip install torch`"
        )
        return "tpe"

    def _value_targets(self) -> dict[str, str]:
        sweep = self.sweep
        planned = [one.argument for one in (sweep.learning_rate, sweep.batch) if one is not None]
        if always := [axis for axis in planned if axis in sweep.conditions]:
            message = "the batch size and the learning rate of each run are planned: no `when` here"
            raise InputError(message, field=f"axes.{always[0]}.when")
        kinds = ("argument", "variable")
        targets = {axis: axis for axis, kind in self.kinds.items() if kind in kinds}
        if sweep.learning_rate is not None:
            targets[sweep.learning_rate.argument] = sweep.learning_rate.argument
        if sweep.batch is not None and sweep.scale is not None:
            targets["batch"] = sweep.batch.argument
        if sweep.seeds.argument is not None:
            targets["seed"] = sweep.seeds.argument
        if sweep.mode == "pbt":
            targets["checkpoint"] = sweep.search.resume_argument
        return targets

    def shapes(self) -> Iterator[Shape]:
        """Yield a shape for each scale and combination of fields and flags."""
        scale = self.sweep.scale
        sizes: Sequence[int | None] = scale.sizes if scale else [None]
        for number, (size, chosen) in enumerate(itertools.product(sizes, self._fixed())):
            fixed = dict(chosen)
            settings = self._shape_settings(fixed)
            if scale is not None and size is not None:
                settings += scaled(self.base.resources, scale.unit, size)
                fixed[scale.unit] = size
            yield self._shape(number, settings, fixed)

    def _fixed(self) -> list[dict[str, object]]:
        """Return what the points of a shape have in common, for each combination that occurs."""
        conditions = self.sweep.conditions
        shaped = [axis for axis, kind in self.kinds.items() if kind in ("field", "flag")]
        deciding = {*shaped, *itertools.chain.from_iterable(conditions.values())}
        lists: dict[str, Sequence[object]] = {
            axis: values if axis in deciding and isinstance(values, list) else [None]
            for axis, values in self.sweep.domains.items()
        }
        found: dict[tuple[object, ...], dict[str, object]] = {}
        for chosen in itertools.product(*lists.values()):
            values = self.sweep.applying(dict(zip(lists, chosen, strict=True)))
            fixed = {axis: values.get(axis) for axis in shaped}
            fixed |= {GIVEN + axis: axis in values for axis in conditions if axis not in shaped}
            found[tuple(fixed.values())] = fixed
        if self.sweep.mode == "pbt":
            return [{**fixed, RESUMED: on} for fixed in found.values() for on in (False, True)]
        return [*found.values()]

    def _shape_settings(self, fixed: Mapping[str, object]) -> list[tuple[str, object]]:
        settings, arguments = list(self._settings), ProgramArguments(self.base.args)
        for axis, value in fixed.items():
            if self.kinds.get(axis) == "flag":
                arguments.flag(axis, on=bool(value))
            elif axis in self.kinds and value is not None:
                settings.append((axis, value))
        for key, target in self._targets.items():
            word = f"{{point.{self.placeholders[key]}}}"
            if not fixed.get(GIVEN + key, True):
                arguments.remove(target)
            elif target.startswith(_VARIABLES):
                settings.append((target, word))
            elif key != "checkpoint" or fixed.get(RESUMED):
                arguments.set(target, word)
        return [*settings, ("args", arguments.words)]

    def _shape(
        self, number: int, settings: list[tuple[str, object]], fixed: Mapping[str, object]
    ) -> Shape:
        job = self._load(settings, fixed)
        check_base(job, self.sweep.base)  # an axis may change its checkpoints
        resources = job.resources
        ranks = resources.nodes * resources.ranks
        cores, here = ranks * resources.cpus_per_rank, len(cpu_ids())
        crowded = cores > here and (self._backend == "local" or is_one_machine(os.environ))
        if crowded and self._backend == "local" and resources.nodes == 1:
            overcommit = ("resources.extra", [*resources.extra, "--overcommit"])
            job = self._load([*settings, overcommit], fixed)
        if crowded:
            self.notes.append(
                f"{ranks} ranks share the {here} cores of this machine: such rows are "
                "marked as oversubscribed, and their speedup means nothing"
            )
        return Shape(
            number=number,
            fixed=fixed,
            job=job,
            nodes=resources.nodes,
            ranks=ranks,
            gpus=resources.nodes * resources.gpu_count,
            cores=min(cores, here) if crowded else cores,
            seconds=resources.time,
            oversubscribed=crowded,
        )

    def _load(self, settings: list[tuple[str, object]], fixed: Mapping[str, object]) -> Job:
        """Return the job of a shape; its errors name the axis or the scale."""
        names = self.placeholders.values()
        base = self.sweep.base
        try:
            return load_job(base, settings, self._site, points=names, fields=self._fields).job
        except InputError as error:
            axis = next((name for name in fixed if error.field and name in error.field), None)
            if axis is not None:
                place = "axes" if axis in self.kinds else "scale"
                error.hint = (
                    f"from {place}.{axis}: {fixed[axis]} of the sweep; `hpml schema job` prints "
                    "every field of a job"
                )
            raise

    def with_points(self, plan: SweepPlan) -> SweepPlan:
        """Return the plan with its points in order, and the blocks that they are submitted in."""
        points = [*self._points(plan)]
        blocks = self._blocks(points, len(plan.shapes))
        if not blocks:
            raise InputError("leave nothing to run", field="exclude", value=self.sweep.exclude)
        order = list(itertools.chain.from_iterable(blocks))
        order += [index for index, point in enumerate(points) if point.excluded]
        place = {index: number for number, index in enumerate(order)}
        return replace(
            plan,
            points=tuple(replace(points[index], number=place[index]) for index in order),
            blocks=tuple(tuple(place[index] for index in block) for block in blocks),
        )

    def _points(self, plan: SweepPlan) -> Iterator[Point]:
        """Yield all points in the file's order, the repeats of a combination in succession."""
        sweep = self.sweep
        scales: Sequence[int | None] = sweep.scale.sizes if sweep.scale else [None]
        axes = [axis for axis in sweep.domains.values() if not isinstance(axis, Range)]
        listed = len(sweep.combinations)
        count = (listed or math.prod(map(len, axes))) * len(scales) * sweep.count
        # Checked by arithmetic before any point is built: a few long axes have billions of
        # combinations.
        if count > MAX_POINTS:
            raise InputError(
                f"has {count} points, and at most {MAX_POINTS} are possible",
                field="axes",
                hint="fewer values or repeats, or a search: mode: random",
            )
        every = (dict(zip(sweep.axes, chosen, strict=True)) for chosen in itertools.product(*axes))
        wanted: Iterable[dict[str, object]] = map(sweep.applying, every)
        if listed:
            wanted = ({n: one[n] for n in sweep.axes if n in one} for one in sweep.combinations)
        # combinations that differ only in axes which do not apply are one
        unique = {tuple(values.items()): values for values in wanted}
        for scale, values in itertools.product(scales, unique.values()):
            for repeat in range(sweep.count):
                point = point_of(plan, 0, values, repeat=repeat, scale=scale)
                rule = self._excluding_rule(plan.unit, point)
                yield replace(point, excluded=rule) if rule else point

    def _excluding_rule(self, unit: str, point: Point) -> str:
        """Return the rule that excludes a point; empty if none does."""
        known: dict[str, object] = dict.fromkeys(self.sweep.conditions)  # None if it has no value
        known |= {**point.values, "repeat": point.repeat, "seed": point.seed, unit: point.scale}
        for number, rule in enumerate(self.sweep.exclude):
            for name in rule:
                if name not in known:
                    raise InputError(
                        "is not an axis of this sweep",
                        field=f"exclude.{number}.{name}",
                        value=name,
                        hint=did_you_mean(name, known)
                        or f"use {', '.join(name for name in known if name)}",
                    )
            if all(
                known[name] in (value if isinstance(value, list) else [value])
                for name, value in rule.items()
            ):
                return f"exclude rule {number + 1}: {json.dumps(rule)}"
        return ""

    def _blocks(self, points: Sequence[Point], shapes: int) -> list[list[int]]:
        """Return the points' indices in the order of submission; excluded ones are in none."""
        order, count = self.sweep.order, self.sweep.count
        shuffler = random.Random(0)  # the same file must give the same plan
        kept = [index for index, point in enumerate(points) if not point.excluded]
        size = -(-len(kept) // count)
        if order == "random":
            shuffler.shuffle(kept)
        blocks = [kept[start : start + size] for start in range(0, len(kept), size or 1)]
        # Each block has every setting once, in random order. A drift of the cluster then hits all
        # settings alike, and block n of two settings forms a pair for the statistics.
        if order == "interleaved":
            blocks = [[index for index in kept if points[index].repeat == n] for n in range(count)]
            for block in blocks:
                shuffler.shuffle(block)
        blocks = [block for block in blocks if block]
        # An array has one script, so each block takes a submission per shape. Sites limit how often
        # sbatch may be called, so the order is given up if it would take too many of them.
        if order != "written" and 1 < shapes <= _MOST_SUBMISSIONS // count:
            return blocks
        if order != "written" and shapes > 1:
            self.notes.append(
                f"{shapes} different jobs: their repeats are not interleaved, since each job "
                "array has to be of one kind"
            )
        whole = list(itertools.chain.from_iterable(blocks))
        return [whole] if whole else []

    def estimate(self, plan: SweepPlan) -> SweepEstimate:
        """Return what the sweep costs at most.

        Raises:
            InputError: the budget does not suffice for one point.
        """
        sweep, budget = self.sweep, self.sweep.budget
        shapes = [plan.shapes[point.shape] for point in plan.points if not point.excluded]
        if sweep.searches:
            # Which shapes a search will choose is not known, and the estimate is an upper bound.
            largest = max(plan.shapes, key=lambda shape: (shape.gpus, shape.cores))
            shapes = [largest] * (sweep.search.trials * sweep.count)
        hours = {
            name: [getattr(shape, name) * shape.seconds / _SECONDS_PER_HOUR for shape in shapes]
            for name in ("nodes", "cores", "gpus")
        }
        for name, most in (("gpus", budget.gpu_hours), ("cores", budget.core_hours)):
            unit, whole, largest_point = f"{name[:-1]}-hours", sum(hours[name]), max(hours[name])
            if most is not None and largest_point > most:
                raise InputError(
                    f"does not suffice for one point, which may take {largest_point:.3g} {unit} "
                    "until its time limit",
                    field=f"budget.{name[:-1]}_hours",
                    value=most,
                    hint="raise the budget, or lower resources.time",
                )
            if most is not None and whole > most:
                self.notes.append(
                    f"the budget of {most:g} {unit} is less than the {whole:.3g} that all points "
                    "may take: what goes beyond it is not submitted"
                )
        if sweep.seconds is not None and sweep.seconds < min(shape.seconds for shape in shapes):
            raise InputError(
                "is shorter than the time limit of one point",
                field="budget.time",
                value=format_time(sweep.seconds),
                hint="raise it, or lower resources.time",
            )
        return SweepEstimate(len(shapes), *map(sum, hours.values()))


def _placeholders(keys: Mapping[str, str]) -> dict[str, str]:
    """Return a placeholder for each value, valid as the name of a shell variable."""
    names: dict[str, str] = {}
    for key in keys:
        plain = re.sub(r"[^A-Za-z0-9]+", "_", key.removeprefix(_VARIABLES)).strip("_").lower()
        words = itertools.chain([plain or "value"], (f"{plain}_{n}" for n in itertools.count(2)))
        names[key] = next(word for word in words if word not in names.values())
    return names
