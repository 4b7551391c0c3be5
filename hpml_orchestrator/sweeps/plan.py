"""A sweep's plan: its points in order, the jobs that they share, and what they may cost.

It is on disk, complete, before anything is submitted:

    <records>/sweeps/<id>/plan.json        the sweep, its shapes, the estimate
    <records>/sweeps/<id>/points.jsonl     one point per line, in the order of the plan
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
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
from hpml_orchestrator.jobfile.sweep import Sweep
from hpml_orchestrator.records.files import read_json, read_lines, write_json, write_text
from hpml_orchestrator.records.ids import dated, named_by, parse_array
from hpml_orchestrator.records.job import Job, Json
from hpml_orchestrator.records.store import ids_in
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import Prepared
from hpml_orchestrator.runs.prepare import ResolvedJob
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.sweeps.scaling import batch_of, learning_rate_of

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.site.model import ResolvedSite

RESUMED = "resumed"
"""The key by which shapes of a population differ: whether a member resumes a checkpoint."""

GIVEN = "with "
"""Begins the key by which shapes differ in whether a conditional argument is given."""

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
        """Whether each repeat runs every scale, so that runs are compared within it."""
        scaling = self.mode in ("strong", "weak")
        return scaling and self.spec.order == "interleaved" and self.takes_turns

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
