"""A sweep's plan: its points in order, the jobs that they share, and what they may cost.

It is on disk, complete, before anything is submitted:

    <records>/sweeps/<id>/plan.json        the sweep, its shapes, the estimate
    <records>/sweeps/<id>/points.jsonl     one point per line, in the order of the plan
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter

from hpml_orchestrator.errors import (
    InputError,
    NotFoundError,
    RecordError,
    did_you_mean,
    extra_hint,
)
from hpml_orchestrator.jobfile.load import leaves
from hpml_orchestrator.jobfile.sweep import BatchSize, Sweep
from hpml_orchestrator.records.files import read_json, read_lines, write_json, write_text
from hpml_orchestrator.records.ids import dated, named_by, parse_array
from hpml_orchestrator.records.job import Job, Json
from hpml_orchestrator.records.store import ids_in
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import Prepared
from hpml_orchestrator.runs.load import ResolvedJob
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Resources
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.site.model import ResolvedSite

# What changes from point to point: arguments, resources, batch size and learning rate.
#
# A strong sweep keeps the global batch, a weak one the batch of a rank; all other modes pass the
# value of the job or of the axis. The learning rate follows the global batch by a rule.

SEED_ARGUMENTS = "--seed --random-seed --random_seed".split()
"""Usual names of the argument that is the random seed."""

_RANK_BATCH = (
    "--batch-size --batch_size --bs --per-device-train-batch-size --per_device_train_batch_size "
    "--micro-batch-size --train-batch-size -b"
).split()
_OPTION = re.compile(r"-[A-Za-z-]")  # but not a negative number
_GLOBAL_BATCH = "--global-batch-size --global_batch_size --total-batch-size".split()


class ProgramArguments:
    """A program's arguments, as `--name=value`, `--name value` or `name=value`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def _places(self, name: str) -> list[tuple[int, str]]:
        prefix = name if name.endswith("=") else f"{name}="
        found = []
        pairs = itertools.pairwise([*self.words, "--"])
        for index, (word, following) in enumerate(pairs):
            if word.startswith(prefix):
                found.append((index, prefix))
            # `--flag --other` gives the flag no value; a negative number is one.
            elif word == name and not _OPTION.match(following):
                found.append((index + 1, ""))
        return found

    def value(self, name: str) -> str | None:
        """Return the value of an argument, None if it is not given; the last one of several."""
        places = self._places(name)
        # argparse, too, takes the last of several.
        return self.words[places[-1][0]].removeprefix(places[-1][1]) if places else None

    def set(self, name: str, value: str) -> None:
        """Replace an argument's value wherever it is given, or append it."""
        places = self._places(name)
        for index, prefix in places:
            self.words[index] = prefix + value
        if not places:
            self.words.append(f"{name.removesuffix('=')}={value}")

    def remove(self, name: str) -> None:
        """Remove an argument and its value wherever it is given."""
        for index, prefix in reversed(self._places(name)):
            del self.words[index if prefix else index - 1 : index + 1]

    def flag(self, name: str, *, on: bool) -> None:
        """Add an argument without a value, or remove it."""
        self.words = [word for word in self.words if word != name] + [name] * on

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of some arguments that is given."""
        return next((name for name in names if self.value(name) is not None), None)


def check_base(job: Job, file: object) -> None:
    """Check that the base job is a single one whose runs do not share their checkpoints.

    Raises:
        InputError: it is not.
    """
    if job.array is not None:
        raise InputError(
            "a sweep makes the arrays itself; the base job must be a single job",
            field="array",
            value=str(job.array),
            hint=f"remove `array` from {file}",
        )
    if job.checkpoint.enabled and not job.checkpoint.is_per_run:
        raise InputError(
            "would be the directory of every run of the sweep",
            field="checkpoint.directory",
            value=job.checkpoint.directory,
            hint="give a relative path, or put {run.id} into it",
        )


def batch_argument(arguments: ProgramArguments) -> tuple[str, int, bool] | None:
    """Return a program's usual argument for the batch, its value, and whether all ranks share it.

    None if it has none, or no whole number above zero.
    """
    name = arguments.first(_GLOBAL_BATCH + _RANK_BATCH)
    text = arguments.value(name) if name else None
    if name is None or text is None or not re.fullmatch(r"[1-9]\d{0,9}", text):
        return None
    return name, int(text), name in _GLOBAL_BATCH


def scaled(resources: Resources, unit: str, scale: int) -> list[tuple[str, object]]:
    """Return the fields that give the job the size of a scale.

    Raises:
        InputError: the scale does not fit the base job's nodes.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field=f"scale.{unit}", value=scale, hint=hint)

    if unit == "nodes":
        return [("resources.nodes", scale)]
    each = resources.gpu_count
    if unit == "ranks":
        if scale % resources.nodes:
            raise refused(
                f"cannot be divided over the base job's {resources.nodes} nodes",
                f"use multiples of {resources.nodes}, or scale: {{nodes: …}}",
            )
        if each:
            raise refused(
                "the base job has GPUs, whose number would stay the same",
                f"scale: {{gpus: [{scale}, …]}}",
            )
        return [("resources.ranks_per_node", scale // resources.nodes)]
    if not each:
        raise refused("the base job has no GPUs", "give resources.gpus, or scale: {ranks: …}")
    nodes, here = (1, scale) if scale < each else (scale // each, each)
    # `resources.gpus` counts per node, so all nodes of a job have the same number.
    if nodes * here != scale:
        raise refused(
            f"does not fill whole nodes of {each} GPUs", f"use multiples of {each}, or fewer"
        )
    kind, _, _ = str(resources.gpus).rpartition(":")
    fields: list[tuple[str, object]] = [
        ("resources.nodes", nodes),
        ("resources.gpus", f"{kind}:{here}" if kind else str(here)),
    ]
    if resources.ranks_per_node is not None:
        ranks, rest = divmod(resources.ranks_per_node * here, each)
        if rest or not ranks:
            raise refused(
                f"{resources.ranks_per_node} ranks on {each} GPUs cannot be cut down to {here}",
                "leave ranks_per_node out: there is one rank per GPU then",
            )
        fields.append(("resources.ranks_per_node", ranks))
    return fields


def with_batch(sweep: Sweep, arguments: ProgramArguments, base_ranks: int) -> Sweep:
    """Return the sweep with its batch size filled in; None if it has none.

    Raises:
        InputError: a strong or weak sweep has none.
    """
    scaling, batch = sweep.scale is not None, sweep.batch
    argument = batch.argument if batch else arguments.first(_GLOBAL_BATCH + _RANK_BATCH)
    if argument is None:
        if scaling:
            raise InputError(
                f"a {sweep.mode} sweep has to know the batch size, and the job's arguments have "
                "none by a usual name",
                field="batch",
                hint="give it in the job's args, or name its argument: batch: "
                "{argument: --my-batch, per: rank} or, on the command line, --batch --my-batch",
            )
        return sweep
    if scaling and argument in sweep.axes:
        message = f"a {sweep.mode} sweep keeps the batch; vary it in a grid"
        raise InputError(message, field=f"axes.{argument}")
    per = batch.per if batch else ("global" if argument in _GLOBAL_BATCH else "rank")
    size = batch.size if batch else None
    if size is None:
        text = arguments.value(argument)
        if text is None or not re.fullmatch(r"[1-9]\d{0,9}", text):
            if not scaling:
                return sweep.model_copy(update={"batch": None})
            raise InputError(
                "must be given in the job's args, as a whole number above zero",
                field=argument,
                value=text,
                hint=f"add {argument}=64 to args, or give batch.size",
            )
        size = int(text)
        if sweep.mode == "strong" and per == "rank":
            size *= base_ranks
        if sweep.mode == "weak" and per == "global":
            size //= base_ranks
    return sweep.model_copy(update={"batch": BatchSize(argument=argument, per=per, size=size)})


def _is_global(sweep: Sweep, batch: BatchSize) -> bool:
    return sweep.mode == "strong" or (sweep.mode != "weak" and batch.per == "global")


def base_batch(sweep: Sweep, base_ranks: int) -> int | None:
    """Return the global batch of the base job, None if unknown."""
    batch = sweep.batch
    if batch is None or batch.size is None:
        return None
    return batch.size * (1 if _is_global(sweep, batch) else base_ranks)


def batch_of(
    sweep: Sweep, ranks: int, values: Mapping[str, object]
) -> tuple[int | None, int | None]:
    """Return the batch of one rank and the global one; None if unknown.

    Raises:
        InputError: the global batch of a strong sweep cannot be divided over the ranks.
    """
    batch = sweep.batch
    size = values.get(batch.argument, batch.size) if batch else None
    if batch is None or not isinstance(size, int):
        return None, None
    if not _is_global(sweep, batch):
        return size, size * ranks
    if size % ranks and sweep.mode == "strong":
        near = sorted({size - size % ranks or ranks, size - size % ranks + ranks})
        raise InputError(
            f"a global batch of {size} cannot be divided over {ranks} ranks",
            field="batch.size",
            value=size,
            hint=f"{' and '.join(map(str, near))} can be: a strong sweep keeps the global batch; "
            "set batch.size to a multiple of every number of ranks",
        )
    return None if size % ranks else size // ranks, size


def base_learning_rate(sweep: Sweep, arguments: ProgramArguments, base_ranks: int) -> float | None:
    """Return the learning rate of the base job's optimiser, None if the sweep sets none.

    Raises:
        InputError: the base job does not give it as a number.
    """
    rule = sweep.learning_rate
    if rule is None:
        return None
    # on an axis, each point has its own rate
    text = "1" if rule.argument in sweep.axes else arguments.value(rule.argument)
    try:
        rate = float(text or "")
    except ValueError:
        raise InputError(
            f"must be given in the job's args as a number, since {rule.argument} follows the rule "
            f"{rule.rule}",
            field="learning_rate.argument",
            value=text or rule.argument,
            hint=f"add {rule.argument}=0.1 to args",
        ) from None
    return rate * (base_ranks if rule.times_ranks else 1)


def learning_rate_of(
    sweep: Sweep,
    base: float | None,
    base_batch: int | None,
    batch: int | None,
    values: Mapping[str, object],
) -> float | None:
    """Return the optimiser's learning rate by the sweep's rule; None if the sweep sets none."""
    rule = sweep.learning_rate
    if rule is None or base is None:
        return None
    given = values.get(rule.argument, base)
    rate = float(given) if isinstance(given, (int, float, str)) else base
    growth = batch / base_batch if batch and base_batch else 1.0
    return rate * {"constant": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule.rule]


RESUMED = "resumed"
"""The key by which shapes of a population differ: whether a member resumes a checkpoint."""

GIVEN = "with "
"""Begins the key by which shapes differ in whether a conditional argument is given."""

JOB_AXIS = "job"
"""The axis of a sweep of two jobs."""

_POINTS, _PLAN = "points.jsonl", "plan.json"
_EXTRA = ("matplotlib", "numpy", "optuna", "scipy")  # what searches and reports load


@dataclass(frozen=True)
class Shape:
    """Points whose scripts are equal: what differs between them comes from `points.sh`."""

    number: int  # its place in the plan, from 0
    # What all of its points have in common: axes that are fields of the job or flags (None where
    # they do not apply), whether conditional arguments are given, and the scale under its unit
    fixed: Mapping[str, object]
    # The complete job, `args` with `{point.NAME}` in place of a point's values
    job: Annotated[Job, Prepared(Job.from_json)]
    # `nodes`, `ranks`, `gpus`, `cores`: of one point, in all
    nodes: int
    ranks: int
    gpus: int
    cores: int
    seconds: int  # the time limit of one point
    oversubscribed: bool = False  # whether there are more ranks than cores of this machine


@dataclass(frozen=True)
class Point:
    """One planned run.

    Attributes:
        number: its place in the order of the plan, from 0; of a search `trial * repeats + repeat`.
        shape: number of its shape.
        scale: nodes, ranks or GPUs (`plan.unit`) of a strong or weak sweep, else None.
        values: the axes' values by their names in the sweep file.
        repeat: which repeat of these values it is, from 0.
        seed: random seed of the repeat, in a search of the trial and repeat.
        variables: what `points.sh` sets, by the placeholder's name: `{"lr": "0.1"}` for
            `{point.lr}`.
        batch_global, batch_per_rank: planned batch sizes, None if unknown.
        learning_rate: planned, of the optimiser; None if the sweep does not set it.
        excluded: why it does not run; empty if it does.
    """

    number: int
    shape: int
    scale: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 0
    seed: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    batch_global: int | None = None
    batch_per_rank: int | None = None
    learning_rate: float | None = None
    excluded: str = ""


@dataclass(frozen=True)
class SweepEstimate:
    """What the whole sweep costs at most: every point until its time limit, without retries."""

    points: int
    node_hours: float
    core_hours: float
    gpu_hours: float


@dataclass(frozen=True)
class Trial:
    """What `hpml report --try` tries, see `trial.py`."""

    run: str  # label of the run that proposed the change
    seconds: float  # of training after which a run is stopped; 0: never
    touches_accuracy: bool
    expected_seconds: float | None  # of one run
    whole_seconds: float | None  # that the run took, if it completed


@dataclass(frozen=True)
class SweepPlan:
    """Everything that is decided before the first submission."""

    id: str  # `<name>-<date>-<time>-<6 characters>`, as of runs
    name: str  # the sweep's name
    mode: str  # as in the sweep file
    # The whole sweep file (`Sweep.model_dump(mode="json")`), with `batch` completed by the planner
    sweep: Mapping[str, Any]
    backend: str  # `slurm` or `local`
    host: str  # the machine of the local backend
    site: str  # the site profile that was chosen with `--site`; empty for the usual ones
    argv: tuple[str, ...]  # the command line
    created: float  # seconds since the epoch
    unit: str  # `nodes`, `ranks` or `gpus` of a strong or weak sweep, else empty
    baseline: int | None  # the scale that speedups refer to, None without scales
    base_batch: int | None  # global batch of the base job
    base_learning_rate: float | None  # its optimiser's
    # The placeholder's name of each axis, and of `seed`, `batch`, `checkpoint`
    placeholders: Mapping[str, str]
    shapes: tuple[Shape, ...]
    points: tuple[Point, ...]  # those of a search are in its batches
    # Numbers of the points that are submitted together, in order of submission
    blocks: tuple[tuple[int, ...], ...]
    estimate: SweepEstimate  # the most that it may cost
    # Decisions of the planner, such as which argument is the batch size
    notes: tuple[str, ...] = ()
    cluster: str = ""  # the Slurm cluster; empty if unknown
    trial: Trial | None = None

    @cached_property
    def spec(self) -> Sweep:
        """The sweep file."""
        return Sweep.model_validate(self.sweep)

    @property
    def takes_turns(self) -> bool:
        """Whether the settings take turns; many different jobs do not (`expand`)."""
        return self.spec.order != "written" and (len(self.blocks) > 1 or len(self.shapes) <= 1)

    @property
    def in_blocks(self) -> bool:
        """Whether each repeat runs every setting, so that runs are compared within it."""
        compares = self.mode in ("strong", "weak") or self.trial is not None
        return compares and self.spec.order == "interleaved" and self.takes_turns

    def head(self) -> Json:
        """Return the plan as it is recorded, without its points, of which there may be many."""
        shapes = [{**vars(shape), "job": shape.job.to_json()} for shape in self.shapes]
        return {**asdict(replace(self, shapes=(), points=())), "shapes": shapes}

    def values_of(self, point: Point) -> dict[str, Any]:
        """Return the values of a point, with None for each axis that does not apply to it."""
        spec = self.spec
        if not spec.conditions or not point.values.keys() <= spec.axes.keys():
            return dict(point.values)
        return {axis: point.values.get(axis) for axis in spec.axes}

    @cached_property
    def shapes_by_values(self) -> Mapping[tuple[object, ...], Shape]:
        """The shapes by the values of `fixed`, whose names are the same in all of them."""
        return {tuple(shape.fixed.values()): shape for shape in self.shapes}


def point_of(
    plan: SweepPlan,
    number: int,
    values: Mapping[str, object],
    *,
    repeat: int = 0,
    scale: int | None = None,
    checkpoint: str = "",
) -> Point:
    """Return the point for values of the axes: its shape, what `points.sh` sets, its batch.

    Raises:
        InputError: the global batch cannot be divided over the ranks.
    """
    sweep = plan.spec
    # With the same seed for all trials a search would tune its values to that seed.
    own = 1 + (number if sweep.searches else repeat)
    seed = sweep.seeds.values[repeat] if sweep.seeds.values else own
    known = {**values, plan.unit: scale, RESUMED: bool(checkpoint)}
    known |= {GIVEN + axis: axis in values for axis in sweep.conditions}
    shape = plan.shapes_by_values[tuple(known.get(name) for name in plan.shapes[0].fixed)]
    per_rank, whole = batch_of(sweep, shape.ranks, values)
    rate = learning_rate_of(sweep, plan.base_learning_rate, plan.base_batch, whole, values)
    texts = {
        name: json.dumps(value) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    } | {"seed": str(seed), "checkpoint": checkpoint}
    if sweep.batch is not None:
        texts["batch"] = str(whole if sweep.batch.per == "global" else per_rank)
    if sweep.learning_rate is not None and rate is not None:
        given = rate / shape.ranks if sweep.learning_rate.times_ranks else rate
        # Twelve digits hide the rounding of the division: 0.1, not 0.09999999999999999.
        texts[sweep.learning_rate.argument] = f"{given:.12g}"
    wanted = [axis for axis in plan.placeholders if checkpoint or axis != "checkpoint"]
    wanted = [axis for axis in wanted if axis in values or axis not in sweep.conditions]
    return Point(
        number=number,
        shape=shape.number,
        scale=scale,
        values=dict(values),
        repeat=repeat,
        seed=seed,
        variables={plan.placeholders[axis]: texts[axis] for axis in wanted},
        batch_global=whole,
        batch_per_rank=per_rank,
        learning_rate=rate,
    )


def job_of(
    plan: SweepPlan, shape: Shape, array: str, site: ResolvedSite | None = None
) -> ResolvedJob:
    """Return the job of a shape as an array of tasks, such as `0-99%8`."""
    job = replace(shape.job, array=parse_array(array))
    origins = dict.fromkeys(leaves(job.to_json()), f"sweep {plan.id}")
    return ResolvedJob(job, Path(plan.spec.base), origins, plan.backend, site)


def site_of(plan: SweepPlan, environment: Mapping[str, str]) -> ResolvedSite | None:
    """Return the site profile that the sweep's jobs use."""
    return site_for(plan.spec.base, environment, chosen=plan.site, backend=plan.backend)


def directory_of(store: Store, plan_id: str) -> Path:
    """Return where a sweep's records are."""
    return store.root / "sweeps" / plan_id


def write(store: Store, plan: SweepPlan) -> Path:
    """Write a plan and return its directory.

    Raises:
        RecordError: it cannot be written; nothing is left behind.
    """
    target = directory_of(store, plan.id)
    # The rename makes the plan appear whole. Until then its name begins with a dot, and
    # commands that list sweeps skip it.
    temporary = target.parent / f".{plan.id}.tmp"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise RecordError(
            f"cannot write records under {store.root}: {error.strerror or error}",
            hint="set HPML_HOME to a directory that the nodes see too",
        ) from error
    # A point holds plain values: asdict would copy each of them.
    lines = (json.dumps(vars(point), separators=(",", ":")) for point in plan.points)
    try:
        write_text(temporary / _POINTS, "".join(f"{line}\n" for line in lines))
        write_json(temporary / _PLAN, plan.head())
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def read(directory: Path) -> SweepPlan:
    """Read a plan.

    Raises:
        NotFoundError: there is none.
        RecordError: it is damaged.
    """
    record = read_head(directory)
    try:
        points = [json.loads(line) for line in read_lines(directory / _POINTS)]
        return TypeAdapter(SweepPlan).validate_python({**record, "points": points})
    except (TypeError, ValueError) as error:
        raise RecordError(f"{directory / _PLAN} is damaged: {error}") from error


def read_head(directory: Path) -> Json:
    """Return what `SweepPlan.head` recorded."""
    return dict(read_json(directory / _PLAN))


def sweeps(store: Store) -> list[str]:
    """Return the ids of all sweeps, newest first."""
    return ids_in(store.root / "sweeps")


def check_extra() -> None:
    """Raise InputError if a package of the extra `sweep` is missing."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise InputError(
            f"sweeps need {' and '.join(missing)}, which this Python does not have",
            hint=extra_hint("sweep"),
        )


def resolve(store: Store, word: str, *, exact_name: bool = False) -> SweepPlan:
    """Find a sweep by its id, a unique beginning or end of it, or `last`.

    Args:
        store: where records live.
        word: what the user typed.
        exact_name: for commands that cannot be undone; see `ids.named_by`.

    Raises:
        NotFoundError: nothing fits.
        InputError: more than one fits.
    """
    known = sweeps(store)
    matches = known[:1] if word == "last" else named_by(word, known, exact_name=exact_name)
    if not matches:
        start = "`hpml sweep list` lists all" if known else "start one with `hpml sweep run`"
        hint = did_you_mean(word, [*known, *["last"][: len(known)]]) or start
        raise NotFoundError(f"no sweep {word!r} under {store.root / 'sweeps'}", hint=hint)
    if len(matches) > 1:
        raise InputError(
            f"names {len(matches)} sweeps: {first_few([*map(dated, matches)], 5)}",
            field="SWEEP",
            value=word,
            hint="give more of the id",
        )
    return read(directory_of(store, matches[0]))
