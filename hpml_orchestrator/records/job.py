"""The definition of a job, shared by job files, records, scripts and nodes.

The docstring below a field is its description in the JSON Schema and the reference. `to_json` and
`from_json` write and read all of these classes, also on nodes; `jobfile` validates job files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import posixpath
import re
import signal
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Optional,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records import units as text
from hpml_orchestrator.records.ids import ArraySpec, parse_array
from hpml_orchestrator.records.units import (
    INTEGER_OR_TEXT,
    TIME_FORMS,
    Between,
    Checked,
    Entries,
    Flag,
    Gpus,
    Prepared,
    Unit,
    format_time,
    no_dash,
    parse_time,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

    from hpml_orchestrator.records.units import Make

Json = dict[str, Any]
"""Fields as in a job file or record."""


class _Field(NamedTuple):
    name: str
    read: Make
    write: Make
    default: object  # `dataclasses.MISSING` if required


class JobPart:
    """Base class of a job and its parts: writes and reads their fields."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic reads it from the class

    @classmethod
    def _fields(cls) -> list[_Field]:
        if cls not in _FIELDS:
            hints = get_type_hints(cls, include_extras=True)
            _FIELDS[cls] = [
                _Field(one.name, *_codec(hints[one.name]), _default(one))
                for one in dataclasses.fields(cls)  # type: ignore[arg-type] # each part is one
            ]
        return _FIELDS[cls]

    def to_json(self, *, defaults: bool = True) -> Json:
        """Return the fields as in job files and records, with units as text.

        Args:
            defaults: whether to include fields with their default.

        Raises:
            ValueError: a value has the wrong type; the message names the field.
        """
        written = {}
        for one in self._fields():
            value = getattr(self, one.name)
            if not defaults and value == one.default:
                continue
            try:
                brief = not defaults and _briefly(value)
                written[one.name] = brief or one.write(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{one.name}: {error}") from error
        return written

    def written(self, name: str) -> Any:
        """Return the value of a field as in a job file."""
        return next(one.write(getattr(self, name)) for one in self._fields() if one.name == name)

    @classmethod
    def written_defaults(cls) -> Json:
        """Return the defaults as in a job file, without required fields."""
        return {
            one.name: one.write(one.default)
            for one in cls._fields()
            if one.default is not dataclasses.MISSING
        }

    @classmethod
    def from_json(cls, given: Mapping[str, object]) -> Self:
        """Return the object from the output of `to_json`, also of another version.

        Missing fields get their default; unknown ones are ignored (see `with_unknown`).

        Raises:
            TypeError, ValueError: a value is invalid; ValueError names its field.
        """
        if not isinstance(given, dict):
            raise TypeError(f"{given!r} is not a mapping")
        values = {}
        for one in cls._fields():
            if one.name in given:
                try:
                    values[one.name] = one.read(given[one.name])
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{one.name}: {error}") from error
        return cls(**values)


_FIELDS: dict[type[JobPart], list[_Field]] = {}


def _briefly(value: object) -> object:
    if isinstance(value, JobPart):
        return value.to_json(defaults=False)
    if isinstance(value, tuple) and all(isinstance(one, JobPart) for one in value):
        return [one.to_json(defaults=False) for one in value]
    return None


def with_unknown(now: Mapping[str, object], before: Mapping[str, object]) -> Json:
    """Add the fields of an earlier record that this version does not know."""
    result = {**before, **now}
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and name != "variables":
            result[name] = with_unknown(value, old)
        elif isinstance(value, list) and isinstance(old, list) and len(value) == len(old):
            result[name] = [
                with_unknown(one, other) if isinstance(one, dict) else one
                for one, other in zip(value, old)
            ]
    return result


def _default(one: dataclasses.Field[Any]) -> object:
    made = one.default_factory
    return one.default if made is dataclasses.MISSING else made()


def _codec(hint: Any) -> tuple[Make, Make]:
    """Return the functions that read and write a value of a type."""
    if isinstance(hint, type) and issubclass(hint, JobPart):
        return hint.from_json, lambda value: _typed(hint, value).to_json()
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        units = [one for one in parts[1:] if isinstance(one, Unit)]
        if units:
            written, types = units[0].written, get_args(parts[0]) or (parts[0],)
            return units[0].parse, lambda value: written(_typed(types, value))
        prepare = next((one.prepare for one in parts[1:] if isinstance(one, Prepared)), None)
        read, write = _codec(parts[0])
        return (read if prepare is None else lambda value: read(prepare(value))), write
    if origin is Union:
        read, write = _codec(next(part for part in parts if part is not type(None)))
        return (
            lambda value: None if value is None else read(value),
            lambda value: None if value is None else write(value),
        )
    if origin is tuple:
        read, write = _codec(parts[0])
        return (
            lambda value: tuple(read(one) for one in _typed(list, value)),
            lambda value: [write(one) for one in _typed(tuple, value)],
        )
    if origin is dict:
        read, _ = _codec(parts[1])
        return (
            lambda value: {name: read(one) for name, one in _typed(dict, value).items()},
            lambda value: dict(_typed(dict, value)),
        )
    # a newer version may have added words to a Literal
    right = functools.partial(_typed, str if origin is Literal else hint)
    return right, right


def _typed(kinds: Union[type, tuple[type, ...]], value: Any) -> Any:
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if type(value) not in allowed:
        raise TypeError(f"{value!r} is not of type {allowed[0].__name__}")
    return value


Launcher = Literal["torchrun", "srun", "mpirun", "horovodrun"]
Policy = Literal["gpu-local", "socket", "numa", "spread", "none"]
Verify = Literal["strict", "warn", "off"]
MailEvent = Literal["begin", "end", "fail", "requeue", "time_limit_80", "time_limit_90"]
Reason = Literal["time_limit", "preemption", "node_failure", "hang"]
REASONS: tuple[Reason, ...] = ("time_limit", "preemption", "node_failure", "hang")
"""Ends after which a run can continue automatically."""

Signal = Literal["USR1", "USR2", "HUP", "INT", "TERM"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
"""Signals that can ask a program to save and stop."""

NO_GPUS = Gpus(())
PER_RUN = ("run.id", "array.index")
"""Placeholders in the directory of checkpoints."""

_UNSTOPPABLE = frozenset({"KILL", "STOP"})
_ONE_RUN = {"anyOf": [*reversed(INTEGER_OR_TEXT["anyOf"]), {"type": "null"}]}
_INDEX = {"type": "integer", "minimum": 0}
_INDICES = {
    "anyOf": [_INDEX, {"type": "string"}, {"type": "array", "items": _INDEX, "minItems": 1}]
}
_SIGNAL_FORMS = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_TORCHRUN_HINT = "use `launcher: torchrun`, whose ranks find what {} looks for in the environment"
_OTHER_LAUNCHERS = {
    "accelerate": _TORCHRUN_HINT.format("accelerate"),
    "deepspeed": _TORCHRUN_HINT.format("deepspeed.init_distributed()"),
    "lightning": _TORCHRUN_HINT.format("Lightning's Trainer") + "; give it num_nodes and devices",
    "python": "use `launcher: torchrun`; without GPUs it starts one rank",
    "torch": "use `launcher: torchrun`",
    "mpiexec": "use `launcher: mpirun`",
    "mpi": "use `launcher: mpirun`, or `launcher: srun` with `mpi: pmix`",
    "horovod": "use `launcher: horovodrun` on one node, `launcher: mpirun` on several",
    "slurm": "use `launcher: srun`",
}


def _launcher(value: object) -> object:
    hint = _OTHER_LAUNCHERS.get(value.lower()) if isinstance(value, str) else None
    if hint:
        raise ValueError(f"must be torchrun, srun, mpirun or horovodrun: {hint}")
    return value


_SHORT_FORMS: dict[str, tuple[type, str]] = {
    "binding": (str, "policy"),
    "monitor": (bool, "enabled"),
    "checkpoint": (bool, "enabled"),
}


def expand_shorthand(name: str, value: object) -> object:
    """Expand a field's short form to a mapping; return any other value as it is.

    >>> expand_shorthand("binding", "numa"), expand_shorthand("name", "a")
    ({'policy': 'numa'}, 'a')
    """
    kind, inner = _SHORT_FORMS.get(name, (None, ""))
    return {inner: value} if kind is not None and isinstance(value, kind) else value


def _short(name: str, **form: object) -> Prepared:
    return Prepared(functools.partial(expand_shorthand, name), also=form)


def _listed(value: object) -> object:
    if value is None:
        return []
    return value if isinstance(value, (list, tuple)) else [value]


def _program(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words[0]:
        raise ValueError("must begin with a program, not with an empty word")
    return words


def _mounts(paths: tuple[str, ...]) -> tuple[str, ...]:
    if any(not path.startswith("/") or "," in path for path in paths):
        raise ValueError("must be absolute paths without commas, PATH or PATH:INSIDE[:ro]")
    return paths


def _stage_target(value: str) -> str:
    if value not in ("shm", "local", "auto") and not value.startswith("/"):
        raise ValueError("must be shm, local, auto or an absolute path")
    return value


def _collected(value: str) -> str:
    if not re.match(r"/|~(/|$)|\{(local\.dir|shm\.dir|stage\.\w+|env\.\w+)\}(/|$)", value):
        raise ValueError(
            "must be a path on the nodes: begin it with {local.dir}, {shm.dir} or {stage.NAME}"
        )
    rest = value.partition("}")[2] if value.startswith("{") else value
    if re.search(r"[$*?]", rest) or ".." in rest.split("/"):
        raise ValueError("is taken as it is written: name a directory to bring all of it")
    if not value.strip("/"):
        raise ValueError("must be a file or directory below /")
    return value.rstrip("/")


def _checkpoint_directory(value: str) -> str:
    inside = value.removeprefix("{run.dir}")
    if inside != value:
        if inside[:1] not in {"", "/"}:
            raise ValueError("must continue with / after {run.dir}")
        inside = inside.lstrip("/")
    if re.search(r"[\x00-\x1f\x7f$*?]", inside):
        raise ValueError("must not hold $, *, ? or control characters: they stay as written")
    if value.startswith("~"):
        # checked before normalizing: ~/../group is not below the run's directory
        inside = os.path.expanduser(value)
    path = os.path.normpath(inside or ".")
    if path == "." or path.split("/")[0] == "..":
        raise ValueError(
            "must be a directory inside of the run's, such as checkpoints, or an absolute path"
        )
    if path.strip("/") == "":
        raise ValueError("must be a directory, not the root of all")
    return path


def _time_or(word: str, number: int | None) -> Unit:
    """Return the unit of a time that may also be a word, which is recorded as a number."""

    def parse(value: object) -> int | None:
        if isinstance(value, str) and value.strip().lower() == word:
            return number
        if word == "off" and value is False:
            return number
        try:
            return parse_time(value)
        except ValueError as error:
            limits = str(error) if "more than zero" in str(error) else f"a time: {TIME_FORMS}"
            raise ValueError(f"must be `{word}`, or {limits.removeprefix('must be ')}") from None

    def written(value: int | None) -> str:
        return word if value is None or value == number else format_time(value)

    forms = [*INTEGER_OR_TEXT["anyOf"], *([{"const": False}] if word == "off" else [])]
    return Unit(parse, written, {"anyOf": forms})


def _reasons(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [*dict.fromkeys(value)] if all(isinstance(one, str) for one in value) else value
    raise ValueError(f"must be a list of {', '.join(REASONS)}; with [] a run saves and ends there")


def _signal(value: object) -> object:
    if value is None:
        return None
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    name = str(value).strip().upper().removeprefix("SIG")
    allowed = f"must be one of {', '.join(SIGNALS)}"
    if number is not None or name.isdecimal():
        numbers = {int(getattr(signal, f"SIG{known}")): known for known in SIGNALS}
        meant = f": {name} is {numbers[int(name)]}" if int(name) in numbers else ""
        raise ValueError(f"{allowed}, by name{meant}")
    if name in _UNSTOPPABLE:
        raise ValueError(f"{allowed}: no program can handle {name}, so nothing would be saved")
    if name not in SIGNALS:
        hint = (
            " (how long before the limit is `checkpoint.lead`)" if re.search(r"[@:]", name) else ""
        )
        raise ValueError(allowed + hint)
    return name


@dataclass(frozen=True)
class Mail(JobPart):
    """Mail about the job."""

    to: text.Address
    """User name or mail address."""
    on: Annotated[tuple[MailEvent, ...], Entries(least=1)] = ("end", "fail")
    """Events to write about."""


@dataclass(frozen=True)
class Resources(JobPart):
    """Resources that the job requests."""

    nodes: Annotated[int, Between(1, 100_000)] = 1
    """Number of nodes."""
    gpus: text.GpuRequest = NO_GPUS
    """GPUs per node: a number, a typed list such as `a100:4`, or a MIG profile such as
    `1g.10gb:2`."""
    ranks_per_node: Optional[Annotated[int, Between(1, 10000)]] = None
    """Ranks per node; default: `ranks_per_gpu` for each GPU, or 1 without GPUs."""
    ranks_per_gpu: Annotated[int, Between(1, 100)] = 1
    """Ranks that share one GPU and the cores next to it."""
    cpus_per_rank: Annotated[int, Between(1, 100_000)] = 1
    """CPUs per rank, including its data loader workers."""
    memory: Optional[text.NodeMemory] = None
    """Memory per node, such as `64G`; data staged into RAM is added to it. `all` is all memory of
    each node."""
    memory_per_cpu: Optional[text.Memory] = None
    """Memory per CPU, such as `4G`, for clusters that require it; instead of `memory`."""
    time: text.Seconds = 3600
    """Time limit: `2h`, `1d12h`, or minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    partition: Optional[text.PlainWord] = None
    """Partition, or several separated by commas."""
    account: Optional[text.PlainWord] = None
    """Account to charge."""
    qos: Optional[text.PlainWord] = None
    """Quality of service."""
    constraint: Optional[text.Constraint] = None
    """Required node features, as sbatch takes them: `a100&nvlink`."""
    exclusive: Flag = False
    """Whether to request whole nodes."""
    mail: Optional[Mail] = None
    """Mail about the job."""
    extra: text.MoreOptions = ()
    """Other sbatch options, such as `--reservation=course`."""

    @property
    def gpu_count(self) -> int:
        """Number of GPUs per node."""
        return self.gpus.count

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or self.gpu_count * self.ranks_per_gpu or 1

    @property
    def cores(self) -> int:
        """CPUs per node."""
        return self.ranks * self.cpus_per_rank

    @property
    def node_memory(self) -> int:
        """MiB of memory per node; 0 if not set or all."""
        return self.memory_per_cpu * self.cores if self.memory_per_cpu else self.memory or 0

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Container(JobPart):
    """A container that the ranks run in."""

    engine: Literal["apptainer", "pyxis", "enroot"]
    """Container runtime; `pyxis` is enroot's plugin for srun, `enroot` needs no plugin."""
    image: Annotated[text.PathText, Checked(no_dash)]
    """Image file, a reference such as `docker://python:3.12` (apptainer) or
    `nvcr.io#nvidia/pytorch:26.09-py3` (pyxis), or a container's name (enroot)."""
    mounts: Annotated[tuple[text.PathText, ...], Entries(), Checked(_mounts)] = ()
    """Directories to mount, as `PATH` or `PATH:INSIDE[:ro]`."""


@dataclass(frozen=True)
class Environment(JobPart):
    """The environment of the ranks."""

    modules: Annotated[tuple[text.ModuleName, ...], Entries()] = ()
    """Environment modules to load, in order."""
    conda: Optional[Annotated[text.PathText, Checked(no_dash)]] = None
    """Conda environment: a name, or the path of its directory."""
    venv: Optional[text.PathText] = None
    """Directory of a Python virtual environment."""
    setup: Optional[text.ShellLines] = None
    """Shell lines to run after modules, venv and conda, before the ranks; the job ends if one of
    them fails."""
    python: Annotated[text.PathText, Checked(no_dash)] = "python"
    """Python interpreter, looked up after activation."""
    variables: Annotated[dict[text.VariableName, text.Argument], Entries()] = field(
        default_factory=dict
    )
    """Environment variables, with placeholders as in `args`; a leading `~/` is your home, other
    text is literal."""
    inherit: Literal["all", "minimal"] = "all"
    """What the job inherits from the environment of `hpml submit`: `all` except variables of
    schedulers and launchers, or only the variables of a fresh login."""
    container: Optional[Container] = None
    """Container that the ranks run in."""


@dataclass(frozen=True)
class Stage(JobPart):
    """Data to copy to every node before the ranks start."""

    name: text.StageName
    """Name; `{stage.NAME}` in arguments is its directory on the node."""
    source: text.PathText
    """File, directory or archive to copy."""
    kind: Literal["auto", "file", "tree", "tar", "zip", "pack"] = "auto"
    """Type of the source; archives (`tar`, `zip`) and directories of tar shards (`pack`) are
    unpacked, others are copied as they are. `auto` looks at the source, and unpacks shards only if
    `hpml pack` wrote them."""
    target: Annotated[text.PathText, Checked(_stage_target)] = "local"
    """Destination: `shm` (RAM), `local` (the node's disk), `auto` (RAM if large enough, else disk),
    or the path of a directory."""
    size: Optional[text.Memory] = None
    """Size of the staged data, such as `40G`; default: measured."""
    keep: Flag = False
    """Whether to keep it on the node for later jobs, which then need no copy; removed when space is
    needed."""
    trust_mtime: Flag = False
    """Whether to reuse kept data without checking each file if the source's own modification time
    has not changed."""
    distribution: Literal["auto", "shared", "chain"] = "auto"
    """How several nodes get it: `shared` (each reads the source), `chain` (one reads and passes it
    on), or `auto` (the faster one)."""
    outside_links: Flag = False
    """Whether to keep symbolic links that point outside the source; otherwise they are an error."""
    follow_links: Flag = False
    """Whether to copy the targets of symbolic links in a directory instead of the links."""
    hash: Flag = True
    """Whether to hash contents while copying, to detect damage."""


@dataclass(frozen=True)
class Collect(JobPart):
    """Results to copy from the nodes to the shared file system when the job ends."""

    source: Annotated[text.PathText, Checked(_collected)]
    """File or directory on the nodes; `{local.dir}` is the job's own directory on their disk,
    `{shm.dir}` that in RAM."""
    target: text.PathText
    """Directory on the shared file system: results are in `TARGET/RUN/NODE`."""

    @property
    def name(self) -> str:
        """Its name in the target."""
        return posixpath.basename(self.source).strip("{}")


@dataclass(frozen=True)
class Binding(JobPart):
    """Binding of each rank to cores and memory, and its verification."""

    policy: Policy = "gpu-local"
    """`gpu-local`: cores next to each rank's GPU. `socket`, `numa`: cores of one socket or NUMA
    domain only; without GPUs one rank per socket or domain. `spread`: equal parts of all cores.
    `none`: nothing is bound, but where each rank ran is recorded."""
    verify: Verify = "warn"
    """If a rank does not run as planned: `strict` fails the job, `warn` prints a warning, `off`
    does not check."""
    loader_workers: Annotated[int, Between(0, 1000)] = 0
    """Data loader processes per rank; each gets one of its cores."""
    hardware_threads: Flag = True
    """Whether ranks get all hardware threads of their cores or only the first; always the first
    with `--hint=nomultithread` or `--threads-per-core=1`."""


@dataclass(frozen=True)
class Monitor(JobPart):
    """The exporter that each node's agent runs for this job."""

    enabled: Flag = False
    """Whether the job is monitored; a mapping in a job file implies `true`."""
    listen: text.ListenAddress = "127.0.0.1:0"
    """ADDRESS:PORT to serve metrics at on each node; a free port if it is 0 or in use. Address
    `0.0.0.0` accepts requests from other machines."""
    web_config: Optional[text.PathText] = None
    """Prometheus web-config file with TLS and users; relative to the file that names it."""
    targets: Optional[text.PathText] = None
    """Directory for Prometheus' file_sd_configs, on the shared file system; default: targets/
    in the records' directory."""
    interval: Annotated[int, Between(1, 60)] = 1
    """Seconds between samples of the GPUs; processes are sampled every fifth time, the node's disks
    and networks every tenth."""


@dataclass(frozen=True)
class Checkpoint(JobPart):
    """How a run saves its state before it is stopped, and when it continues."""

    enabled: Flag = False
    """Whether the run saves and continues; a mapping in a job file implies `true`."""
    directory: Annotated[text.PathText, Checked(_checkpoint_directory)] = "checkpoints"
    """Directory of the checkpoints, `{checkpoint.dir}` in arguments. A relative path is in the
    run's directory, so that two runs never mix; an absolute one must be on shared storage and is
    used by every run that names it. `{run.id}` and `{array.index}` are replaced."""
    lead: Annotated[Optional[int], _time_or("auto", None)] = None
    """How long before the time limit the ranks are asked to save and stop: a time such as `10m`, a
    plain number is minutes. `auto`: the longest save and step so far and 15 s more; 5 minutes in
    the first attempt; at most a quarter of the limit."""
    requeue: Annotated[tuple[Reason, ...], Prepared(_reasons)] = REASONS
    """Ends after which the run continues automatically; with `[]` it saves and ends."""
    attempts: Annotated[int, Between(1, 10_000)] = 20
    """Maximum number of attempts, including the first. The run also ends after three attempts in a
    row without progress."""
    hang: Annotated[int, _time_or("off", 0)] = 1800
    """How long the ranks of a node may send nothing, once they have trained a step, before the
    attempt counts as hung and is ended: a time such as `45m`, a plain number is minutes; `off`
    for no limit."""
    avoid_failed_nodes: Flag = True
    """Whether to exclude nodes that failed or hung from the next attempt."""
    signal: Annotated[Optional[Signal], Prepared(_signal, accepts=_SIGNAL_FORMS)] = None
    """Signal that asks ranks to save and stop, such as `USR1`, for programs that do not use
    hpml_channel.py: `USR1`, `USR2`, `HUP`, `INT` or `TERM`, with or without SIG."""

    @property
    def is_shared(self) -> bool:
        """Whether other runs may use the same directory because its path is absolute."""
        return os.path.isabs(self.directory)

    @property
    def is_per_run(self) -> bool:
        """Whether each run and each array task has its own directory."""
        return not self.is_shared or any(f"{{{name}}}" in self.directory for name in PER_RUN)


@dataclass(frozen=True)
class Job(JobPart):
    """A training job."""

    name: text.JobName
    """Name of the job, at most 64 letters, digits and `. _ + -`."""
    launcher: Annotated[Launcher, Prepared(_launcher)] = "torchrun"
    """What starts the ranks: `torchrun` once per node, `srun` once per rank, `mpirun` of Open MPI
    on all nodes, or `horovodrun` on one node."""
    script: Optional[text.PathText] = None
    """Python script to run."""
    module: Optional[text.PlainWord] = None
    """Python module to run, as in `python -m`."""
    command: Optional[Annotated[tuple[text.Argument, ...], Entries(least=1), Checked(_program)]] = (
        None
    )
    """Any program with its arguments."""
    args: Annotated[tuple[text.Argument, ...], Entries()] = ()
    """Arguments. `{stage.NAME}` is the directory of staged data, `{run.dir}` the run's directory,
    `{run.id}` and `{job.id}` are ids, `{env.NAME}` is a variable of the job's environment,
    `{array.index}` the task's index, `{checkpoint.dir}` the directory of `checkpoint`,
    `{local.dir}` and `{shm.dir}` an empty directory of the job on each node's disk and in its RAM,
    a leading `~/` is your home; other text is literal."""
    array: Optional[Annotated[ArraySpec, Unit(parse_array, str, _INDICES)]] = None
    """Run one task per index: `0-9`, `1,3,7` or `0-31:4`; `%2` at the end runs at most two at
    once."""
    after: Annotated[tuple[text.After, ...], Prepared(_listed, also=_ONE_RUN), Entries(100)] = ()
    """Runs to wait for: `RUN` or `ok:RUN` until it completed, `any:RUN` until it is over,
    `notok:RUN` until it failed."""
    mpi: Literal["none", "pmix", "pmi2"] = "none"
    """srun's `--mpi`; only with `launcher: srun`."""
    workdir: text.PathText = "."
    """Directory to run in; relative to the job file."""
    snapshot: Flag = False
    """Whether to run a copy of the workdir's git repository, with uncommitted changes, taken at
    submission."""
    resources: Resources = Resources()
    """Resources to request."""
    environment: Environment = Environment()
    """Software, variables and container of the ranks."""
    stage: Annotated[tuple[Stage, ...], Entries(64)] = ()
    """Data to copy to every node first."""
    collect: Annotated[tuple[Collect, ...], Entries(64)] = ()
    """Results to copy back from every node at the end, most important first."""
    binding: Annotated[Binding, _short("binding", enum=[*get_args(Policy)])] = Binding()
    """Which cores and memory each rank gets: a policy, or a mapping."""
    monitor: Annotated[Monitor, _short("monitor", type="boolean")] = Monitor()
    """Whether to export metrics of this job and summarize them in its record: `true`, `false`, or a
    mapping."""
    checkpoint: Annotated[Checkpoint, _short("checkpoint", type="boolean")] = Checkpoint()
    """Whether the run saves its state before the time limit, at preemption and at a hang, and then
    continues: `true`, `false`, or a mapping."""

    @property
    def tasks_per_node(self) -> int:
        """Tasks that Slurm starts per node; 1 for torchrun, which starts the ranks itself."""
        # mpirun uses the number of tasks per node as the number of slots.
        return 1 if self.launcher == "torchrun" else self.resources.ranks

    @property
    def memory_mib(self) -> int:
        """MiB of memory to request per node: for the job and for data staged into RAM."""
        sizes = [stage.size for stage in self.stage if stage.target == "shm"]
        return self.resources.node_memory + sum(size or 0 for size in sizes)

    @property
    def has_submitit(self) -> bool:
        """Whether it runs a Python function submitted with submitit."""
        return "SUBMITIT_EXECUTOR" in self.environment.variables


JOB_FIELDS = tuple(one.name for one in dataclasses.fields(Job))
"""The names of the fields of a job file."""


# `agent.json`, next to a batch script: the job, and the part of the site profile that nodes need.
#
# It contains nothing about a single submission, so equal jobs have equal files.

AGENT_FILE = "agent.json"


@dataclass(frozen=True)
class SiteLimits(JobPart):
    """Limits of the site's file system, network and scheduler; unknown numbers are 0."""

    opens_per_second: int = 0
    """Maximum number of files that one node may open per second."""
    opens_per_second_per_job: int = 0
    """Maximum for all nodes of the job together."""
    metadata_rate: int = 0
    """Files per second that the file system can open in total."""
    shared_rate: int = 0
    """Bytes/s that the file system can read in total."""
    link_rate: int = 0
    """Bytes/s between two nodes."""
    disk_rate: int = 0
    """Bytes/s that a node's disk writes."""
    array_jitter: int = 0
    """Maximum number of seconds over which array tasks spread their start."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces between nodes, best first."""
    can_requeue: bool = True
    """Whether the owner of a job may requeue it."""


@dataclass(frozen=True)
class NodeJob(JobPart):
    """The contents of `agent.json`, for all nodes of a job."""

    job: Job
    site: SiteLimits = SiteLimits()

    def text(self) -> str:
        """Return the content of `agent.json`."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, submission: Path) -> NodeJob:
        """Read the `agent.json` in the directory of a batch script.

        Raises:
            RecordError: it is missing or damaged.
        """
        path = submission / AGENT_FILE
        try:
            # Paths are bytes: decode them with the file system encoding of this node.
            return cls.from_json(json.loads(os.fsdecode(path.read_bytes())))
        except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordError(
                f"{path} cannot be read ({why}): submit the job again, "
                "or write its files again with 'hpml render -o DIR'"
            ) from error
