"""The job file's models: what to train, with what, where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpml_orchestrator.spec import text, values
from hpml_orchestrator.spec.array import ArraySpec, parse_array
from hpml_orchestrator.spec.checkpoint import Checkpoint
from hpml_orchestrator.spec.data import Collect, Stage
from hpml_orchestrator.spec.text import MAX_LIST, Model


def _no_dash(value: str | None) -> str | None:
    if value is not None and value.startswith("-"):
        raise ValueError("must not begin with a dash")
    return value


class Mail(Model):
    """Mail about the job."""

    to: text.Address
    """User name or mail address."""
    on: Annotated[
        list[Literal["begin", "end", "fail", "requeue", "time_limit_80", "time_limit_90"]],
        Field(min_length=1),
    ] = Field(default=["end", "fail"])
    """Events to write about."""


class Resources(Model):
    """What the job asks of the cluster."""

    nodes: Annotated[StrictInt, Field(ge=1, le=100_000)] = 1
    """Number of nodes."""
    gpus: text.GpuText = "0"
    """GPUs per node: a number, a typed list such as `a100:4`, or a MIG profile such as
    `1g.10gb:2`."""
    ranks_per_node: Annotated[StrictInt, Field(ge=1, le=10_000)] | None = None
    """Ranks per node; default: `ranks_per_gpu` for each GPU, or 1 without GPUs."""
    ranks_per_gpu: Annotated[StrictInt, Field(ge=1, le=100)] = 1
    """Ranks that share one GPU and the cores next to it."""
    cpus_per_rank: Annotated[StrictInt, Field(ge=1, le=100_000)] = 1
    """CPUs per rank, including its data loader workers."""
    memory: text.Memory | None = None
    """Memory per node, such as `64G`; data staged into RAM is added to it."""
    time: text.TimeText = "01:00:00"
    """Time limit: `2h`, `1d12h`, or minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    partition: text.PlainWord | None = None
    """Partition, or several separated by commas."""
    account: text.PlainWord | None = None
    """Account to charge."""
    qos: text.PlainWord | None = None
    """Quality of service."""
    constraint: text.Constraint | None = None
    """Required node features, as sbatch takes them: `a100&nvlink`."""
    exclusive: StrictBool = False
    """Whether to ask for whole nodes."""
    mail: Mail | None = None
    """Mail about the job."""
    extra: Annotated[list[text.Directive], Field(max_length=MAX_LIST)] = Field(default=[])
    """More sbatch options, such as `--reservation=course`."""

    @field_validator("ranks_per_gpu")
    @classmethod
    def _shared(cls, value: int, info: ValidationInfo) -> int:
        if value == 1 or "gpus" not in info.data:
            return value
        gpus, ranks = values.parse_gpus(info.data["gpus"]).count, info.data.get("ranks_per_node")
        if not gpus:
            raise ValueError("needs GPUs to share: give `gpus`, or leave it out")
        if ranks is not None and -(-ranks // gpus) != value:
            raise ValueError(
                f"{value} ranks on each of {gpus} GPUs are {value * gpus} ranks per node, but "
                f"ranks_per_node is {ranks}: leave one of the two out"
            )
        return value

    @field_validator("extra")
    @classmethod
    def _extra(cls, value: list[str]) -> list[str]:
        for option in value:
            name = option.removeprefix("--").partition("=")[0]
            reason = _NOT_EXTRA.get(name)
            if reason and not _GRES_WITHOUT_GPUS.fullmatch(option):
                raise ValueError(f"--{name} {reason}")
        return value

    def written(self, name: str) -> object:
        """Return the value of a field as a job file has it."""
        return self.model_dump(include={name})[name]

    @property
    def gpu_count(self) -> int:
        """GPUs per node."""
        return values.parse_gpus(self.gpus).count

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or self.gpu_count * self.ranks_per_gpu or 1


# GPUs have their own field; licences of a file system are also generic resources
_GRES_WITHOUT_GPUS = re.compile(r"--gres=(?!(gres[:/])?gpu\b)[^,]+(,(?!(gres[:/])?gpu\b)[^,]+)*")

_FIELD_OF = {
    "name": "job-name",
    "workdir": "chdir",
    "environment": "export",
    "array": "array",
    "after": "dependency kill-on-invalid-dep",
    "command": "wrap",
    "checkpoint.requeue": "requeue no-requeue",
    "resources.nodes": "nodes",
    "resources.ranks_per_node": "ntasks ntasks-per-node",
    "resources.cpus_per_rank": "cpus-per-task",
    "resources.gpus": "gpus gpus-per-node gpus-per-task gres",
    "resources.memory": "mem mem-per-cpu mem-per-gpu",
    "resources.mail.on": "mail-type",
    "resources.mail.to": "mail-user",
    **{
        f"resources.{name}": name
        for name in ("time", "partition", "account", "qos", "constraint", "exclusive")
    },
}
_REASONS = {
    "is set by hpml: leave it out": "comment open-mode output parsable",
    "is not supported: a job goes to the cluster of this login node": "cluster clusters",
    "is not supported: leave it out": "error export-file get-user-env help input test-only usage "
    "version wait",
    **{f"has its own field: {field}": names for field, names in _FIELD_OF.items()},
}
_NOT_EXTRA = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Options of sbatch that `extra` may not have, and why."""


class Container(Model):
    """A container that the ranks run in."""

    engine: Literal["apptainer", "pyxis", "enroot"]
    """What starts the container; `pyxis` is enroot's plugin for srun, `enroot` needs no plugin."""
    image: text.PathText
    """Image file, a reference such as `docker://python:3.12` (apptainer) or
    `nvcr.io#nvidia/pytorch:26.09-py3` (pyxis), or a container's name (enroot)."""
    mounts: Annotated[list[text.PathText], Field(max_length=MAX_LIST)] = Field(default=[])
    """Directories to mount, as `PATH` or `PATH:INSIDE[:ro]`."""

    _image = field_validator("image")(_no_dash)

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: list[str]) -> list[str]:
        if any(not mount.startswith("/") or "," in mount for mount in value):
            raise ValueError("must be absolute paths without commas, PATH or PATH:INSIDE[:ro]")
        return value

    @model_validator(mode="after")
    def _startable(self) -> Container:
        if self.engine == "enroot" and re.search("[:#]", self.image):
            raise ValueError(
                "image: `enroot start` takes no reference: make a file with `enroot import`, or "
                "use `engine: pyxis`"
            )
        if self.engine == "enroot" and re.search(r"\s", "".join([self.image, *self.mounts])):
            raise ValueError("image and mounts: enroot cannot mount paths with blanks")
        return self


Variables = Annotated[dict[text.VariableName, text.Argument], Field(max_length=MAX_LIST)]


class Environment(Model):
    """What the ranks' processes find."""

    modules: Annotated[list[text.ModuleName], Field(max_length=MAX_LIST)] = Field(default=[])
    """Environment modules to load, in order."""
    conda: text.PathText | None = None
    """Conda environment: a name, or the path of its directory."""
    venv: text.PathText | None = None
    """Directory of a Python virtual environment."""
    setup: text.ShellLines | None = None
    """Shell lines to run after modules, venv and conda, before the ranks; the job ends if one of
    them fails."""
    python: text.PathText = "python"
    """Interpreter, looked up after activation."""
    variables: Variables = Field(default={})
    """Environment variables, with placeholders as in `args`; a leading `~/` is your home, and all
    else is taken literally."""
    inherit: Literal["all", "minimal"] = "all"
    """What the job inherits from the environment of `hpml submit`: `all` except the variables of
    schedulers and launchers, or only what every login has."""
    container: Container | None = None
    """Container that the ranks run in."""

    _dashes = field_validator("conda", "python")(_no_dash)

    @model_validator(mode="after")
    def _one_python(self) -> Environment:
        if self.conda is not None and self.venv is not None:
            raise ValueError("give conda or venv, not both")
        return self


Policy = Literal["gpu-local", "socket", "numa", "spread", "none"]


class Binding(Model):
    """Cores and memory of each rank on its node, and their check."""

    policy: Policy = "gpu-local"
    """`gpu-local`: cores next to each rank's GPU. `socket`, `numa`: those of one socket or NUMA
    domain; without GPUs one rank per socket or domain. `spread`: equal parts of all cores. `none`:
    nothing is bound; where each rank ran is recorded."""
    verify: Literal["strict", "warn", "off"] = "warn"
    """If a rank does not run as planned: `strict` fails the job, `warn` prints a warning, `off`
    does not check."""
    loader_workers: Annotated[StrictInt, Field(ge=0, le=1000)] = 0
    """Data loader processes per rank: each is left one of its cores."""
    hardware_threads: StrictBool = True
    """Whether ranks get all hardware threads of their cores, or only the first; only the first if
    sbatch gets `--hint=nomultithread` or `--threads-per-core=1`."""


class Monitor(Model):
    """The exporter that each node's agent runs for this job alone."""

    enabled: StrictBool = False
    """Whether the job is monitored; a mapping in a job file implies `true`."""
    listen: text.ListenAddress = "127.0.0.1:0"
    """ADDRESS:PORT to serve metrics at on each node; a free port if it is 0 or in use. Address
    `0.0.0.0` accepts requests from other machines."""
    web_config: text.PathText | None = None
    """Prometheus web-config file with TLS and users; relative to the file that names it."""
    targets: text.PathText | None = None
    """Directory for Prometheus' file_sd_configs, on the shared file system; default: targets/
    in the records' directory."""
    interval: Annotated[StrictInt, Field(ge=1, le=60)] = 1
    """Seconds between readings of the GPUs; processes are read every fifth time, the node's disks
    and networks every tenth."""


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
_NO_CONTAINERS = {
    ("mpirun", "pyxis"): "is a part of srun",
    ("horovodrun", "pyxis"): "is a part of srun",
    ("mpirun", "enroot"): "hides Open MPI's sockets",
}
"""Launchers and engines that do not fit, and why."""
_Index = Annotated[int, Field(ge=0)]


class Job(Model):
    """A training job."""

    name: text.JobName
    """Name of the job, at most 64 letters, digits and `. _ + -`."""
    launcher: Literal["torchrun", "srun", "mpirun", "horovodrun"] = "torchrun"
    """What starts the ranks: `torchrun` once per node, `srun` once per rank, `mpirun` of Open MPI
    on all nodes, or `horovodrun` on one node."""
    script: text.PathText | None = None
    """Python script to run."""
    module: text.PlainWord | None = None
    """Python module to run, as in `python -m`."""
    command: Annotated[list[text.Argument] | None, Field(min_length=1, max_length=MAX_LIST)] = None
    """Any program with its arguments."""
    args: Annotated[list[text.Argument], Field(max_length=MAX_LIST)] = Field(default=[])
    """Arguments. `{stage.NAME}` is the directory of staged data, `{run.dir}` the run's directory,
    `{run.id}` and `{job.id}` are ids, `{env.NAME}` is a variable of the job's environment,
    `{array.index}` the task's index, `{checkpoint.dir}` the directory of `checkpoint`,
    `{local.dir}` and `{shm.dir}` an empty directory of the job on each node's disk and in its RAM,
    a leading `~/` is your home; all else is taken literally."""
    array: Annotated[
        str | None,
        BeforeValidator(
            lambda value: None if value is None else str(parse_array(value)),
            json_schema_input_type=_Index
            | str
            | Annotated[list[_Index], Field(min_length=1)]
            | None,
        ),
    ] = None
    """Run one task per index: `0-9`, `1,3,7` or `0-31:4`; `%2` at the end runs at most two at
    once."""
    after: Annotated[
        Annotated[
            list[text.After],
            BeforeValidator(
                lambda value: (
                    value if isinstance(value, list) else [value] if value is not None else []
                ),
                json_schema_input_type=list[str | int] | str | int | None,
            ),
        ],
        Field(max_length=100),
    ] = Field(default=[])
    """Runs to wait for: `RUN` or `ok:RUN` until it completed, `any:RUN` until it is over,
    `notok:RUN` until it failed."""
    mpi: Literal["none", "pmix", "pmi2"] = "none"
    """srun's `--mpi`; only with `launcher: srun`."""
    workdir: text.PathText = "."
    """Directory to run in; relative to the job file."""
    snapshot: StrictBool = False
    """Whether to run a copy of the workdir's git repository, with uncommitted changes, taken at
    submission."""
    resources: Resources = Resources()
    """What to ask of the cluster."""
    environment: Environment = Environment()
    """Software, variables and container of the ranks."""
    stage: Annotated[list[Stage], Field(max_length=64)] = Field(default=[])
    """Data to bring to every node first."""
    collect: Annotated[list[Collect], Field(max_length=64)] = Field(default=[])
    """Results to bring back from every node at the end, the most important first."""
    binding: Annotated[
        Binding,
        BeforeValidator(
            lambda value: expand_shorthand("binding", value),
            json_schema_input_type=Policy | Binding,
        ),
    ] = Binding()
    """Which cores and memory each rank gets: a policy, or a mapping."""
    monitor: Annotated[
        Monitor,
        BeforeValidator(
            lambda value: expand_shorthand("monitor", value), json_schema_input_type=bool | Monitor
        ),
    ] = Monitor()
    """Whether the nodes export metrics of this job and its record sums them up: `true`, `false`, or
    a mapping."""
    checkpoint: Annotated[
        Checkpoint,
        BeforeValidator(
            lambda value: expand_shorthand("checkpoint", value),
            json_schema_input_type=bool | Checkpoint,
        ),
    ] = Checkpoint()
    """Whether the run saves before its time limit, at preemption and at a hang, and continues from
    there: `true`, `false`, or a mapping."""

    @field_validator("launcher", mode="before")
    @classmethod
    def _launcher(cls, value: object) -> object:
        hint = _OTHER_LAUNCHERS.get(value.lower()) if isinstance(value, str) else None
        if hint:
            raise ValueError(f"must be torchrun, srun, mpirun or horovodrun: {hint}")
        return value

    @field_validator("command")
    @classmethod
    def _program(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not value[0]:
            raise ValueError("must begin with a program, not with an empty word")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        problems = [*self._contradictions()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        given = [name for name in ("script", "module", "command") if getattr(self, name)]
        if len(given) != 1:
            listed = " and ".join(given) or "none of them"
            yield f"give exactly one of script, module and command, not {listed}"
        places = [(entry.target, entry.name) for entry in self.collect]
        for index, place in enumerate(places):
            if place in places[:index]:
                where = f"{place[0]}/RUN/NODE/{place[1]}, as of collect.{places.index(place)}"
                yield f"collect.{index}: its results would be {where}: use another `target`"
        if self.mpi != "none" and self.launcher != "srun":
            yield (
                f"mpi: {self.mpi} needs `launcher: srun`; with {self.launcher}, which starts the "
                "ranks itself, leave the field out"
            )
        nodes, container = self.resources.nodes, self.environment.container
        if self.launcher == "horovodrun" and nodes > 1:
            yield (
                f"launcher: horovodrun starts ranks on one node only, and resources.nodes is "
                f"{nodes}: use `launcher: mpirun`, or `launcher: srun` with `mpi: pmix`; both need "
                "a Horovod that was built with MPI"
            )
        engine = container.engine if container is not None else ""
        if why := _NO_CONTAINERS.get((self.launcher, engine)):
            yield (
                f"launcher: {self.launcher} cannot start ranks in a container of {engine}, which "
                f"{why}: use `launcher: srun`, or `engine: apptainer`"
            )
        if self.checkpoint.enabled:
            yield from self._checkpoint_contradictions()
        names = [stage.name for stage in self.stage]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                yield f"stage: the name {name!r} is used twice"

    def _checkpoint_contradictions(self) -> Iterator[str]:
        if self.array is not None and not self.checkpoint.is_per_run:
            yield (
                f"checkpoint.directory: {self.checkpoint.directory} would be the directory of "
                "every task: put {run.id} or {array.index} into it, or give a relative path"
            )
        for option in self.resources.extra:
            if option.partition("=")[0] == "--signal":
                yield (
                    f"resources.extra: {option} would reach hpml's own processes, too: use "
                    "`checkpoint.signal` for the signal and `checkpoint.lead` for the time"
                )

    @property
    def tasks(self) -> ArraySpec | None:
        """The tasks of a job array; None for a single job."""
        return None if self.array is None else parse_array(self.array)
