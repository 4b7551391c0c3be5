"""The text of a site profile: a pure function of what a cluster reports and probes found."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tomlkit
from tomlkit.items import Comment, Table, Trivia

from hpml_orchestrator.site import profile_values as values
from hpml_orchestrator.site.look import Look, Place
from hpml_orchestrator.site.nodes import fold, group_nodes
from hpml_orchestrator.spec.job import MAX_LIST

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["Origin", "profile_text"]

Section = tomlkit.TOMLDocument | Table

_WIDTH = 98
_NODES_CHARS = 1024
_REASONS_SHOWN = 5
_HEADER = """\
Site profile of {cluster} for hpml, written by hpml {version} for {writer} on {when}, \
from {slurm}{looked}.

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
_DIRECTIVES = """\
Rules for sbatch options, by name: forbid (with the reason), omit, rename ({value}, or {item} for \
each part of it), default."""
_STATES = {
    "DOWN": "DOWN when this was written: accepts jobs and starts none.",
    "DRAIN": "DRAIN when this was written: accepts no new jobs.",
    "INACTIVE": "INACTIVE when this was written: accepts no jobs and starts none.",
}


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
    is named in a comment and left out.
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
    if cluster.partitions:
        _partitions(_add(document, "partitions", named=True), cluster, groups)
    if "nodes" in cluster.hidden:
        _remark(document, _NO_NODES)
    if groups:
        node_types = _add(document, "node_types", named=True)
        for group in groups:
            _node_type(_add(node_types, group.name), group, origin)
    defaults = _add(document, "defaults", named=True)
    _resources(_add(defaults, "resources"), cluster)
    _propose(_add(defaults, "environment"), "modules", ["cuda/12.4"])
    _directives(document, cluster)
    return tomlkit.dumps(document)


def _add(section: Section, name: str, *, named: bool = False) -> Table:
    """Add a table; a `named` one has no header and holds a table for each name."""
    table = tomlkit.table(is_super_table=named)
    section.add(name, table)
    return table


def _plain(text: str) -> str:
    """Return a text in one line, with `?` for what cannot be printed."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))


def _remark(section: Section, text: str) -> None:
    for line in textwrap.wrap(_plain(text), _WIDTH, break_long_words=False) or [""]:
        section.add(tomlkit.comment(line))


def _set(section: Section, name: str, value: Any, remark: str = "") -> None:
    """Add a setting, unless it has no value, with its comment behind it or above it."""
    if value is None:
        return
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
        _raw(section, line if line.startswith("# ") else f"#{line}")


def _raw(section: Section, comment: str) -> None:
    section.add(Comment(Trivia(comment=comment)))


def _head(document: Section, cluster: Cluster, origin: Origin) -> None:
    version = values.release(cluster.limits.version)
    looks = [look for look in origin.looks.values() if isinstance(look, Look)]
    looked = f" and a probe of {len(looks)} of {len(origin.looks)} kinds of nodes"
    header = _HEADER.format(
        cluster=cluster.limits.cluster or "a cluster",
        version=origin.version,
        writer=origin.writer,
        when=origin.when,
        slurm=f"Slurm {version}" if version else "Slurm",
        looked=looked if origin.looks else "",
    )
    for paragraph in header.split("\n"):
        _remark(document, paragraph)
    document.add(tomlkit.nl())
    _set(document, "schema_version", 1)
    for name, value in (("cluster", cluster.limits.cluster), ("slurm", version)):
        if value and values.fits("PlainWord", value):
            _set(document, name, value)
    _propose(document, "templates", "templates", "made by `hpml template eject`")
    known = [look.modules for look in looks if look.modules is not None]
    if known:
        listed = dict.fromkeys(name for modules in known for name in modules)
        modules, _ = values.names(listed, "ModuleName")
        _set(document, "modules", modules, "on the nodes, for reference")


def _limits(table: Table, cluster: Cluster) -> None:
    limits = cluster.limits
    size = values.count(limits.max_array_size)
    _set(table, "max_array_size", size, "array indices end one below")
    _set(table, "max_script_bytes", values.count(limits.max_script_bytes), "longest batch script")
    if limits.submit_plugins:
        plugins = values.first_few(limits.submit_plugins)
        _remark(table, f"This site has unknown rules of its own (job_submit plugins: {plugins}).")


def _paths(table: Table, cluster: Cluster, origin: Origin) -> None:
    _remark(table, _PATHS)
    tmp_fs = cluster.limits.tmp_fs
    disk = values.memory(max((node.tmp_disk_mib for node in cluster.nodes), default=0))
    plain = values.fits("NodePath", tmp_fs) and "%" not in tmp_fs
    if plain and tmp_fs.rstrip("/") not in ("", "/tmp"):  # noqa: S108 - used without a profile too
        add = _set if disk and not origin.looks else _propose
        add(table, "scratch", tmp_fs, f"Slurm's TmpFS, {disk} on some node" if disk else "TmpFS")
    else:
        _propose(table, "scratch", "$LOCAL_SCRATCH")
    _propose(table, "ram", "/dev/shm")  # noqa: S108 - as Linux has it


def _partitions(table: Table, cluster: Cluster, groups: Sequence[NodeGroup]) -> None:
    group_of = {node.name: group.name for group in groups for node in group.nodes}
    for number, partition in enumerate(cluster.partitions):
        if number >= MAX_LIST or not values.fits("PlainWord", partition.name):
            continue
        found = Counter(group_of[name] for name in partition.nodes if name in group_of)
        names = [
            group.name
            for group in groups
            if group.name in found or partition.name in group.partitions
        ]
        default = partition is cluster.default_partition
        _partition(_add(table, partition.name), partition, names, default=default)


def _partition(table: Table, partition: Partition, groups: list[str], *, default: bool) -> None:
    for remark in _partition_remarks(partition):
        _remark(table, remark)
    default_seconds = partition.default_seconds
    for name, value in (
        ("default", default or None),
        ("node_types", groups),
        ("nodes", values.count(partition.total_nodes)),
        ("max_nodes", values.count(partition.max_nodes)),
        ("max_time", values.duration(partition.max_seconds)),
        ("default_time", None if default_seconds is None else values.duration(default_seconds)),
        ("max_cpus_per_node", values.count(partition.max_cpus_per_node)),
        ("max_memory_per_node", values.memory(partition.max_memory_per_node_mib)),
    ):
        _set(table, name, value)
    _set(table, "exclusive", partition.exclusive or None, "jobs get whole nodes")
    for name, allowed in (("accounts", partition.allow_accounts), ("qos", partition.allow_qos)):
        good, bad = values.names(allowed or ())
        if bad:  # an incomplete list would refuse what Slurm accepts
            _remark(table, f"{name}: only {values.first_few([*good, *bad])}.")
        elif allowed is not None:
            _set(table, name, good)


def _partition_remarks(partition: Partition) -> list[str]:
    state = partition.state
    per_cpu = values.memory(partition.default_memory_per_cpu_mib)
    per_node = values.memory(partition.default_memory_per_node_mib)
    most = values.memory(partition.max_memory_per_cpu_mib)
    remarks = {
        _STATES.get(state, f"{state} when this was written."): state != "UP",
        "Only root may use it.": partition.root_only,
        "Only jobs in a reservation may use it: add --reservation.": partition.reservation_only,
        f"Jobs must ask for at least {partition.min_nodes} nodes.": partition.min_nodes > 1,
        f"It has a QOS, {partition.qos}, with more limits.": partition.qos,
        f"Not for accounts {values.first_few(partition.deny_accounts)}.": partition.deny_accounts,
        f"Not with QOS {values.first_few(partition.deny_qos)}.": partition.deny_qos,
        f"Only for groups {values.first_few(partition.allow_groups or ())}.": (
            partition.allow_groups is not None
        ),
        f"At most {most} of memory per CPU.": most,
        f"Jobs that ask for no memory get {per_cpu} per CPU.": per_cpu,
        f"Jobs that ask for no memory get {per_node} per node.": per_node,
    }
    return [remark for remark, applies in remarks.items() if applies]


def _node_type(table: Table, group: NodeGroup, origin: Origin) -> None:
    node = group.sample
    if group.uneven:
        _remark(table, f"Nodes differ in {', '.join(group.uneven)}: these are the least values.")
    folded = fold(node.name for node in group.nodes)
    if len(folded) <= _NODES_CHARS and values.fits("Line", folded):
        table.add("nodes", folded)
    else:
        _remark(table, f"nodes: {folded[:80]}… (too many to list)")
    _set(table, "count", values.count(len(group.nodes)))
    for name in ("cpus", "sockets", "cores_per_socket", "threads_per_core"):
        _set(table, name, values.count(getattr(node, name)))
    _set(table, "memory", values.memory(node.memory_mib))
    if group.gpus:
        gpus, typed = values.gpus(group.gpus)
        types = ", ".join(f"{gres.kind}:{gres.count}" for gres in group.gpus)
        _set(table, "gpus", gpus, "" if typed else f"Slurm calls them {types}")
    others = [f"{one.name}:{one.kind}:{one.count}" for one in node.gres if one not in group.gpus]
    if others:
        _remark(table, f"Other generic resources: {values.first_few(others)}.")
    _set(table, "local_disk", values.memory(node.tmp_disk_mib), "Slurm's TmpDisk")
    features, _ = values.names(sorted(node.features))
    _set(table, "features", features or None)
    _out_of_service(table, group)
    look = origin.looks.get(group.name)
    if isinstance(look, str):
        _remark(table, f"Not probed: {look}.")
    elif look is not None:
        _look(table, look)
    if group.name in origin.topologies:
        _set(table, "topology", origin.topologies[group.name])
    elif look is not None:
        _topology_hint(table, group)


def _out_of_service(table: Table, group: NodeGroup) -> None:
    reasons: dict[str, list[str]] = {}
    for node in group.nodes:
        if not node.up:
            state = "+".join(sorted(node.states))
            reason = f"{state}: {node.reason}" if node.reason else state
            reasons.setdefault(reason, []).append(node.name)
    if reasons:
        out = sum(len(nodes) for nodes in reasons.values())
        _remark(table, f"Out of service when this was written: {out} of {len(group.nodes)}.")
    for reason, nodes in list(reasons.items())[:_REASONS_SHOWN]:
        _remark(table, f"- {values.first_few(nodes)}: {reason[:300]}")
    if len(reasons) > _REASONS_SHOWN:
        _remark(table, f"- and {len(reasons) - _REASONS_SHOWN} more reasons: see `sinfo -R`")


def _look(table: Table, look: Look) -> None:
    """Add what a probe found on a node of this kind."""
    _remark(table, f"Found on {look.host}:")
    if look.ram is None or not look.ram.writable:
        _remark(table, "- no writable /dev/shm: stage with `target: local`")
    for place in look.places:
        kind = "RAM" if place.in_ram else "shared" if place.shared else "local"
        path = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
        closed = "" if place.writable else ", not writable"
        _remark(table, f"- {path}: {place.filesystem} ({kind}), {_free(place)}{closed}")
    for interface in look.interfaces:
        speed = interface.speed_mbps
        parts = [f"{speed / 1000:g} Gbit/s" if speed else "speed unknown"]
        parts += ["IP over InfiniBand"] * interface.infiniband
        parts += ["no IPv4 address"] * (not interface.addressed)
        _remark(table, f"- {interface.name}: {', '.join(parts)}")
    scratch = look.scratch
    if scratch is not None:
        path = scratch.name if scratch.name[0] == "$" else scratch.path
        if values.fits("NodePath", path):
            _set(table, "scratch", path, "local disk")
    interfaces, _ = values.names(look.network[:1], "InterfaceName")
    _set(table, "interfaces", interfaces or None)


def _free(place: Place) -> str:
    return f"{place.free_kib / 1024**2:.1f} of {place.total_kib / 1024**2:.1f} GiB free"


def _topology_hint(table: Table, group: NodeGroup) -> None:
    """Say how to make a topology file without lstopo, by a command that stays on one line."""
    partition = next(iter(group.sample.partitions), "")
    where = [
        f"{option} {name}"
        for option, name in (("-p", partition), ("-w", group.sample.name))
        if values.fits("PlainWord", name)
    ]
    file = f"{group.name if values.fits('PlainWord', group.name) else 'node'}.json"
    _remark(table, "Without lstopo, this makes the topology file that binding by srun needs:")
    _raw(table, f"#   {' '.join(['srun -N1 -n1 --exclusive', *where])} hpml topo --json > {file}")
    _remark(table, f'topology = "{file}"')


def _resources(table: Table, cluster: Cluster) -> None:
    """Add defaults: set where only one value is possible, else proposed."""
    _remark(table, "Defaults of jobs here: any field of a job file.")
    default = cluster.default_partition
    names, _ = values.names(partition.name for partition in cluster.partitions)
    if default is None and names:
        if len(cluster.partitions) == 1:
            _set(table, "partition", names[0], "the only one; Slurm has no default")
        else:
            listed = values.first_few(names)
            remark = f"Slurm has no default partition: every job must name one of {listed}."
            _propose(table, "partition", names[0], remark)
    _account(table, cluster)
    limit = values.duration(default.max_seconds) if default else None
    remark = f"{default.name}, Slurm's default, allows {limit}" if default and limit else ""
    _propose(table, "time", "01:00:00", remark)
    _propose(table, "cpus_per_rank", 8, "loader workers included")


def _account(table: Table, cluster: Cluster) -> None:
    user = cluster.user or "this user"
    if cluster.associations is None:
        _remark(table, "Accounts: Slurm's accounting did not answer.")
        return
    accounts = list(dict.fromkeys(one.account for one in cluster.associations))
    good, _ = values.names(accounts)
    default = next((one.account for one in cluster.associations if one.default), "")
    if not accounts:
        enforced = "associations" in cluster.limits.accounting_enforce
        support = ", and Slurm refuses jobs without one: ask the site's support" * enforced
        _remark(table, f"Accounts: {user} has none{support}.")
    elif not good:
        _remark(table, f"Accounts: {values.first_few(accounts)}.")
    elif not default and len(accounts) == 1:
        _set(table, "account", good[0], f"the only one of {user}")
    else:
        charged = f"; {default} is charged when none is given" if default else ""
        remark = f"Accounts of {user}: {values.first_few(accounts)}{charged}."
        _propose(table, "account", default if default in good else good[0], remark)


def _directives(document: Section, cluster: Cluster) -> None:
    limits = cluster.limits
    document.add(tomlkit.nl())
    _remark(document, _DIRECTIVES)
    if not limits.memory_consumable:
        _remark(document, "Slurm does not track memory here: --mem is accepted and not enforced.")
    if limits.gres_names and "gpu" not in limits.gres_names:
        _remark(document, "Slurm has no GPUs here: it refuses jobs that ask for some.")
    examples = [("mem", 'forbid = "memory follows the CPUs here: ask for more CPUs"')]
    if limits.whole_nodes:
        _remark(document, "Jobs get whole nodes here (select/linear): GPUs only by --gres.")
        rules = _add(document, "directives", named=True)
        _set(_add(rules, "gpus-per-node"), "rename", "--gres=gpu:{item}")
    else:
        examples.append(("gpus-per-node", 'rename = "--gres=gpu:{item}"'))
    examples.append(("exclusive", "omit = true"))
    if any(node.threads_per_core > 1 for node in cluster.nodes):
        examples.append(("hint", 'default = "nomultithread"  # one task per core'))
    for option, rule in examples:
        _raw(document, f"#[directives.{option}]")
        _raw(document, f"#{rule}")
