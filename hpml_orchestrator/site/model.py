"""The site profile: a cluster's properties, its rules, and the defaults of its jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.load import Layer, leaves, merged, overlaps, read_mapping
from hpml_orchestrator.jobfile.rules import Model, combined, problems_of, wrong_fields
from hpml_orchestrator.jobfile.schema import schema_of
from hpml_orchestrator.jobfile.text import absolute, web_address
from hpml_orchestrator.records import units
from hpml_orchestrator.records import units as values
from hpml_orchestrator.records.job import NO_GPUS, Job, Json, expand_shorthand
from hpml_orchestrator.records.units import (
    LONG_OPTION,
    MAX_LIST,
    MAX_PATH_BYTES,
    SBATCH_VALUE,
    Checked,
    Count,
    Memory,
    PositiveInt,
    matching,
)

# Field types of site profiles, with their patterns.


def _web_address(value: str) -> str:
    if web_address(value) is None:
        raise ValueError("must have a host, an IPv6 address in brackets, and a port up to 65535")
    return value


_PATH_FORM = "an absolute path, or a variable and a path below it, such as $LOCAL_SCRATCH/data"

DirectiveValue = Annotated[
    str,
    matching(rf"{SBATCH_VALUE}*", "the value of an sbatch option, without blanks or quotes", 512),
]
Renamed = Annotated[
    str,
    matching(
        rf"{LONG_OPTION}(={SBATCH_VALUE}*(\{{(value|item)\}})?{SBATCH_VALUE}*)?",
        "one long sbatch option such as --gres=gpu:{value}",
        512,
    ),
]
OptionName = Annotated[
    str, matching(r"[a-z][a-z0-9-]*", "a long sbatch option's name without dashes, such as mem")
]
Line = Annotated[str, matching(r"[^\x00-\x1f\x7f]+", "one line of text", 1024)]
InterfaceName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "a network interface such as ib0", 64)
]
NodePath = Annotated[
    str,
    matching(r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[^\x00-\x1f\x7f]*", _PATH_FORM, MAX_PATH_BYTES),
]
WebAddress = Annotated[
    str,
    matching(
        r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~%/-]*)?",
        "an http or https address without user, password or query, such as "
        "https://grafana.example.org",
        512,
    ),
    Checked(_web_address),
]


NEEDED_DIRECTIVES = frozenset(
    {"chdir", "output", "export", "parsable", "array", "open-mode", "job-name"}
)
"""Options that a submission needs: hpml finds its jobs and their output by them."""

PER_JOB = frozenset(
    {"name", "array", "after", "script", "module", "command", "args", "workdir", "stage"}
)
"""Fields of a job file that cannot have a default in a site profile."""


def _not_true(value: object) -> object:
    if value is True:  # equal to 1 in Python
        raise ValueError("must be 1")
    return value


def _time_or_unlimited(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("unlimited", "infinite", "none"):
        return "unlimited"
    return units.format_time(units.parse_time(value))


Duration = Annotated[str, BeforeValidator(_time_or_unlimited, json_schema_input_type=int | str)]
# YAML and TOML have words for yes and no
Requeue = Annotated[
    Literal["auto", "yes", "no"],
    BeforeValidator(
        lambda value: {True: "yes", False: "no"}[value] if isinstance(value, bool) else value,
        json_schema_input_type=Literal["auto", "yes", "no"] | bool,
    ),
]
Names = Annotated[list[values.PlainWord], Field(max_length=MAX_LIST)]
Interfaces = Annotated[list[InterfaceName], Field(max_length=64)]


class DirectiveRule(Model):
    """A rule for one sbatch option: one of forbid, omit, rename and default.

    A rule with none of them cancels the rule of a profile with lower precedence.
    """

    forbid: Line | None = None
    """Why no job may use the option: the error message of a job that does. If only hpml would add
    the option, it is left out."""
    omit: values.Flag = False
    """Whether to leave the option out silently."""
    rename: Renamed | None = None
    """Option to write instead, such as `--gres=gpu:{value}`: `{value}` is the value, `{item}` each
    part of a comma-separated one."""
    default: DirectiveValue | None = None
    """Value if a job does not set the option; `''` for an option without a value."""

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


class Paths(Model):
    """Where data is staged on the nodes."""

    scratch: NodePath | None = None
    """Local disk, for `target: local`: an absolute path, or a variable of the job followed by a
    path, such as `$LOCAL_SCRATCH`; default: `$SLURM_TMPDIR`, `$TMPDIR` or `/tmp`."""
    ram: NodePath | None = None
    """Directory in RAM, for `target: shm`; default: `/dev/shm`."""


class NodeType(Paths):
    """Nodes with the same properties."""

    nodes: Line | None = None
    """Node list, such as `gpu[01-16]`."""
    count: Count | None = None
    """Number of nodes."""
    cpus: Count | None = None
    """CPUs per node that jobs can use."""
    sockets: Count | None = None
    """Sockets per node."""
    cores_per_socket: Count | None = None
    """Cores per socket."""
    threads_per_core: Count | None = None
    """Hardware threads per core."""
    memory: Memory | None = None
    """Memory per node that jobs can use."""
    gpus: values.GpuRequest = Field(default=NO_GPUS, json_schema_extra={"default": "0"})
    """GPUs per node, such as `a100:4`."""
    local_disk: Memory | None = None
    """Size of the local disk."""
    features: Names = Field(default=[])
    """Features, for `resources.constraint`."""
    interfaces: Interfaces = Field(default=[])
    """Network interfaces between nodes, best first, for NCCL and Gloo; a job may set others."""
    topology: values.PathText | None = None
    """File with the node's sockets, cores, GPUs and network cards: hwloc XML or the
    output of `hpml topo --json`; relative to the profile."""


class SitePartition(Model):
    """One partition and its limits."""

    default: values.Flag = False
    """Whether it is the default partition; at most one is."""
    node_types: Names = Field(default=[])
    """Names of the node types in it."""
    nodes: Count | None = None
    """Number of its nodes."""
    max_nodes: Count | None = None
    """Maximum nodes per job."""
    max_time: Duration | None = None
    """Longest time limit."""
    default_time: Duration | None = None
    """Time limit of jobs that set none."""
    max_cpus_per_node: Count | None = None
    """Maximum CPUs per node."""
    max_memory_per_node: Memory | None = None
    """Maximum memory per node."""
    exclusive: values.Flag = False
    """Whether jobs get whole nodes."""
    accounts: Names | None = None
    """Accounts that may use it; default: all."""
    qos: Names | None = None
    """QOS that may be used; default: all."""


class Staging(Model):
    """Speed of the shared file system, and limits that protect it."""

    opens_per_second: PositiveInt | None = None
    """Maximum number of files that one node opens per second while staging."""
    opens_per_second_per_job: PositiveInt | None = None
    """Maximum number of files that all nodes of a job open per second, divided evenly."""
    array_jitter: Annotated[int, values.Between(0, 86_400)] | None = None
    """Maximum seconds over which the tasks of an array spread the start of staging: half a second
    per task, up to this value."""
    shared_rate: Memory | None = None
    """Bytes per second that the shared file system delivers to all nodes together, such as
    `20G`."""
    metadata_rate: PositiveInt | None = None
    """Files per second that the shared file system opens for all nodes together."""
    link_rate: Memory | None = None
    """Bytes per second between two nodes, such as `10G`."""
    disk_rate: Memory | None = None
    """Bytes per second that a node can write to its local disk, such as `2G`."""


class Limits(Model):
    """Limits of the whole cluster."""

    max_array_size: Count | None = None
    """One more than the largest array index."""
    max_script_bytes: Count | None = None
    """Maximum size of a batch script in bytes."""


class Monitoring(Model):
    """Where to see the metrics of jobs."""

    dashboards: WebAddress | None = None
    """Address of the Grafana, or of the viewer, with hpml's dashboards; `hpml show` prints a link
    to
    each job there."""
    prometheus: WebAddress | None = None
    """Address of the Prometheus that scrapes the exporters, for `hpml top`."""


class Site(Model):
    """A cluster, and the defaults of its jobs."""

    schema_version: Annotated[Literal[1], BeforeValidator(_not_true)] = 1
    """Version of this file format."""
    cluster: values.PlainWord | None = None
    """Slurm's ClusterName."""
    slurm: values.PlainWord | None = None
    """Slurm's version, such as 22.05.8."""
    backend: Literal["auto", "slurm", "local"] = "auto"
    """Where jobs run without `--local` and `--backend`; `local` is the machine on which you run
    hpml, `auto` is Slurm if sbatch is on PATH."""
    requeue: Requeue = "auto"
    """Whether jobs may be requeued, so that a run with `checkpoint` keeps its job id. `auto` tries
    it. With `no`, or if Slurm refuses it, the job submits its continuation."""
    paths: Paths = Paths()
    """Where data is staged on all nodes."""
    staging: Staging = Staging()
    """Speed and limits of the shared file system."""
    monitoring: Monitoring = Monitoring()
    """Where to see the metrics of jobs."""
    interfaces: Interfaces = Field(default=[])
    """Network interfaces between nodes, if node types name none."""
    modules: Annotated[list[values.ModuleName], Field(max_length=MAX_LIST)] = Field(default=[])
    """Environment modules of the cluster, for reference."""
    limits: Limits = Limits()
    """Limits of the whole cluster."""
    partitions: Annotated[dict[values.PlainWord, SitePartition], Field(max_length=MAX_LIST)] = (
        Field(default={})
    )
    """Partitions, by name."""
    node_types: Annotated[dict[values.PlainWord, NodeType], Field(max_length=MAX_LIST)] = Field(
        default={}
    )
    """Node types, by name."""
    directives: Annotated[dict[OptionName, DirectiveRule], Field(max_length=MAX_LIST)] = Field(
        default={}
    )
    """Rules for sbatch options, by the option's name without dashes."""
    defaults: Json = Field(default={})
    """Defaults for fields of job files, such as `resources.partition`."""
    templates: values.PathText | None = None
    """Directory of your Jinja2 templates of batch scripts, which extend or replace hpml's; relative
    to the profile."""

    @field_validator("directives")
    @classmethod
    def _needed(cls, value: dict[str, DirectiveRule]) -> dict[str, DirectiveRule]:
        for name in sorted(NEEDED_DIRECTIVES & set(value)):
            raise ValueError(f"--{name} is an option that hpml needs: leave it out")
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
    def _one_default(cls, value: dict[str, SitePartition]) -> dict[str, SitePartition]:
        names = [name for name, partition in value.items() if partition.default]
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} are all the default partition: set default = false for "
                "all but one"
            )
        return value

    @field_validator("defaults")
    @classmethod
    def _job_fields(cls, value: dict[str, object]) -> dict[str, object]:
        for name in sorted(PER_JOB & set(value)):
            raise ValueError(f"{name} belongs to each job and has no default here: leave it out")
        return value

    @model_validator(mode="after")
    def _known_types(self) -> Site:
        for name, partition in self.partitions.items():
            for kind in partition.node_types:
                if kind not in self.node_types:
                    raise ValueError(f"partitions.{name}.node_types: unknown node type {kind}")
        return self

    def partitions_of(self, partition: str | None) -> list[str]:
        """Return the names of a job's comma-separated partitions; the default one for None."""
        if partition is not None:
            return partition.split(",")
        return [name for name, settings in self.partitions.items() if settings.default]

    def kinds_of(self, partition: str | None) -> dict[str, NodeType]:
        """Return the node types that a job in a partition may get, by name."""
        return {
            kind: self.node_types[kind]
            for name in self.partitions_of(partition)
            if name in self.partitions
            for kind in self.partitions[name].node_types
        }

    def node_types_of(self, partition: str | None) -> list[NodeType]:
        """Return the node types that a job in a partition may get."""
        return list(self.kinds_of(partition).values())

    def path(self, which: Literal["scratch", "ram"], partition: str | None) -> str | None:
        """Return where jobs in a partition stage data; None if the profile does not specify it.

        If the partition's node types differ, the path for all nodes applies.
        """
        paths = {getattr(kind, which) for kind in self.node_types_of(partition)}
        common: str | None = getattr(self.paths, which)
        return paths.pop() or common if len(paths) == 1 else common

    def interfaces_of(self, partition: str | None) -> list[str]:
        """Return the network interfaces for jobs in a partition; empty if unknown."""
        interfaces = {tuple(kind.interfaces) for kind in self.node_types_of(partition)}
        return list(
            interfaces.pop() or self.interfaces if len(interfaces) == 1 else self.interfaces
        )


@dataclass(frozen=True)
class ResolvedSite:
    """A complete site profile.

    Attributes:
        site: the profile; every path in it is absolute.
        sources: the files that it came from, lowest precedence first.
        origins: dotted field -> the file that it came from.
    """

    site: Site
    sources: tuple[Path, ...] = ()
    origins: Mapping[str, Path] = field(default_factory=dict)

    def origin(self, name: str) -> Path | None:
        """Return the file that a field came from; if its parts differ, the one that wins."""
        if name in self.origins:
            return self.origins[name]
        files = {path for given, path in self.origins.items() if overlaps(given, name)}
        return next((path for path in reversed(self.sources) if path in files), None)

    def job_defaults(self) -> Layer:
        """Return the defaults of job files."""
        given = leaves(self.site.defaults, empty=False)
        origins = {name: f"site profile {self.origin(f'defaults.{name}')}" for name in given}
        return Layer(self.site.defaults, origins)


def load_site(paths: list[Path]) -> ResolvedSite:
    """Load profiles, each overriding those before it.

    Raises:
        NotFoundError: a file does not exist.
        InputError: something in one is wrong; names field and file of every problem.
    """
    data: dict[str, object] = {}
    origins: dict[str, Path] = {}
    for path in paths:
        fields = read_mapping(path, "site profile")
        _make_absolute(fields, path.parent)
        # A rule replaces the other profile's rule as a whole. Merged key by key, `forbid` of one
        # file and `rename` of another would form a rule that nobody wrote.
        data = merged(data, fields, whole="directives")
        given = leaves(fields, empty=False)
        origins = {
            name: file
            for name, file in origins.items()
            if not any(overlaps(other, name) for other in given)
        }
        origins.update(dict.fromkeys(leaves(fields), path))
    problems: list[InputError] = []
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, Site)
    defaults = data.get("defaults")
    if isinstance(defaults, dict):
        fields = {name: value for name, value in defaults.items() if name not in PER_JOB}
        # A site's defaults are fields of a job. Validate them as one now, so that an error names
        # this profile instead of a user's job file.
        problems += wrong_fields({"name": "site", "command": ["true"], **fields}, "defaults.")
    if problems:
        field = problems[0].field
        files = {str(path) for given, path in origins.items() if field and overlaps(given, field)}
        where = ", ".join(sorted(files) or map(str, paths))
        raise combined(problems, f"in {where}; `hpml schema site` prints every field")
    return ResolvedSite(site, tuple(paths), origins)


def _make_absolute(fields: dict[str, object], base: Path) -> None:
    node_types = fields.get("node_types")
    kinds = node_types.values() if isinstance(node_types, dict) else []
    for owner, name in [(fields, "templates"), *((kind, "topology") for kind in kinds)]:
        path = owner.get(name) if isinstance(owner, dict) else None
        if isinstance(path, str) and path:
            owner[name] = os.path.normpath(os.path.join(base, os.path.expanduser(path)))
    defaults = fields.get("defaults")
    if isinstance(defaults, dict):
        written = {name: expand_shorthand(name, value) for name, value in defaults.items()}
        fields["defaults"] = absolute(written, base)


# The JSON Schema of site profiles, for editors and the reference.


def site_schema() -> Json:
    """Return the JSON Schema (2020-12) of a site profile."""
    schema = schema_of(Site, "hpml site profile")
    job_fields = schema_of(Job, "hpml job file")
    schema["$defs"] |= job_fields["$defs"]
    fields = {
        name: field for name, field in job_fields["properties"].items() if name not in PER_JOB
    }
    schema["properties"]["defaults"] |= {"additionalProperties": False, "properties": fields}
    schema["properties"]["directives"]["propertyNames"] = {
        "pattern": "^[a-z][a-z0-9-]*$",
        "not": {"enum": sorted(NEEDED_DIRECTIVES)},
    }
    return schema
