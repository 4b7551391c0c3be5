"""The text of a site profile: a pure function of what a cluster said and what looks found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hpml_orchestrator.site import toml, words
from hpml_orchestrator.site.look import Look
from hpml_orchestrator.site.node_text import Surroundings, node_type
from hpml_orchestrator.site.nodes import group_nodes
from hpml_orchestrator.site.wishes import defaults, directives
from hpml_orchestrator.spec.job import MAX_LIST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["profile_text"]

_HEADER = """\
Site profile of {cluster} for hpml.

Written by hpml {version} for {writer} on {when}, from {slurm}{looked}.

It tells hpml what this cluster has, which sbatch options it wants, and what jobs get here when \
they do not say. It is yours to edit: `hpml init` never replaces it without --force.

Precedence: command line > job file > the project's hpml.toml > yours in \
~/.config/hpml/site.toml > /etc/hpml/site.toml > hpml's own defaults.

A line that begins with # and a blank is a remark. One that begins with # and a name is a setting \
that does not count: take the # away to use it. `hpml schema site` prints all there is."""

_NO_NODES = """\
The cluster showed no nodes to who wrote this (PrivateData): their types, [node_types.NAME], are \
missing. An administrator sees them."""

_STATES = {
    "DOWN": "takes jobs and starts none",
    "DRAIN": "takes no new jobs",
    "INACTIVE": "takes no jobs and starts none",
}
_HERE_MODULES = 30


def profile_text(
    cluster: Cluster,
    around: Surroundings | None = None,
    groups: Sequence[NodeGroup] | None = None,
) -> str:
    """Return a site profile in TOML that `spec.Site` takes, with remarks in plain words.

    Equal input gives equal text. What the profile's model cannot hold (names with blanks, numbers
    beyond all measure) is told in a remark and left out.
    """
    around = around or Surroundings()
    kinds = group_nodes(cluster) if groups is None else groups
    sections = [
        _head(cluster, around),
        _network(around),
        _limits(cluster),
        _paths(cluster, around),
        _staging(),
        *_partitions(cluster, kinds),
        toml.comment(_NO_NODES) if "nodes" in cluster.hidden else [],
        *(node_type(group, around) for group in kinds),
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


def _staging() -> list[str]:
    """What nobody can read off a cluster, as suggestions to fill in."""
    lines = [
        toml.header("staging"),
        *toml.comment(
            "How gently jobs that stage data ask the shared file system, and what it gives: those "
            "who run it know. Rates are bytes per second; by them a job of several nodes chooses "
            "whether each node reads or one reads and passes on."
        ),
    ]
    for name, value, remark in (
        ("opens_per_second", 2000, "most files that a node opens"),
        ("opens_per_second_per_job", 10_000, "most that all nodes of a job open"),
        ("array_jitter", 60, "seconds over which an array's tasks begin to read"),
        ("shared_rate", "20G", "read of the shared file system by all nodes"),
        ("metadata_rate", 20_000, "files opened by all nodes"),
        ("link_rate", "10G", "sent from node to node"),
        ("disk_rate", "2G", "written by a node's disk"),
    ):
        lines += toml.entry(name, value, active=False, remark=remark)
    return lines


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
        names = [group.name for group in groups if group.name in listed]
        sections.append(_partition(one, names, default=one is cluster.default_partition))
    return sections


def _partition(one: Partition, kinds: list[str], *, default: bool) -> list[str]:
    lines = [toml.header("partitions", one.name)]
    lines += [line for remark in _remarks(one) for line in toml.comment(remark)]
    if default:
        lines += toml.entry("default", default)
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
    by_default = "Jobs that ask for no memory get"
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
            f"{by_default} {words.memory(one.default_memory_per_cpu_mib)} per CPU.",
        ),
        (
            one.default_memory_per_node_mib,
            f"{by_default} {words.memory(one.default_memory_per_node_mib)} per node.",
        ),
    ):
        if condition:
            told.append(sentence)
    return told
