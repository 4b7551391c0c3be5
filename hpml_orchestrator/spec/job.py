"""The job file: what to train, with what, where."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpml_orchestrator.spec import text, values
from hpml_orchestrator.spec.array import ArraySpec, parse_array
from hpml_orchestrator.spec.binding import Binding, policy_alone
from hpml_orchestrator.spec.monitor import Monitor, on_or_off
from hpml_orchestrator.spec.stage import Stage

__all__ = [
    "LATER",
    "Container",
    "Environment",
    "Job",
    "Mail",
    "Resources",
]

LATER = {
    "checkpoint": "checkpoint signals and requeue",
}
"""Fields that are planned and refused until what they need is there."""

MAX_LIST = 4096


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _plain(value: Any) -> Any:
    """Take numbers in argument lists as they are written; booleans would lose their spelling."""
    if isinstance(value, bool):
        raise ValueError("is a boolean: put it in quotes, as the program shall read it")  # noqa: TRY004
    if isinstance(value, (int, float)):
        return getattr(value, "written", None) or str(value)
    return value


ArgumentItem = Annotated[text.Argument, BeforeValidator(_plain)]
VariableItem = Annotated[text.VariableValue, BeforeValidator(_plain)]


class Mail(_Model):
    """Mail about the job."""

    to: text.Address = Field(description="User name or mail address.")
    on: list[Literal["begin", "end", "fail", "requeue", "time_limit_80", "time_limit_90"]] = Field(
        default=["end", "fail"], description="Events to write about.", min_length=1
    )


class Resources(_Model):
    """What the job asks of the cluster."""

    nodes: Annotated[StrictInt, Field(ge=1, le=100_000)] = Field(
        default=1, description="Number of nodes."
    )
    gpus: str = Field(
        default="0",
        description="GPUs per node: a number, a typed list such as a100:4, or a MIG profile "
        "such as 1g.10gb:2.",
    )
    ranks_per_node: Annotated[StrictInt, Field(ge=1, le=10_000)] | None = Field(
        default=None,
        description="Ranks per node; ranks_per_gpu for each GPU when left out, 1 without GPUs.",
    )
    ranks_per_gpu: Annotated[StrictInt, Field(ge=1, le=100)] = Field(
        default=1, description="Ranks that share one GPU, and the cores next to it."
    )
    cpus_per_rank: Annotated[StrictInt, Field(ge=1, le=100_000)] = Field(
        default=1, description="CPUs for each rank, its loader workers included."
    )
    memory: str | None = Field(
        default=None,
        description="Memory per node, such as 64G; what is staged into RAM is added to it.",
    )
    time: str = Field(default="01:00:00", description=f"Time limit: {values.TIME_FORMS}.")
    partition: text.PlainWord | None = Field(default=None, description="Partition or partitions.")
    account: text.PlainWord | None = Field(default=None, description="Account to charge.")
    qos: text.PlainWord | None = Field(default=None, description="Quality of service.")
    constraint: text.Constraint | None = Field(default=None, description="Required node features.")
    exclusive: StrictBool = Field(default=False, description="Whether to ask for whole nodes.")
    mail: Mail | None = Field(default=None, description="Mail about the job.")
    extra: list[text.Directive] = Field(
        default=[],
        max_length=MAX_LIST,
        description="More sbatch options, such as --reservation=course.",
    )

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
                f"{value} ranks on each of {gpus} GPUs are {value * gpus} ranks per node, and "
                f"ranks_per_node says {ranks}: leave one of the two out"
            )
        return value

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, str, list)):
            raise ValueError(  # noqa: TRY004 - pydantic wants ValueError
                "must be a number of GPUs per node, with a type such as a100:4 "
                "or a MIG profile such as 1g.10gb:2"
            )
        return str(values.parse_gpus(value)) or "0"

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: Any) -> Any:
        return None if value is None else values.memory_text(value)

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"must be a time limit: {values.TIME_FORMS}")  # noqa: TRY004
        return values.format_time(values.parse_time(value))

    @field_validator("extra")
    @classmethod
    def _extra(cls, value: list[str]) -> list[str]:
        for option in value:
            name = option.removeprefix("--").partition("=")[0]
            if name in _FIELD_OF and not _GRES_WITHOUT_GPUS.fullmatch(option):
                raise ValueError(f"--{name} has a field of its own: {_FIELD_OF[name]}")
            if name in _SET_BY_HPML:
                raise ValueError(f"--{name} is set by hpml: leave it out")
            if name in _UNSUPPORTED:
                raise ValueError(f"--{name} is not supported: leave it out")
        return value

    @property
    def gpu_count(self) -> int:
        """GPUs per node."""
        return values.parse_gpus(self.gpus).count

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or self.gpu_count * self.ranks_per_gpu or 1


# GPUs have a field of their own; licences of a file system and such are generic resources, too
_GRES_WITHOUT_GPUS = re.compile(r"--gres=(?!(gres[:/])?gpu\b)[^,]+(,(?!(gres[:/])?gpu\b)[^,]+)*")

_FIELD_OF = {
    "job-name": "name",
    "nodes": "resources.nodes",
    "ntasks": "resources.ranks_per_node",
    "ntasks-per-node": "resources.ranks_per_node",
    "cpus-per-task": "resources.cpus_per_rank",
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gres"), "resources.gpus"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "resources.memory"),
    "time": "resources.time",
    "partition": "resources.partition",
    "account": "resources.account",
    "qos": "resources.qos",
    "constraint": "resources.constraint",
    "exclusive": "resources.exclusive",
    "mail-type": "resources.mail.on",
    "mail-user": "resources.mail.to",
    "chdir": "workdir",
    "export": "environment",
    "array": "array",
    **dict.fromkeys(("dependency", "kill-on-invalid-dep"), "after"),
    "wrap": "command",
}
_SET_BY_HPML = frozenset("comment open-mode output parsable".split())
_UNSUPPORTED = frozenset(
    "error export-file get-user-env help input no-requeue requeue test-only usage version "
    "wait".split()
)


class Container(_Model):
    """A container that the ranks run in."""

    engine: Literal["apptainer", "pyxis"] = Field(description="What starts the container.")
    image: text.PathText = Field(description="Image file (apptainer) or reference (pyxis).")
    mounts: list[text.PathText] = Field(
        default=[],
        max_length=MAX_LIST,
        description="Directories to see inside, as PATH or PATH:INSIDE[:ro].",
    )

    @field_validator("image")
    @classmethod
    def _image(cls, value: str) -> str:
        if value.startswith("-"):
            raise ValueError("must not begin with a dash")
        return value

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: list[str]) -> list[str]:
        for mount in value:
            if not mount.startswith("/") or "," in mount:
                raise ValueError("must be absolute paths without commas, PATH or PATH:INSIDE[:ro]")
        return value


class Environment(_Model):
    """What the ranks' processes find."""

    modules: list[text.ModuleName] = Field(
        default=[], max_length=MAX_LIST, description="Environment modules to load, in order."
    )
    conda: text.PathText | None = Field(
        default=None, description="Conda environment: a name, or the path of its directory."
    )
    venv: text.PathText | None = Field(
        default=None, description="Directory of a Python virtual environment."
    )
    setup: text.ShellLines | None = Field(
        default=None,
        description="Shell lines to run after modules, venv and conda, before the ranks; one that "
        "fails ends the job.",
    )
    python: text.PathText = Field(
        default="python", description="Interpreter, looked up after activation."
    )
    variables: dict[text.VariableName, VariableItem] = Field(
        default={}, max_length=MAX_LIST, description="Variables to set, taken literally."
    )
    inherit: Literal["all", "minimal"] = Field(
        default="all",
        description="What travels of the environment that `hpml submit` runs in: all but the "
        "variables of schedulers and launchers, or only what a login has anyway.",
    )
    container: Container | None = Field(
        default=None, description="Container that the ranks run in."
    )

    @field_validator("conda", "python")
    @classmethod
    def _no_dash(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("-"):
            raise ValueError("must not begin with a dash")
        return value

    @model_validator(mode="after")
    def _one_python(self) -> Environment:
        if self.conda is not None and self.venv is not None:
            raise ValueError("give conda or venv, not both")
        return self


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
"""Words that people know, and what to write for them."""


class Job(_Model):
    """A training job, as short as it can be said."""

    name: text.JobName = Field(description="Name of the job.")
    launcher: Literal["torchrun", "srun", "mpirun", "horovodrun"] = Field(
        default="torchrun",
        description="What starts the ranks: torchrun once per node, srun once per rank, mpirun of "
        "Open MPI on all nodes, or horovodrun on one node.",
    )
    script: text.PathText | None = Field(default=None, description="Python script to run.")
    module: text.PlainWord | None = Field(
        default=None, description="Python module to run, as in python -m."
    )
    command: list[ArgumentItem] | None = Field(
        default=None, min_length=1, max_length=MAX_LIST, description="Any program and arguments."
    )
    args: list[ArgumentItem] = Field(
        default=[],
        max_length=MAX_LIST,
        description="Arguments. {stage.NAME} stands for staged data, {run.dir} for the run's "
        "directory, {array.index} for the task's index; all else is taken literally.",
    )
    array: str | None = Field(
        default=None,
        description="Run one task per index: 0-9, 1,3,7 or 0-31:4; %2 behind it runs at most "
        "two at once.",
    )
    after: list[Annotated[text.After, BeforeValidator(_plain)]] = Field(
        default=[],
        max_length=100,
        description="Runs to wait for: RUN or ok:RUN starts once that one completed, any:RUN once "
        "it is over, notok:RUN once it failed.",
    )
    mpi: Literal["none", "pmix", "pmi2"] = Field(
        default="none",
        description="What srun offers to MPI programs, with launcher srun only.",
    )
    workdir: text.PathText = Field(
        default=".", description="Directory to run in; relative to the job file."
    )
    snapshot: StrictBool = Field(
        default=False,
        description="Whether to run a copy of the workdir's git repository, uncommitted changes "
        "included, that is taken at submission.",
    )
    resources: Resources = Field(default=Resources(), description="What to ask of the cluster.")
    environment: Environment = Field(
        default=Environment(), description="Software, variables and container of the ranks."
    )
    stage: list[Stage] = Field(
        default=[], max_length=64, description="Data to bring to every node first."
    )
    binding: Annotated[Binding, BeforeValidator(policy_alone)] = Field(
        default=Binding(),
        description="Where ranks run on a node: a policy, or a mapping of the fields below.",
    )
    monitor: Annotated[Monitor, BeforeValidator(on_or_off)] = Field(
        default=Monitor(),
        description="Whether metrics of this job are exported from its nodes and summed up in its "
        "record: true, false, or a mapping of the fields below.",
    )

    @model_validator(mode="before")
    @classmethod
    def _later(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key, what in LATER.items():
                if data.get(key) is not None:
                    raise ValueError(f"{key}: this release has no {what} yet; remove the field")
        return data

    @field_validator("launcher", mode="before")
    @classmethod
    def _launcher(cls, value: Any) -> Any:
        hint = _OTHER_LAUNCHERS.get(value.lower()) if isinstance(value, str) else None
        if hint:
            raise ValueError(f"must be torchrun, srun, mpirun or horovodrun: {hint}")
        return value

    @field_validator("array", mode="before")
    @classmethod
    def _array(cls, value: Any) -> Any:
        return None if value is None else str(parse_array(value))

    @field_validator("after", mode="before")
    @classmethod
    def _one_run(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [] if value is None else [value]

    @field_validator("command")
    @classmethod
    def _program(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not value[0]:
            raise ValueError("must begin with a program, not with an empty word")
        return value

    @model_validator(mode="after")
    def _one_program(self) -> Job:
        given = [name for name in ("script", "module", "command") if getattr(self, name)]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of script, module and command, not {said}")
        if self.mpi != "none" and self.launcher != "srun":
            raise ValueError(
                f"mpi: {self.mpi} needs `launcher: srun`; with {self.launcher}, which starts the "
                "ranks itself, leave the field out"
            )
        self._check_launcher()
        names = [stage.name for stage in self.stage]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stage: the name {name!r} is used twice")
        return self

    def _check_launcher(self) -> None:
        """Refuse what mpirun and horovodrun cannot start."""
        if self.launcher not in ("mpirun", "horovodrun"):
            return
        nodes, container = self.resources.nodes, self.environment.container
        if self.launcher == "horovodrun" and nodes > 1:
            raise ValueError(
                f"launcher: horovodrun starts ranks on one node only, and resources.nodes is "
                f"{nodes}: use `launcher: mpirun`, or `launcher: srun` with `mpi: pmix`; both need "
                "a Horovod that was built with MPI"
            )
        if container is not None and container.engine == "pyxis":
            raise ValueError(
                f"launcher: {self.launcher} cannot start ranks in a container of pyxis, which is a "
                "part of srun: use `launcher: srun`, or `engine: apptainer`"
            )

    @property
    def tasks(self) -> ArraySpec | None:
        """The tasks of a job array; None for a single job."""
        return None if self.array is None else parse_array(self.array)
