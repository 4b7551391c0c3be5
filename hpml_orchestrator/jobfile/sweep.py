"""The models of a sweep file: which runs of one job to start, in which order, at what cost."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.jobfile.load import read_mapping
from hpml_orchestrator.jobfile.rules import Model, combined, problems_of
from hpml_orchestrator.records import units

# The axes of a sweep: lists of values, ranges, and the conditions under which they apply.

_Number = StrictInt | StrictFloat
Positive = Annotated[_Number, Field(gt=0)]


def _plain(value: object) -> object:
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError("must be a number, a text, true or false")  # noqa: TRY004 - for pydantic
    return value


Scalar = Annotated[StrictBool | StrictInt | StrictFloat | str, BeforeValidator(_plain)]


def distinct(value: list[object]) -> list[object]:
    """Refuse a list with equal entries."""
    known: set[object] = set()
    for entry in value:
        if entry in known:
            raise ValueError(f"names {entry} twice")
        known.add(entry)
    return value


_Values = Annotated[list[Scalar], Field(min_length=1), AfterValidator(distinct)]
_When = dict[
    str,
    Annotated[
        Annotated[_Values, Tag("[values]")] | Annotated[Scalar, Tag("[value]")],
        Discriminator(lambda value: "[values]" if isinstance(value, list) else "[value]"),
    ],
]


class Choices(Model):
    """Values of an axis that applies only with some values of other axes."""

    values: _Values
    """The values."""
    when: Annotated[_When, Field(min_length=1)]
    """Values of other axes with which it applies, `{--model: vit}`. Runs with other values do not
    have this axis: the argument is left out, and a field stays as in the base job."""


class Range(Model):
    """A range from which a search takes values."""

    low: _Number
    """Smallest value."""
    high: _Number
    """Largest value."""
    log: StrictBool = False
    """Whether to search on a logarithmic scale."""
    step: Positive | None = None
    """Distance between neighbouring values; 1 for whole numbers."""
    when: _When = Field(default={})
    """Values of other axes with which it applies, as for a list."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"must have low below high, not {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above zero, and no step")
        return self

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def _axis_kind(value: object) -> str:
    if isinstance(value, Choices) or (isinstance(value, dict) and "values" in value):
        return "[choices]"
    return "[range]" if isinstance(value, (dict, Range)) else "[values]"


Axis = Annotated[
    Annotated[_Values, Tag("[values]")]
    | Annotated[Range, Tag("[range]")]
    | Annotated[Choices, Tag("[choices]")],
    Discriminator(_axis_kind),
]


FILE_VERSION = 1
"""Version of sweep files that this hpml reads."""

SEARCHES = ("random", "bayes", "evolution", "pbt")
"""Modes that choose points while they run, based on the results of earlier ones."""

_SCALING = ("strong", "weak")
MAX_POINTS = 100_000
"""Maximum number of points of a sweep."""

_NAME = r"^[A-Za-z_]\w*$"
_Value = TypeVar("_Value")
_Sizes = Annotated[
    list[Annotated[StrictInt, Field(ge=1)]], Field(min_length=1), AfterValidator(distinct)
]


class Scale(Model):
    """What grows from one scale to the next: one of three resources."""

    nodes: _Sizes | None = None
    """Numbers of nodes, each with the resources of the base job."""
    ranks: _Sizes | None = None
    """Total numbers of ranks, on as many nodes as the base job has."""
    gpus: _Sizes | None = None
    """Total numbers of GPUs; nodes of the base job's size are filled in turn."""

    @model_validator(mode="after")
    def _one(self) -> Scale:
        given = [name for name, sizes in self if sizes is not None]
        if len(given) != 1:
            raise ValueError(
                f"must have one of nodes, ranks and gpus, not {' and '.join(given) or 'none'}"
            )
        return self

    @property
    def unit(self) -> str:
        """`nodes`, `ranks` or `gpus`."""
        return next(name for name, sizes in self if sizes is not None)

    @property
    def sizes(self) -> list[int]:
        """The scales, in ascending order."""
        return sorted(next(sizes for _, sizes in self if sizes is not None))


class BatchSize(Model):
    """Which argument of the program is the batch size."""

    argument: units.Argument
    """Name of the argument, such as `--batch-size`."""
    per: Literal["rank", "global"] = "rank"
    """Whether the argument is the batch size of one rank or of all ranks together."""
    size: Annotated[StrictInt, Field(ge=1)] | None = None
    """The batch size that stays constant: the global one in a strong sweep, that of a rank in a
    weak
    one; default: that of the base job."""


class LearningRate(Model):
    """How the learning rate follows the global batch size."""

    argument: units.Argument
    """Name of the argument, such as `--lr`."""
    rule: Literal["constant", "linear", "sqrt"] = "constant"
    """How the learning rate grows with the global batch size."""
    times_ranks: StrictBool = False
    """Whether the program itself multiplies the argument by the number of ranks."""


class Seeds(Model):
    """The random seeds of the repeats."""

    argument: units.Argument | None = None
    """Name of the program's argument; default: `--seed` if the base job has it."""
    values: Annotated[list[StrictInt], Field(min_length=1), AfterValidator(distinct)] | None = None
    """One seed per repeat; default: 1, 2, 3, …; in a search, a different one for each run."""


class Budget(Model):
    """What the sweep may use."""

    gpu_hours: Positive | None = None
    """GPU-hours of all points together; nothing more is submitted beyond that."""
    core_hours: Positive | None = None
    """CPU core-hours of all points together."""
    time: units.Seconds | None = None
    """Wall-clock time since the start after which nothing more is submitted."""
    parallel: Annotated[StrictInt, Field(ge=1)] | None = None
    """Points that run at the same time; default: as many as the cluster starts, 4 in a search."""
    submits_per_minute: Annotated[StrictInt, Field(ge=1, le=600)] = 10
    """Calls of sbatch per minute."""


class MetricPattern(Model):
    """A figure in the program's output, for programs that report no results."""

    pattern: str
    """Regular expression with one group, the number; the last match in the run's output counts:
    `val_loss=([\\d.]+)`."""
    name: Annotated[str, Field(pattern=_NAME)] | None = None
    """Name in reports; default: the last word of the pattern before the group."""

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"must have one group in parentheses, the number, and has {groups}")
        return value

    def __str__(self) -> str:
        if self.name:
            return self.name
        plain = re.sub(r"\\.", " ", self.pattern)  # the d of \d is not a word of the output
        return str((re.findall(r"[A-Za-z_]\w*", plain.partition("(")[0]) or ["figure"])[-1])


_Direction = Literal["maximize", "minimize"]
_Figure = Annotated[str, Field(pattern=_NAME)]


def _metric_kind(value: object) -> str:
    if isinstance(value, list):
        return "[names]"
    return "[pattern]" if isinstance(value, (dict, MetricPattern)) else "[name]"


_Metric = Annotated[
    Annotated[_Figure, Tag("[name]")]
    | Annotated[MetricPattern, Tag("[pattern]")]
    | Annotated[list[_Figure], Field(min_length=2), AfterValidator(distinct), Tag("[names]")],
    Discriminator(_metric_kind),
]


class Search(Model):
    """How a search chooses its points."""

    trials: Annotated[StrictInt, Field(ge=1, le=MAX_POINTS)] = 20
    """Number of trials."""
    metric: _Metric | None = None
    """What to optimise: a figure of the result that the training reports, or a pattern of its
    output, `{pattern: 'val_loss=([\\d.]+)'}`. Default: `validation_accuracy` if the runs report it,
    else `test_accuracy`. A search by a test figure leaves no unseen data to test its choice on.
    Several figures, `[validation_accuracy, total_seconds]`, give a Pareto front (`random`, `bayes`
    and `grid`); `total_seconds` is the run's time from start to end."""
    direction: Annotated[
        Annotated[_Direction, Tag("[one]")] | Annotated[list[_Direction], Tag("[each]")],
        Discriminator(lambda value: "[each]" if isinstance(value, list) else "[one]"),
    ] = "maximize"
    """Whether higher or lower is better; for several figures a list, `[maximize, minimize]`."""
    sampler: Literal["auto", "tpe", "gp", "cmaes"] = "auto"
    """Optuna's sampler for the mode `bayes`. `auto`: a Gaussian process (`gp`) if all axes are
    ranges, there are fewer than 100 trials and torch is installed, else `tpe`. `cmaes` (CMA-ES) is
    for two or more ranges and a hundred or more trials."""
    pruner: Literal["none", "median", "halving"] = "none"
    """Which trials to stop early, based on the evaluations that they report."""
    seed: StrictInt = 1
    """Random seed of the search itself."""
    population: Annotated[StrictInt, Field(ge=2, le=10_000)] = 8
    """Members of the population (`evolution`, `pbt`), at most half of the trials."""
    tournament: Annotated[StrictInt, Field(ge=1)] = 3
    """Number of members of which the best becomes the parent (`evolution`)."""
    checkpoint: Annotated[str, Field(pattern=r"^[\w.][\w./-]*$")] = "checkpoint.pt"
    """File in `{run.dir}` that one generation passes to the next (`pbt`)."""
    resume_argument: units.Argument = "--checkpoint-from"
    """Argument that takes the parent's checkpoint (`pbt`)."""

    @property
    def metric_name(self) -> str:
        """Name of the metric in reports, the first of several; empty if the runs determine it."""
        first = self.metric[0] if isinstance(self.metric, list) else self.metric
        return "" if first is None else str(first)

    @property
    def objectives(self) -> dict[str, bool]:
        """Whether a higher value is better, by name of figure; empty for a single figure."""
        if not isinstance(self.metric, list):
            return {}
        return dict(zip(self.metric, (one == "maximize" for one in self.directions), strict=True))

    @property
    def directions(self) -> list[_Direction]:
        """The direction of each figure."""
        return self.direction if isinstance(self.direction, list) else [self.direction]

    @property
    def maximize(self) -> bool:
        """Whether a higher value of the first figure is better."""
        return self.directions[0] == "maximize"


class Sweep(Model):
    """A sweep: a base job, and what varies."""

    version: Literal[1] = 1
    """Version of the sweep file's format."""
    name: units.JobName | None = None
    """Name of the sweep; default: the job's name and the mode."""
    base: units.PathText
    """The job file of every point, relative to this file."""
    set: dict[str, object] = Field(default={})
    """Fields of the job to set, as `--set` does: `resources.time: 5:00`."""
    mode: Literal["strong", "weak", "grid", "random", "bayes", "evolution", "pbt"]
    """`strong`: more resources, same global batch size. `weak`: the batch size grows with them.
    `grid`: all combinations of the axes. The others search the axes; `evolution` beats `random`
    only
    from about 100 trials."""
    scale: Scale | None = None
    """What grows in a strong or weak sweep."""
    axes: dict[Annotated[str, Field(min_length=1)], Axis] = Field(default={})
    """What varies: an argument (`--lr`, or `lr=` for `lr=VALUE`) or a field of the job
    (`resources.cpus_per_rank`), with a list of values or, in a search, a range:
    `{low: 1e-4, high: 0.1, log: true}`. With `when` it applies to some runs only:
    `{values: [2, 4], when: {--model: vit}}`."""
    combinations: list[dict[str, Scalar]] = Field(default=[])
    """Combinations of the axes' values to run, `{--lr: 0.1, --width: 16}`; default: all."""
    repeats: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Runs per combination; default: 6, but 1 in a search, and in a grid without an argument for
    the
    random seed. Fewer than 6 give no 95 % interval."""
    seeds: Seeds = Seeds()
    """Random seeds of the repeats."""
    batch: BatchSize | None = None
    """The batch size; detected if the job has an argument with a usual name."""
    learning_rate: LearningRate | None = None
    """How the learning rate follows the batch size; by default the argument does not change."""
    baseline: Annotated[StrictInt, Field(ge=1)] | None = None
    """The scale that speedups refer to; default: the smallest."""
    target_accuracy: Annotated[StrictFloat | StrictInt, Field(gt=0, le=1)] | None = None
    """Accuracy for comparing the time to reach it; default: the target that the training
    reports."""
    order: Literal["interleaved", "random", "written"] = "interleaved"
    """`interleaved`: repeat by repeat, each in its own order; `random`: all mixed; `written`: as in
    this file."""
    exclude: list[Annotated[dict[str, object], Field(min_length=1)]] = Field(default=[])
    """Combinations to leave out: `{ranks: 4, --lr: [0.1, 0.2]}`."""
    retry: dict[
        Literal["FAILED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"],
        Annotated[StrictInt, Field(ge=0, le=100)],
    ] = Field(default={"PREEMPTED": 2, "NODE_FAIL": 2, "BOOT_FAIL": 2})
    """How often to start a point again after such an end."""
    budget: Budget = Budget()
    """What the sweep may use."""
    search: Search = Search()
    """How a search chooses its points."""

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: object) -> object:
        if value != FILE_VERSION:
            raise ValueError(
                f"must be {FILE_VERSION}, the form of sweep file that this hpml reads: "
                "install the hpml that wrote the file, or rewrite it"
            )
        return value

    @field_validator("retry", mode="before")
    @classmethod
    def _retry(cls, value: object) -> object:
        usual = {"PREEMPTED": 2, "NODE_FAIL": 2, "BOOT_FAIL": 2}
        return usual | value if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _combined(self) -> Sweep:
        for number, chosen in enumerate(self.combinations):
            applying = {name for name in self.axes if self._applies(name, chosen)}
            known = chosen.keys() == applying and self.mode not in SEARCHES
            axes = [(self.domains[name], value) for name, value in chosen.items() if known]
            if not known or any(isinstance(a, Range) or value not in a for a, value in axes):
                raise ValueError(f"combinations.{number}: must have a value of each axis")
        return self

    @model_validator(mode="after")
    def _conditional(self) -> Sweep:
        problems = []
        for name, when in self.conditions.items():
            for other, allowed in when.items():
                place, domain = f"axes.{name}.when", self.domains.get(other)
                if domain is None:
                    hint = did_you_mean(other, self.axes)
                    problems.append(f"{place}: {other} is no axis{hint and f'; {hint}'}")
                elif isinstance(domain, Range):
                    problems.append(f"{place}: {other} is a range; name an axis with a list")
                elif unknown := [str(value) for value in allowed if value not in domain]:
                    values = ", ".join(map(str, domain))
                    problems.append(f"{place}: {other} never is {unknown[0]}, but one of {values}")
        waiting = dict(self.conditions)
        while free := [name for name, when in waiting.items() if not waiting.keys() & when.keys()]:
            waiting = {name: when for name, when in waiting.items() if name not in free}
        if waiting:
            first, *others = waiting
            problems.append(f"axes.{first}.when: {' and '.join([first, *others])} form a circle")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def _directed(self) -> Sweep:
        metric, directions = self.search.metric, len(self.search.directions)
        figures = len(metric) if isinstance(metric, list) else 1
        if figures != directions:
            raise ValueError(
                f"search.direction: must have one direction for each of {figures} figures, "
                f"such as [maximize, minimize], and has {directions}"
                if figures > 1
                else "search.direction: a list needs as many figures in search.metric"
            )
        if figures > 1 and self.mode not in ("random", "bayes", "grid"):
            raise ValueError(
                f"search.metric: several figures belong to random, bayes and grid, not {self.mode}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Sweep:
        scaling, search = self.mode in _SCALING, self.mode in SEARCHES
        problems = []
        if scaling and self.scale is None:
            problems.append(f"scale: must be given in mode {self.mode}, such as {{nodes: [1, 2]}}")
        if not scaling and self.scale is not None:
            problems.append(f"scale: belongs to the modes strong and weak, not to {self.mode}")
        if not scaling and not self.axes:
            problems.append(f"axes: must name what varies in mode {self.mode}")
        for name, axis in self.axes.items():
            if isinstance(axis, Range) and not search:
                problems.append(f"axes.{name}: a range needs a search; give a list of values")
        if self.baseline is not None and not (self.scale and self.baseline in self.scale.sizes):
            problems.append(f"baseline: {self.baseline} is none of the scales")
        if self.seeds.values and len(self.seeds.values) < self.count:
            problems.append(f"seeds.values: must have a seed for each of {self.count} repeats")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def count(self) -> int:
        """Number of runs per combination."""
        return self.repeats or (1 if self.mode in SEARCHES else 6)

    @cached_property
    def domains(self) -> dict[str, list[Scalar] | Range]:
        """Values or range of each axis, whether or not it applies."""
        pairs = self.axes.items()
        return {name: axis.values if isinstance(axis, Choices) else axis for name, axis in pairs}

    @cached_property
    def conditions(self) -> dict[str, dict[str, list[Scalar]]]:
        """Axes with `when`, and the values of other axes with which they apply."""
        found = {}
        for name, axis in self.axes.items():
            if not isinstance(axis, list) and axis.when:
                pairs = axis.when.items()
                found[name] = {o: one if isinstance(one, list) else [one] for o, one in pairs}
        return found

    def _applies(self, name: str, values: Mapping[str, object]) -> bool:
        when = self.conditions.get(name, {})
        return all(values.get(other) in allowed for other, allowed in when.items())

    def applying(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return the values without those of axes that do not apply."""
        kept = dict(values)
        while left := [name for name in kept if not self._applies(name, kept)]:
            for name in left:
                del kept[name]
        return kept

    @property
    def searches(self) -> bool:
        """Whether it chooses its points while it runs."""
        return self.mode in SEARCHES

    @property
    def parallel(self) -> int | None:
        """Points that may run at the same time; None for as many as fit."""
        return self.budget.parallel or (4 if self.searches else None)

    @property
    def seconds(self) -> int | None:
        """Wall-clock time after which nothing more is submitted."""
        return self.budget.time


def load_sweep(path: str | Path) -> Sweep:
    """Load a sweep from a YAML or TOML file; the base job's path becomes absolute.

    Raises:
        NotFoundError: the file does not exist.
        InputError: something in it is wrong; every problem is named with its field.
    """
    source = Path(os.path.abspath(path))
    return make_sweep(read_mapping(source, "sweep file"), source)


def make_sweep(data: dict[str, object], source: Path, *, where: str = "") -> Sweep:
    """Return a sweep from its fields: paths are relative to `source`, errors name `where`."""
    base = data.get("base")
    if isinstance(base, str) and base:
        data = {**data, "base": os.path.join(source.parent, os.path.expanduser(base))}
    try:
        return Sweep.model_validate(data)
    except ValidationError as error:
        hint = f"in {where or source}; `hpml schema sweep` prints every field"
        raise combined(problems_of(error, Sweep), hint) from None
