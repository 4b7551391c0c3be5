"""The site profile: what a cluster has, what it wants, and what jobs get there by default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from hpml_orchestrator.spec import text, values
from hpml_orchestrator.spec.job import MAX_LIST, Job

__all__ = [
    "NEEDED_DIRECTIVES",
    "PER_JOB",
    "DirectiveRule",
    "Limits",
    "NodeType",
    "Partition",
    "Paths",
    "Site",
    "Staging",
]

NEEDED_DIRECTIVES = frozenset(
    {"chdir", "output", "export", "parsable", "array", "open-mode", "job-name"}
)
"""Options that a submission cannot do without: hpml finds its jobs and their output by them."""

PER_JOB = frozenset(
    {"name", "array", "after", "script", "module", "command", "args", "workdir", "stage"}
)
"""Fields of a job file that have no default in a site profile."""

_UNLIMITED = ("unlimited", "infinite", "none")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _version(value: Any) -> Any:
    """Take no `true` for the number 1, to which it is equal in Python."""
    if isinstance(value, bool):
        raise ValueError("must be 1")  # noqa: TRY004 - pydantic wants ValueError
    return value


def _duration(value: Any) -> Any:
    """Take a time limit in one of Slurm's forms, or the word `unlimited`."""
    if isinstance(value, str) and value.lower() in _UNLIMITED:
        return "unlimited"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"must be unlimited or a time limit: {values.TIME_FORMS}")  # noqa: TRY004
    return values.format_time(values.parse_time(value))


def _gpus(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str, list)):
        raise ValueError("must be a number of GPUs, or types such as a100:4")  # noqa: TRY004
    return str(values.parse_gpus(value)) or "0"


Duration = Annotated[str, BeforeValidator(_duration)]
Memory = Annotated[str, BeforeValidator(values.memory_text)]
GpuText = Annotated[str, BeforeValidator(_gpus)]
Count = Annotated[StrictInt, Field(ge=0, le=10_000_000)]
Some = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]
Names = Annotated[list[text.PlainWord], Field(max_length=MAX_LIST)]


class DirectiveRule(_Model):
    """What this site wants of one sbatch option: one of forbid, omit, rename and default.

    A rule with none of them takes back the rule of a profile below.
    """

    forbid: text.Line | None = Field(
        default=None,
        description="Why no job may ask for it: a job that does is refused with these words; "
        "where hpml alone wants the option, it is left out.",
    )
    omit: StrictBool = Field(
        default=False, description="Leave the option out without a word, whoever asked for it."
    )
    rename: text.Renamed | None = Field(
        default=None,
        description="Option to write instead, such as --gres=gpu:{value}; {value} is the value, "
        "{item} each part of a comma-separated one in turn.",
    )
    default: text.DirectiveValue | None = Field(
        default=None,
        description="Value where a job does not ask for the option; empty for one without value.",
    )

    @model_validator(mode="after")
    def _one(self) -> DirectiveRule:
        given = [
            name
            for name in ("forbid", "omit", "rename", "default")
            if getattr(self, name) not in (None, False)
        ]
        if self.rename is not None:
            name = self.rename.removeprefix("--").partition("=")[0]
            if name in NEEDED_DIRECTIVES:
                raise ValueError(f"rename: --{name} is set by hpml for every job: choose another")
        if len(given) <= 1 or given == ["rename", "default"]:
            return self
        raise ValueError(f"give one of forbid, omit, rename and default, not {' and '.join(given)}")


class Paths(_Model):
    """Where the nodes keep what is staged."""

    scratch: text.NodePath | None = Field(
        default=None,
        description="Local disk of a node: an absolute path, or a variable of the job and a path "
        "below it, such as $LOCAL_SCRATCH. For `target: local`.",
    )
    ram: text.NodePath | None = Field(
        default=None, description="Directory in RAM; for `target: shm`. /dev/shm when left out."
    )


class NodeType(Paths):
    """Nodes that are alike."""

    nodes: text.Line | None = Field(default=None, description="Node list, such as gpu[01-16].")
    count: Count | None = Field(default=None, description="How many nodes there are.")
    cpus: Count | None = Field(default=None, description="CPUs that jobs can have, per node.")
    sockets: Count | None = Field(default=None, description="Sockets per node.")
    cores_per_socket: Count | None = Field(default=None, description="Cores per socket.")
    threads_per_core: Count | None = Field(default=None, description="Hardware threads per core.")
    memory: Memory | None = Field(default=None, description="Memory that jobs can have, per node.")
    gpus: GpuText = Field(default="0", description="GPUs per node, such as a100:4.")
    local_disk: Memory | None = Field(default=None, description="Size of the local disk.")
    features: Names = Field(default=[], description="Features, for `constraint`.")
    interfaces: Annotated[list[text.InterfaceName], Field(max_length=64)] = Field(
        default=[],
        description="Network interfaces between nodes, the best first; NCCL and Gloo use them.",
    )
    topology: text.PathText | None = Field(
        default=None,
        description="File that tells the node's sockets, cores, GPUs and network cards: hwloc XML, "
        "the output of hpml topo --json, NCCL topology XML, or the text of nvidia-smi topo -m; "
        "relative to the profile.",
    )


class Partition(_Model):
    """One partition and its limits."""

    default: StrictBool = Field(
        default=False, description="Whether jobs that name no partition go there."
    )
    node_types: Names = Field(default=[], description="Node types in it, by name.")
    nodes: Count | None = Field(default=None, description="How many nodes it has.")
    max_nodes: Count | None = Field(default=None, description="Most nodes per job.")
    max_time: Duration | None = Field(default=None, description="Longest time limit.")
    default_time: Duration | None = Field(
        default=None, description="Time limit of jobs that ask for none."
    )
    max_cpus_per_node: Count | None = Field(default=None, description="Most CPUs of each node.")
    max_memory_per_node: Memory | None = Field(default=None, description="Most memory per node.")
    exclusive: StrictBool = Field(default=False, description="Whether jobs get whole nodes.")
    accounts: Names | None = Field(
        default=None, description="Accounts that may use it; all when left out."
    )
    qos: Names | None = Field(default=None, description="QOS that may be used; all when left out.")


class Staging(_Model):
    """What the shared file system gives, and how gently jobs shall ask it."""

    opens_per_second: Some | None = Field(
        default=None, description="Most files that one node may open per second."
    )
    opens_per_second_per_job: Some | None = Field(
        default=None,
        description="Most files that all nodes of a job together may open per second.",
    )
    array_jitter: Annotated[StrictInt, Field(ge=0, le=86_400)] | None = Field(
        default=None,
        description="Seconds over which the tasks of an array spread the beginning of their "
        "staging, at most; half a second per task.",
    )
    shared_rate: Memory | None = Field(
        default=None,
        description="What the shared file system reads per second for all nodes together, "
        "such as 20G.",
    )
    metadata_rate: Some | None = Field(
        default=None,
        description="Files per second that it opens for all nodes together.",
    )
    link_rate: Memory | None = Field(
        default=None, description="What two nodes send one another per second, such as 10G."
    )
    disk_rate: Memory | None = Field(
        default=None, description="What a node's local disk writes per second, such as 2G."
    )


class Limits(_Model):
    """What holds for the whole cluster."""

    max_array_size: Count | None = Field(
        default=None, description="One more than the largest array index."
    )
    max_script_bytes: Count | None = Field(default=None, description="Longest batch script.")


class Site(_Model):
    """What is known of a cluster, and what its jobs get by default."""

    schema_version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        default=1, description="Version of this file's form."
    )
    cluster: text.PlainWord | None = Field(
        default=None, description="ClusterName of the Slurm that this is about."
    )
    slurm: text.PlainWord | None = Field(
        default=None, description="Version of Slurm that was found, such as 22.05.8."
    )
    paths: Paths = Field(default=Paths(), description="Where all nodes keep what is staged.")
    staging: Staging = Field(
        default=Staging(), description="How staging treats the shared file system."
    )
    interfaces: Annotated[list[text.InterfaceName], Field(max_length=64)] = Field(
        default=[], description="Network interfaces between nodes, where types do not say."
    )
    modules: Annotated[list[text.ModuleName], Field(max_length=MAX_LIST)] = Field(
        default=[], description="Environment modules that there are, for reference."
    )
    limits: Limits = Field(default=Limits(), description="Limits of the whole cluster.")
    partitions: dict[text.PlainWord, Partition] = Field(
        default={}, max_length=MAX_LIST, description="Partitions by name."
    )
    node_types: dict[text.PlainWord, NodeType] = Field(
        default={}, max_length=MAX_LIST, description="Kinds of nodes by name."
    )
    directives: dict[text.OptionName, DirectiveRule] = Field(
        default={},
        max_length=MAX_LIST,
        description="Rules for sbatch options, by the option's name without dashes.",
    )
    defaults: dict[str, Any] = Field(
        default={},
        description="Fields of job files with the values that jobs here get when they do not "
        "give them, such as resources.partition.",
    )
    templates: text.PathText | None = Field(
        default=None,
        description="Directory of templates of your own, looked into before hpml's; "
        "relative to the profile.",
    )

    @field_validator("directives")
    @classmethod
    def _needed(cls, value: dict[str, DirectiveRule]) -> dict[str, DirectiveRule]:
        for name in sorted(NEEDED_DIRECTIVES & set(value)):
            raise ValueError(f"--{name} is one that hpml cannot do without: leave it out")
        for name, rule in value.items():
            target = (rule.rename or "").removeprefix("--").partition("=")[0]
            other = value.get(target)
            if other is not None and (other.forbid is not None or other.omit):
                what = "leaves out" if other.omit else "forbids"
                raise ValueError(
                    f"{name} is renamed to --{target}, which the rule of {target} {what}: "
                    "take one of the two back"
                )
        return value

    @field_validator("partitions")
    @classmethod
    def _one_default(cls, value: dict[str, Partition]) -> dict[str, Partition]:
        names = [name for name, one in value.items() if one.default]
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} are all the default, and jobs that name no partition go "
                "to one: say default = false for the others"
            )
        return value

    @field_validator("defaults")
    @classmethod
    def _job_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(PER_JOB & set(value)):
            raise ValueError(f"{name} belongs to each job and has no default here: leave it out")
        try:
            Job.model_validate({"name": "site", "command": ["true"], **value})
        except ValidationError as error:
            raise DefaultsError(error) from None
        return value

    @model_validator(mode="after")
    def _known_types(self) -> Site:
        for name, partition in self.partitions.items():
            for kind in partition.node_types:
                if kind not in self.node_types:
                    raise ValueError(f"partitions.{name}.node_types: there is no node type {kind}")
        return self

    def partitions_of(self, partition: str | None) -> list[str]:
        """Return the names of a job's partitions, comma-separated ones; the default when None."""
        if partition is not None:
            return partition.split(",")
        return [name for name, one in self.partitions.items() if one.default]

    def kinds_of(self, partition: str | None) -> dict[str, NodeType]:
        """Return the node types that a job of a partition may land on, by name."""
        kinds = [
            kind
            for name in self.partitions_of(partition)
            if name in self.partitions
            for kind in self.partitions[name].node_types
        ]
        return {kind: self.node_types[kind] for kind in kinds}

    def node_types_of(self, partition: str | None) -> list[NodeType]:
        """Return the node types that a job may land on.

        Args:
            partition: its partition or partitions, comma-separated; the default one when None.
        """
        return list(self.kinds_of(partition).values())

    def path(self, which: Literal["scratch", "ram"], partition: str | None) -> str | None:
        """Return where jobs of a partition stage to, None where nothing is said of it.

        Where node types of a partition differ, what is said of all nodes counts.
        """
        said = {getattr(kind, which) for kind in self.node_types_of(partition)}
        only = said.pop() if len(said) == 1 else None
        common: str | None = getattr(self.paths, which)
        return only or common

    def interfaces_of(self, partition: str | None) -> list[str]:
        """Return the network interfaces for jobs of a partition; empty where nothing is said."""
        said = {tuple(kind.interfaces) for kind in self.node_types_of(partition)}
        only = said.pop() if len(said) == 1 else ()
        return list(only or self.interfaces)


class DefaultsError(ValueError):
    """The defaults are wrong as a job file; carries pydantic's findings."""

    def __init__(self, error: ValidationError) -> None:
        super().__init__("are not right")
        self.error = error
