"""The text of a site profile: a pure function of what a cluster said and what looks found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.jobs.site_profile import toml, words
from hpml_orchestrator.jobs.site_profile.look import Look
from hpml_orchestrator.jobs.site_profile.nodes import fold, group_nodes
from hpml_orchestrator.jobs.site_profile.wishes import defaults, directives
from hpml_orchestrator.spec.job import MAX_LIST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.cluster import Cluster, Partition
    from hpml_orchestrator.jobs.site_profile.nodes import NodeGroup

__all__ = ["Surroundings", "profile_text"]

_HEADER = """\
Site profile of {cluster} for hpml.

Written by hpml {version} for {writer} on {when}, from {slurm}{looked}.

It tells hpml what this cluster has, which sbatch options it wants, and what jobs get here when \
they do not say. It is yours to edit: `hpml init` never replaces it without --force.

Precedence: command line > job file > the project's hpml.toml > yours in \
~/.config/hpml/site.toml > /etc/hpml/site.toml > hpml's own defaults.

A line that begins with # and a blank is a remark. One that begins with # and a name is a setting \
that does not count: take the # away to use it. `hpml schema site` prints all there is."""

_STATES = {
    "DOWN": "takes jobs and starts none",
    "DRAIN": "takes no new jobs",
    "INACTIVE": "takes no jobs and starts none",
}
_ROWS_SHOWN = 5
_NODES_CHARS = 1024
_HERE_MODULES = 30


@dataclass(frozen=True)
class Surroundings:
    """What the profile tells besides the cluster.

    Attributes:
        version: of hpml.
        writer: who had it written, such as `ada@login1`.
        when: in words.
        here: what a look at the login node found.
        looks: per kind of node what a look found, or why there was none; empty: nobody looked.
        topologies: per kind of node the file that tells its hardware, relative to the profile.
    """

    version: str = ""
    writer: str = ""
    when: str = ""
    here: Look | None = None
    looks: Mapping[str, Look | str] = field(default_factory=dict)
    topologies: Mapping[str, str] = field(default_factory=dict)


def profile_text(
    cluster: Cluster,
    around: Surroundings = Surroundings(),  # noqa: B008 - frozen
    groups: Sequence[NodeGroup] | None = None,
) -> str:
    """Return a site profile in TOML that `spec.Site` takes, with remarks in plain words.

    Equal input gives equal text. What the profile's model cannot hold (names with blanks, numbers
    beyond all measure) is told in a remark and left out.
    """
    kinds = group_nodes(cluster) if groups is None else groups
    sections = [
        _head(cluster, around),
        _network(around),
        _limits(cluster),
        _paths(cluster, around),
        *_partitions(cluster, kinds),
        *(_node_type(group, around) for group in kinds),
        defaults(cluster, around.here),
        directives(cluster),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(cluster: Cluster, around: Surroundings) -> list[str]:
    limits = cluster.limits
    version = words.release(limits.version)
    looked = [kind for kind, one in around.looks.items() if isinstance(one, Look)]
    told = _HEADER.format(
        cluster=limits.cluster or "a cluster",
        version=around.version or "(unknown)",
        writer=around.writer or "somebody",
        when=around.when or "a day unknown",
        slurm=f"Slurm {version}" if version else "Slurm",
        looked=f" and a look at {len(looked)} of {len(around.looks)} kinds of nodes"
        if around.looks
        else "",
    )
    lines = [line for part in told.split("\n") for line in toml.comment(part)]
    lines = ["#" if line == "# " else line for line in lines]
    lines += ["", *toml.entry("schema_version", 1)]
    for name, value in (("cluster", limits.cluster), ("slurm", version)):
        if value and words.fits("PlainWord", value):
            lines += toml.entry(name, value)
    return lines


def _network(around: Surroundings) -> list[str]:
    """Templates, interfaces and modules; those of the login node as suggestions only."""
    looks = [one for one in around.looks.values() if isinstance(one, Look)]
    lines = toml.entry(
        "templates", "templates", active=False, remark="made by `hpml template eject`"
    )
    here = around.here
    if not looks and here is not None and here.network:
        interfaces, _ = words.names(here.network[:1], "InterfaceName")
        if interfaces:
            lines += toml.entry(
                "interfaces",
                interfaces,
                active=False,
                remark="the login node's; `hpml init --probe` looks at the nodes",
            )
    known = [one.modules for one in looks if one.modules is not None]
    if known:
        listed, _ = words.names(
            dict.fromkeys(name for modules in known for name in modules), "ModuleName"
        )
        lines += toml.entry("modules", listed, remark="on the nodes, for reference")
    elif here is not None and here.modules:
        listed, _ = words.names(here.modules, "ModuleName")
        lines += toml.entry(
            "modules",
            listed[:_HERE_MODULES],
            active=False,
            remark=f"The login node has {len(listed)}"
            + (f"; these are the first {_HERE_MODULES}." if len(listed) > _HERE_MODULES else "."),
        )
    return lines


def _limits(cluster: Cluster) -> list[str]:
    limits = cluster.limits
    lines = [toml.header("limits")]
    for name, number, remark in (
        ("max_array_size", limits.max_array_size, "array indices end one below"),
        (
            "max_script_bytes",
            min(limits.max_script_bytes, words.MAX_COUNT),
            "longest batch script",
        ),
    ):
        if words.count(number) is not None:
            lines += toml.entry(name, number, remark=remark)
    if limits.submit_plugins:
        lines += toml.comment(
            f"This site has rules of its own at submission (job_submit plugins: "
            f"{words.shorten(limits.submit_plugins)}), which nobody can know beforehand."
        )
    return lines


def _paths(cluster: Cluster, around: Surroundings) -> list[str]:
    lines = [
        toml.header("paths"),
        *toml.comment(
            "Where jobs stage data: `target: local` goes to $SLURM_TMPDIR, else $TMPDIR as the "
            "site sets it in a job, else /tmp; `target: shm` to /dev/shm."
        ),
    ]
    directory = cluster.limits.tmp_fs
    disk = max((node.tmp_disk_mib for node in cluster.nodes), default=0)
    plain = words.fits("NodePath", directory) and "%" not in directory
    other = plain and directory.rstrip("/") not in ("", "/tmp")  # noqa: S108 - what hpml takes
    if other:
        size = words.memory(disk)
        lines += toml.entry(
            "scratch",
            directory,
            active=bool(disk) and not around.looks,
            remark=f"Slurm's TmpFS, {size} on some node" if size else "Slurm's TmpFS",
        )
    else:
        lines += toml.entry("scratch", "$LOCAL_SCRATCH", active=False)
    return lines + toml.entry("ram", "/dev/shm", active=False)  # noqa: S108 - as Linux has it


def _partitions(cluster: Cluster, groups: Sequence[NodeGroup]) -> list[list[str]]:
    kinds: dict[str, list[str]] = {}
    for group in groups:
        for name in group.partitions:
            kinds.setdefault(name, []).append(group.name)
    by_node = {node.name: group.name for group in groups for node in group.nodes}
    sections = []
    for number, one in enumerate(cluster.partitions):
        if number >= MAX_LIST or not words.fits("PlainWord", one.name):
            sections.append(
                toml.comment(f"Left out: partition {one.name}, whose name no job file can hold.")
            )
            continue
        found = Counter(by_node[name] for name in one.nodes if name in by_node)
        listed = dict.fromkeys([*kinds.get(one.name, ()), *sorted(found)])
        sections.append(_partition(one, [group.name for group in groups if group.name in listed]))
    return sections


def _partition(one: Partition, kinds: list[str]) -> list[str]:
    lines = [toml.header("partitions", one.name)]
    lines += [line for remark in _remarks(one) for line in toml.comment(remark)]
    if one.default:
        lines += toml.entry("default", one.default)
    lines += toml.entry("node_types", kinds)
    default_time = words.duration(one.default_seconds) if one.default_seconds is not None else None
    for name, value in (
        ("nodes", words.count(one.total_nodes)),
        ("max_nodes", words.count(one.max_nodes)),
        ("max_time", words.duration(one.max_seconds)),
        ("default_time", default_time),
        ("max_cpus_per_node", words.count(one.max_cpus_per_node)),
        ("max_memory_per_node", words.memory(one.max_memory_per_node_mib)),
    ):
        if value is not None:
            lines += toml.entry(name, value)
    if one.exclusive:
        lines += toml.entry("exclusive", one.exclusive, remark="jobs get whole nodes")
    for name, allowed in (("accounts", one.allow_accounts), ("qos", one.allow_qos)):
        if allowed is None:
            continue
        good, bad = words.names(allowed)
        if bad:  # a list with holes would refuse what Slurm takes
            lines += toml.comment(f"{name}: only {words.shorten([*good, *bad])}.")
        else:
            lines += toml.entry(name, good)
    return lines


def _remarks(one: Partition) -> list[str]:
    told = []
    if one.state != "UP":
        what = _STATES.get(one.state, "")
        told.append(f"{one.state} when this was written{f': {what}' if what else ''}.")
    for condition, sentence in (
        (one.root_only, "Only root may use it."),
        (one.reservation_only, "Only jobs in a reservation may use it: add --reservation."),
        (one.min_nodes > 1, f"Jobs must ask for at least {one.min_nodes} nodes."),
        (one.qos, f"It has a QOS of its own, {one.qos}, with limits of its own."),
        (one.deny_accounts, f"Not for the accounts {words.shorten(one.deny_accounts)}."),
        (one.deny_qos, f"Not with the QOS {words.shorten(one.deny_qos)}."),
        (
            one.allow_groups is not None,
            f"Only for the groups {words.shorten(one.allow_groups or ())}.",
        ),
        (
            one.max_memory_per_cpu_mib,
            f"At most {words.memory(one.max_memory_per_cpu_mib)} of memory per CPU.",
        ),
        (
            one.default_memory_per_cpu_mib,
            f"Jobs that ask for no memory get {words.memory(one.default_memory_per_cpu_mib)} per CPU.",
        ),
        (
            one.default_memory_per_node_mib,
            f"Jobs that ask for no memory get {words.memory(one.default_memory_per_node_mib)} per node.",
        ),
    ):
        if condition:
            told.append(sentence)
    return told


def _node_type(group: NodeGroup, around: Surroundings) -> list[str]:
    node = group.sample
    lines = [toml.header("node_types", group.name)]
    lines += [line for sentence in group.uneven for line in toml.comment(f"Uneven: {sentence}.")]
    folded = fold(one.name for one in group.nodes)
    if len(folded) <= _NODES_CHARS and words.fits("Line", folded):
        lines += toml.entry("nodes", folded)
    else:
        lines += toml.comment(f"nodes: {folded[:80]}… (too many to list)")
    for name, number in (
        ("count", len(group.nodes)),
        ("cpus", node.cpus),
        ("sockets", node.sockets),
        ("cores_per_socket", node.cores_per_socket),
        ("threads_per_core", node.threads_per_core),
    ):
        if words.count(number) is not None:
            lines += toml.entry(name, number)
    memory, disk = words.memory(node.memory_mib), words.memory(node.tmp_disk_mib)
    if memory:
        lines += toml.entry("memory", memory)
    if group.gpus:
        told, typed = words.gpus(group.gpus)
        odd = ", ".join(f"{one.kind}:{one.count}" for one in group.gpus)
        lines += toml.entry("gpus", told, remark="" if typed else f"Slurm calls them {odd}")
    others = [f"{one.name}:{one.kind}:{one.count}" for one in node.gres if one not in group.gpus]
    if others:
        lines += toml.comment(f"Other generic resources: {words.shorten(others)}.")
    if disk:
        lines += toml.entry("local_disk", disk, remark="Slurm's TmpDisk")
    features, _ = words.names(sorted(node.features))
    if features:
        lines += toml.entry("features", features)
    return lines + _out_of_service(group) + _looked(group, around)


def _out_of_service(group: NodeGroup) -> list[str]:
    out = [node for node in group.nodes if not node.up]
    if not out:
        return []
    lines = toml.comment(f"Out of service when this was written: {len(out)} of {len(group.nodes)}.")
    reasons: dict[str, list[str]] = {}
    for node in out:
        state = "+".join(sorted(node.states))
        reasons.setdefault(f"{state}{f': {node.reason}' if node.reason else ''}", []).append(node.name)
    for reason, listed in list(reasons.items())[:_ROWS_SHOWN]:
        lines += toml.comment(f"- {words.shorten(listed)}: {reason[:300]}")
    if len(reasons) > _ROWS_SHOWN:
        lines += toml.comment(f"- and {len(reasons) - _ROWS_SHOWN} more reasons; `sinfo -R` has all")
    return lines


def _looked(group: NodeGroup, around: Surroundings) -> list[str]:
    look = around.looks.get(group.name)
    if look is None:
        return []
    if isinstance(look, str):
        return toml.comment(f"Not looked at: {look}.")
    lines = toml.comment(f"Found on {look.host}:")
    ram = look.ram
    if ram is None or not ram.writable:
        lines += toml.comment("- no /dev/shm to write to: stage with `target: local`")
    else:
        lines += toml.comment(f"- /dev/shm: {_free(ram.free_kib, ram.total_kib)}")
    for place in look.places:
        if place is not ram:
            kind = "RAM" if place.in_ram else "shared" if place.shared else "local"
            where = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
            closed = "" if place.writable else ", not to write to"
            lines += toml.comment(
                f"- {where}: {place.filesystem} ({kind}), "
                f"{_free(place.free_kib, place.total_kib)}{closed}"
            )
    for one in look.interfaces:
        speed = f"{one.speed_mbps / 1000:g} Gbit/s" if one.speed_mbps else "speed unknown"
        address = "" if one.addressed else ", without an IPv4 address"
        kind = "IP over InfiniBand, " if one.infiniband else ""
        lines += toml.comment(f"- {one.name}: {kind}{speed}{address}")
    for device in look.infiniband:
        lines += toml.comment(f"- InfiniBand {device}")
    scratch = look.scratch
    if scratch is not None:
        where = scratch.name if scratch.name[0] == "$" else scratch.path
        if words.fits("NodePath", where):
            lines += toml.entry("scratch", where, remark="local disk")
    interfaces, _ = words.names(look.network[:1], "InterfaceName")
    if interfaces:
        lines += toml.entry("interfaces", interfaces)
    if group.name in around.topologies:
        lines += toml.entry("topology", around.topologies[group.name])
    else:
        lines += toml.comment("- no lstopo of hwloc 2 there: no topology file")
    return lines


def _free(free_kib: int, total_kib: int) -> str:
    return f"{free_kib / 1024**2:.1f} of {total_kib / 1024**2:.1f} GiB free"
