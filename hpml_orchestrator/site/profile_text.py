"""The text of a site profile: a pure function of what a cluster reports and probes found."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tomlkit
from pydantic import BaseModel, ValidationError
from tomlkit.items import Comment, Table, Trivia

from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.site.look import Look, Place
from hpml_orchestrator.site.nodes import fold, gpu_text, group_nodes
from hpml_orchestrator.spec import site as models
from hpml_orchestrator.spec import values

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["Origin", "profile_text", "release"]

Section = tomlkit.TOMLDocument | Table

_WIDTH = 98
_MAX_NODE_TYPES = 64
_HEADER = """\
Site profile of {cluster} for hpml, written by hpml {version} for {writer} on {when}, \
from Slurm {slurm}{looked}.

It describes what this cluster has, which sbatch options it wants, and the defaults of jobs here. \
Edit it freely: `hpml init` never replaces it without --force.

Precedence: command line > job file > the project's hpml.toml > your ~/.config/hpml/site.toml > \
/etc/hpml/site.toml > hpml's own defaults.

A line that begins with # and a space is a comment. One that begins with # and a name is a setting \
that is off: remove the # to use it. `hpml schema site` prints all settings."""
_NO_NODES = """\
The cluster shows its nodes to administrators only (PrivateData), so the node types, \
[node_types.NAME], are missing."""
_PATHS = """\
Where jobs stage data: `target: local` is $SLURM_TMPDIR, else $TMPDIR as the site sets it in a \
job, else /tmp; `target: shm` is /dev/shm."""
_STAGING = """\
Limits for jobs that stage data, and what the shared file system can do; ask its administrators. \
Rates are bytes per second: by them a job of several nodes decides whether each node reads or one \
reads and passes on."""
_STAGING_EXAMPLES: tuple[tuple[str, Any, str], ...] = (
    ("opens_per_second", 2000, "most files that a node opens"),
    ("opens_per_second_per_job", 10_000, "most that all nodes of a job open"),
    ("array_jitter", 60, "seconds over which an array's tasks begin to read"),
    ("shared_rate", "20G", "read from the shared file system by all nodes"),
    ("metadata_rate", 20_000, "files opened by all nodes"),
    ("link_rate", "10G", "sent from node to node"),
    ("disk_rate", "2G", "written by a node's disk"),
)
_DIRECTIVES = """
# Rules for sbatch options, by name: forbid (with the reason), omit, rename ({value}, or {item} for
# each part of it), default.
#[directives.mem]
#forbid = "memory follows the CPUs here: ask for more CPUs"
#[directives.exclusive]
#omit = true
#[directives.hint]
#default = "nomultithread"  # one task per core
"""
_WHOLE_NODES = """\
# Jobs get whole nodes here (select/linear): GPUs only by --gres.
[directives.gpus-per-node]
rename = "--gres=gpu:{item}"
"""


@dataclass(frozen=True)
class Origin:
    """What a profile is written from, besides the cluster.

    Attributes:
        version: of hpml.
        writer: such as `ada@login1`.
        when: the date, as text.
        looks: per kind of node what a probe found, or why there is none; empty without probes.
        topologies: per kind of node its topology file, relative to the profile.
    """

    version: str = "(unknown)"
    writer: str = "(unknown)"
    when: str = "(unknown)"
    looks: Mapping[str, Look | str] = field(default_factory=dict)
    topologies: Mapping[str, str] = field(default_factory=dict)


def profile_text(
    cluster: Cluster, origin: Origin | None = None, groups: Sequence[NodeGroup] | None = None
) -> str:
    """Return a site profile in TOML that `spec.Site` accepts, with comments.

    Equal input gives equal text. What the profile's model cannot hold, such as names with spaces,
    is left out.
    """
    origin = origin or Origin()
    groups = group_nodes(cluster) if groups is None else groups
    document = tomlkit.document()
    _head(document, cluster, origin)
    _limits(_add(document, "limits"), cluster)
    _paths(_add(document, "paths"), cluster, origin)
    staging = _add(document, "staging")
    _remark(staging, _STAGING)
    for name, value, remark in _STAGING_EXAMPLES:
        _propose(staging, name, value, remark)
    partitions = _add(document, "partitions", named=True)
    for partition in cluster.partitions:
        if _is_word(partition.name):
            default = partition is cluster.default_partition
            _partition(_add(partitions, partition.name), partition, groups, default=default)
    if "nodes" in cluster.hidden:
        _remark(document, _NO_NODES)
    node_types = _add(document, "node_types", named=True)
    for group in groups:
        _node_type(_add(node_types, group.name), group, origin)
    defaults = _add(document, "defaults", named=True)
    _resources(_add(defaults, "resources"), cluster)
    _propose(_add(defaults, "environment"), "modules", ["cuda/12.4"])
    directives = _DIRECTIVES + (_WHOLE_NODES if cluster.limits.whole_nodes else "")
    text = tomlkit.dumps(document) + directives
    return text.encode("utf-8", "replace").decode()


def release(version: Sequence[int]) -> str:
    """Return Slurm's version as Slurm writes it.

    >>> release((22, 5, 8))
    '22.05.8'
    """
    return ".".join(
        f"{part:02d}" if place == 1 else f"{part}" for place, part in enumerate(version)
    )


def _add(section: Section, name: str, *, named: bool = False) -> Table:
    """Add a table; a `named` one has no header and holds a table for each name."""
    table = tomlkit.table(is_super_table=named)
    section.add(name, table)
    return table


def _accepted(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a section of the profile can hold, without those that are None."""
    known = {name: value for name, value in given.items() if value is not None}
    refused: set[object] = set()
    try:
        model.model_validate(known)
    except ValidationError as error:
        refused = {problem["loc"][0] for problem in error.errors()}
    return {name: value for name, value in known.items() if name not in refused}


def _is_word(name: str) -> bool:
    """Whether a profile can hold the name of a partition or account."""
    return bool(_accepted(models.Site, {"cluster": name}))


def _plain(text: str) -> str:
    """Return a text in one line, with `?` for what cannot be printed."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _remark(section: Section, text: str) -> None:
    for line in textwrap.wrap(_plain(text), _WIDTH, break_long_words=False) or [""]:
        section.add(tomlkit.comment(line))


def _set(section: Section, name: str, value: Any, remark: str = "") -> None:
    """Add a setting with its comment behind it, or above it where the line would be long."""
    item = tomlkit.item(value)
    width = len(name) + len(item.as_string()) + len(remark)
    if width > _WIDTH and remark:
        _remark(section, remark)
    elif remark:
        item.comment(_plain(remark))
    if isinstance(value, list) and width > _WIDTH:
        item.multiline(True)
    section.add(name, item)


def _propose(section: Section, name: str, value: Any, remark: str = "") -> None:
    """Add a setting that is off."""
    proposed = tomlkit.document()
    _set(proposed, name, value, remark)
    for line in tomlkit.dumps(proposed).splitlines():
        section.add(Comment(Trivia(comment=line if line.startswith("# ") else f"#{line}")))


def _head(document: Section, cluster: Cluster, origin: Origin) -> None:
    slurm = release(cluster.limits.version)
    looks = [look for look in origin.looks.values() if isinstance(look, Look)]
    looked = f" and a probe of {len(looks)} of {len(origin.looks)} kinds of nodes"
    header = _HEADER.format(
        cluster=cluster.limits.cluster or "a cluster",
        version=origin.version,
        writer=origin.writer,
        when=origin.when,
        slurm=slurm,
        looked=looked if origin.looks else "",
    )
    for paragraph in header.split("\n"):
        _remark(document, paragraph)
    document.add(tomlkit.nl())
    modules = list(dict.fromkeys(name for look in looks for name in look.modules or ()))
    head = {"schema_version": 1, "cluster": cluster.limits.cluster, "slurm": slurm}
    for name, value in _accepted(models.Site, {**head, "modules": modules or None}).items():
        _set(document, name, value, "on the nodes, for reference" * (name == "modules"))
    _propose(document, "templates", "templates", "made by `hpml template eject`")


def _limits(table: Table, cluster: Cluster) -> None:
    limits = cluster.limits
    remarks = {
        "max_array_size": "array indices end one below",
        "max_script_bytes": "longest batch script",
    }
    sizes = {name: getattr(limits, name) for name in remarks}
    for name, value in _accepted(models.Limits, sizes).items():
        _set(table, name, value, remarks[name])
    if limits.submit_plugins:
        plugins = first_few(limits.submit_plugins)
        _remark(table, f"This site has unknown rules of its own (job_submit plugins: {plugins}).")
    if not limits.memory_consumable:
        _remark(table, "Slurm does not track memory here: --mem is accepted and not enforced.")


def _paths(table: Table, cluster: Cluster, origin: Origin) -> None:
    _remark(table, _PATHS)
    tmp_fs = cluster.limits.tmp_fs
    disk = max((node.tmp_disk_mib for node in cluster.nodes), default=0)
    is_plain = "%" not in tmp_fs and tmp_fs.rstrip("/") not in ("", "/tmp")  # noqa: S108 - default
    if is_plain and _accepted(models.Paths, {"scratch": tmp_fs}):
        add = _set if disk and not origin.looks else _propose
        add(table, "scratch", tmp_fs, "Slurm's TmpFS")
    else:
        _propose(table, "scratch", "$LOCAL_SCRATCH")
    _propose(table, "ram", "/dev/shm")  # noqa: S108 - as Linux has it


def _partition(
    table: Table, partition: Partition, groups: Sequence[NodeGroup], *, default: bool
) -> None:
    per_cpu, per_node = partition.default_memory_per_cpu_mib, partition.default_memory_per_node_mib
    state = partition.state
    for remark, applies in {
        f"{state} when this was written.": state != "UP",
        "Only root may use it.": partition.root_only,
        "Only jobs in a reservation may use it: add --reservation.": partition.reservation_only,
        f"Jobs must ask for at least {partition.min_nodes} nodes.": partition.min_nodes > 1,
        f"It has a QOS, {partition.qos}, with more limits.": partition.qos,
        f"Not for accounts {first_few(partition.deny_accounts)}.": partition.deny_accounts,
        f"Not with QOS {first_few(partition.deny_qos)}.": partition.deny_qos,
        f"Only for groups {first_few(partition.allow_groups or ())}.": partition.allow_groups,
        f"At most {partition.max_memory_per_cpu_mib} MiB per CPU.": (
            partition.max_memory_per_cpu_mib
        ),
        f"Jobs that ask for no memory get {per_cpu} MiB per CPU.": per_cpu,
        f"Jobs that ask for no memory get {per_node} MiB per node.": per_node,
    }.items():
        if applies:
            _remark(table, remark)
    members = set(partition.nodes)
    limits = {
        "default": default or None,
        "node_types": [
            group.name
            for group in groups
            if partition.name in group.partitions or members & {node.name for node in group.nodes}
        ],
        "nodes": partition.total_nodes,
        "max_nodes": partition.max_nodes,
        "max_time": _duration(partition.max_seconds),
        "default_time": _duration(partition.default_seconds or partition.max_seconds),
        "max_cpus_per_node": partition.max_cpus_per_node,
        "max_memory_per_node": _memory(partition.max_memory_per_node_mib),
        "exclusive": partition.exclusive or None,
        "accounts": partition.allow_accounts and list(partition.allow_accounts),
        "qos": partition.allow_qos and list(partition.allow_qos),
    }
    for name, value in _accepted(models.Partition, limits).items():
        _set(table, name, value, "jobs get whole nodes" * (name == "exclusive"))


def _memory(mebibytes: int | None) -> str | None:
    return values.size_text(mebibytes) if mebibytes else None


def _duration(seconds: int | None) -> str | None:
    """Return a time limit; None for zero, which Slurm does not mean."""
    if seconds is None:
        return "unlimited"
    return values.format_time(seconds) if seconds > 0 else None


def _node_type(table: Table, group: NodeGroup, origin: Origin) -> None:
    node, look = group.sample, origin.looks.get(group.name)
    if group.uneven:
        _remark(table, f"Nodes differ in {', '.join(group.uneven)}: these are the least values.")
    hardware = {
        "nodes": fold(node.name for node in group.nodes),
        "count": len(group.nodes),
        "cpus": node.cpus,
        "sockets": node.sockets,
        "cores_per_socket": node.cores_per_socket,
        "threads_per_core": node.threads_per_core,
        "memory": _memory(node.memory_mib),
        "gpus": gpu_text(group.gpus) if group.gpus else None,
        "local_disk": _memory(node.tmp_disk_mib),
        "features": sorted(node.features) or None,
        "topology": origin.topologies.get(group.name),
    }
    if isinstance(look, Look):
        hardware["interfaces"] = list(look.network[:1]) or None
        scratch = look.scratch
        if scratch is not None:
            hardware["scratch"] = scratch.name if scratch.name[0] == "$" else scratch.path
    for name, value in _accepted(models.NodeType, hardware).items():
        _set(table, name, value)
    others = [f"{gres.name}:{gres.kind}:{gres.count}" for gres in node.gres if gres.name != "gpu"]
    if others:
        _remark(table, f"Other generic resources: {first_few(others)}.")
    out = [f"{node.name} ({node.reason})" for node in group.nodes if not node.up]
    if out:
        _remark(table, f"Out of service when this was written: {len(out)} of {len(group.nodes)}.")
        _remark(table, first_few(out, 5))
    if isinstance(look, str):
        _remark(table, f"Not probed: {look}.")
    elif look is not None:
        _look(table, look)


def _look(table: Table, look: Look) -> None:
    """Add what a probe found on a node of this kind."""
    _remark(table, f"Found on {look.host}:")
    if not any(place.path == "/dev/shm" and place.writable for place in look.places):  # noqa: S108
        _remark(table, "- no writable /dev/shm: stage with `target: local`")
    for place in look.places:
        path = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
        closed = "" if place.writable else ", not writable"
        _remark(table, f"- {path}: {place.filesystem} ({_kind(place)}), {_free(place)}{closed}")
    for interface in look.interfaces:
        speed = interface.speed_mbps
        parts = [f"{speed / 1000:g} Gbit/s" if speed else "speed unknown"]
        parts += ["IP over InfiniBand"] * interface.infiniband
        parts += ["no IPv4 address"] * (not interface.addressed)
        _remark(table, f"- {interface.name}: {', '.join(parts)}")


def _kind(place: Place) -> str:
    return "RAM" if place.in_ram else "shared" if place.shared else "local"


def _free(place: Place) -> str:
    return f"{place.free_kib / 1024**2:.1f} of {place.total_kib / 1024**2:.1f} GiB free"


def _resources(table: Table, cluster: Cluster) -> None:
    """Add defaults: set where only one value is possible, else proposed."""
    _remark(table, "Defaults of jobs here: any field of a job file.")
    default = cluster.default_partition
    names = [partition.name for partition in cluster.partitions if _is_word(partition.name)]
    if default is None and len(names) == len(cluster.partitions) == 1:
        _set(table, "partition", names[0], "the only one; Slurm has no default")
    elif default is None and names:
        remark = f"Slurm has no default partition: every job must name one of {first_few(names)}."
        _propose(table, "partition", names[0], remark)
    _account(table, cluster)
    limit = _duration(default.max_seconds) if default else None
    remark = f"{default.name}, Slurm's default, allows {limit}" if default and limit else ""
    _propose(table, "time", "01:00:00", remark)
    _propose(table, "cpus_per_rank", 8, "loader workers included")


def _account(table: Table, cluster: Cluster) -> None:
    user = cluster.user or "this user"
    if cluster.associations is None:
        _remark(table, "Accounts: Slurm's accounting did not answer.")
        return
    associations = [one for one in cluster.associations if _is_word(one.account)]
    accounts = list(dict.fromkeys(association.account for association in associations))
    default = next((one.account for one in associations if one.default), "")
    if not accounts:
        enforced = "associations" in cluster.limits.accounting_enforce
        support = ", and Slurm refuses jobs without one: ask the site's support" * enforced
        _remark(table, f"Accounts: {user} has none{support}.")
    elif len(accounts) == 1 and not default:
        _set(table, "account", accounts[0], f"the only one of {user}")
    else:
        charged = f"; {default} is charged when none is given" if default else ""
        remark = f"Accounts of {user}: {first_few(accounts)}{charged}."
        _propose(table, "account", default or accounts[0], remark)
