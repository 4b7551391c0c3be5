"""The text of a site profile: a pure function of what a cluster reports and probes found.

`templates/site-profile.txt` is what every profile has; this fills it with sections in TOML.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tomlkit
from pydantic import BaseModel, ValidationError
from tomlkit.items import Array

from hpml_orchestrator import assets
from hpml_orchestrator.records import units
from hpml_orchestrator.records.texts import first_few, printable
from hpml_orchestrator.site import model as models
from hpml_orchestrator.site.node_probe import NodeProbe
from hpml_orchestrator.site.nodes import fold, gpu_text, group_nodes

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.nodes import NodeGroup

_WIDTH = 98
_SHOWN_OUT = 5
_WHOLE_NODES = """\
# Jobs get whole nodes here (select/linear): GPUs only by --gres.
[directives.gpus-per-node]
rename = "--gres=gpu:{item}"
"""


@dataclass(frozen=True)
class Origin:
    """What a profile is written from, besides the cluster."""

    version: str = "(unknown)"  # of hpml
    writer: str = "(unknown)"  # such as `ada@login1`
    when: str = "(unknown)"
    # By kind of node, what a probe found, or why there is none; empty without probes.
    probes: Mapping[str, NodeProbe | str] = field(default_factory=dict)
    # By kind of node, its topology file, relative to the profile.
    topologies: Mapping[str, str] = field(default_factory=dict)


def profile_text(
    cluster: Cluster, origin: Origin | None = None, groups: Sequence[NodeGroup] | None = None
) -> str:
    """Return a site profile in TOML that `site.model.Site` accepts, with comments.

    Equal input gives equal text. Values that the profile's model refuses, such as names with
    spaces, are left out.
    """
    origin = origin or Origin()
    groups = group_nodes(cluster) if groups is None else groups
    slurm, default = release(cluster.limits.version), cluster.default_partition
    probes = [probe for probe in origin.probes.values() if isinstance(probe, NodeProbe)]
    looked = f" and a probe of {len(probes)} of {len(origin.probes)} kinds of nodes"
    modules = list(dict.fromkeys(name for probe in probes for name in probe.modules or ()))
    head = {
        "cluster": cluster.limits.cluster,
        "slurm": slurm,
        "requeue": None if cluster.limits.job_requeue is None else "auto",
        "modules": modules or None,
    }
    remarks = {
        "requeue": f"JobRequeue={cluster.limits.job_requeue:d}; jobs with `checkpoint` ask for it"
        if cluster.limits.job_requeue is not None
        else "",
        "modules": "on the nodes, for reference",
    }
    partitions = [partition for partition in cluster.partitions if _is_word(partition.name)]
    limit = _duration(default.max_seconds) if default else None
    skeleton = string.Template(assets.path("templates/site-profile.txt").read_text("utf-8"))
    text = skeleton.substitute(
        cluster=printable(cluster.limits.cluster) or "a cluster",
        version=printable(origin.version),
        writer=printable(origin.writer),
        when=printable(origin.when),
        slurm=slurm,
        looked=looked if origin.probes else "",
        head=_toml(models.Site, head, remarks),
        limits=_limits(cluster),
        paths=_paths(cluster, origin),
        partitions="".join(
            _partition(partition, groups, default=partition is default) for partition in partitions
        ),
        node_types="".join(_node_type(group, origin) for group in groups) + _hidden(cluster),
        resources=_resources(cluster) + _account(cluster),
        time_limit=f" # {printable(default.name)} allows {limit}" if default and limit else "",
        directives=_WHOLE_NODES if cluster.limits.whole_nodes else "",
    )
    return text.encode("utf-8", "replace").decode()


def release(version: Sequence[int]) -> str:
    """Return Slurm's version as Slurm writes it.

    >>> release((22, 5, 8))
    '22.05.8'
    """
    return ".".join(
        f"{part:02d}" if place == 1 else f"{part}" for place, part in enumerate(version)
    )


def _remark(text: str) -> str:
    lines = textwrap.wrap(printable(text), _WIDTH, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines)


def _toml(
    model: type[BaseModel], given: Mapping[str, object], remarks: Mapping[str, str] | None = None
) -> str:
    known = {name: value for name, value in given.items() if value is not None}
    refused: set[object] = set()
    try:
        model.model_validate(known)
    except ValidationError as error:
        # Leave out single values that the model refuses, such as a feature with a blank, rather
        # than the whole section.
        refused = {problem["loc"][0] for problem in error.errors()}
    document = tomlkit.document()
    for name, value in known.items():
        if name not in refused:
            item = tomlkit.item(value)
            if isinstance(item, Array) and len(item.as_string()) > _WIDTH:
                item.multiline(True)
            if remarks and name in remarks:
                item.comment(remarks[name])
            document.add(name, item)
    return tomlkit.dumps(document)


def _off(name: str, value: str, remark: str = "") -> str:
    return f"{_remark(remark)}#{name} = {tomlkit.item(value).as_string()}\n"


def _is_word(name: str) -> bool:
    return bool(_toml(models.Site, {"cluster": name}))


def _hidden(cluster: Cluster) -> str:
    if "nodes" not in cluster.hidden:
        return ""
    return "\n" + _remark(
        "The cluster shows its nodes to administrators only (PrivateData), so the node types, "
        "[node_types.NAME], are missing."
    )


def _limits(cluster: Cluster) -> str:
    limits = cluster.limits
    remarks = {
        "max_array_size": "array indices end one below",
        "max_script_bytes": "longest batch script",
    }
    text = _toml(models.Limits, {name: getattr(limits, name) for name in remarks}, remarks)
    if limits.submit_plugins:
        plugins = first_few(limits.submit_plugins)
        text += _remark(f"This site changes jobs at submission (job_submit plugins: {plugins}).")
    if not limits.memory_consumable:
        text += _remark("Slurm does not track memory here: --mem is accepted and not enforced.")
    return text


def _paths(cluster: Cluster, origin: Origin) -> str:
    tmp_fs = cluster.limits.tmp_fs
    is_plain = "%" not in tmp_fs and tmp_fs.rstrip("/") not in ("", "/tmp")  # noqa: S108 - default
    text = _toml(models.Paths, {"scratch": tmp_fs}, {"scratch": "Slurm's TmpFS"})
    if not is_plain or not text:
        return _off("scratch", "$LOCAL_SCRATCH")
    has_disk = any(node.tmp_disk_mib for node in cluster.nodes)
    # A probe knows the disks better than TmpFS, and without TmpDisk nothing says that there is a
    # disk: then it is only proposed, in a comment.
    return text if has_disk and not origin.probes else f"#{text}"


def _partition(partition: Partition, groups: Sequence[NodeGroup], *, default: bool) -> str:
    state = partition.state
    most = partition.max_memory_per_cpu_mib
    per_cpu, per_node = partition.default_memory_per_cpu_mib, partition.default_memory_per_node_mib
    remarks = {
        f"{state} when this was written.": state != "UP",
        "Only root may use it.": partition.root_only,
        "Only jobs in a reservation may use it: add --reservation.": partition.reservation_only,
        f"Jobs must ask for at least {partition.min_nodes} nodes.": partition.min_nodes > 1,
        f"It has a QOS, {partition.qos}, with more limits.": partition.qos,
        f"Not for accounts {first_few(partition.deny_accounts)}.": partition.deny_accounts,
        f"Not with QOS {first_few(partition.deny_qos)}.": partition.deny_qos,
        f"Only for groups {first_few(partition.allow_groups or ())}.": partition.allow_groups,
        f"At most {most} MiB of memory per CPU.": most,
        f"Jobs that ask for no memory get {per_cpu} MiB per CPU.": per_cpu,
        f"Jobs that ask for no memory get {per_node} MiB per node.": per_node,
    }
    members = set(partition.nodes)
    default_seconds = partition.default_seconds
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
        "default_time": None if default_seconds is None else _duration(default_seconds),
        "max_cpus_per_node": partition.max_cpus_per_node,
        "max_memory_per_node": _memory(partition.max_memory_per_node_mib),
        "exclusive": partition.exclusive or None,
        "accounts": partition.allow_accounts and list(partition.allow_accounts),
        "qos": partition.allow_qos and list(partition.allow_qos),
    }
    return (
        f"\n[partitions.{tomlkit.key(partition.name).as_string()}]\n"
        + "".join(_remark(remark) for remark, applies in remarks.items() if applies)
        + _toml(models.SitePartition, limits, {"exclusive": "jobs get whole nodes"})
    )


def _memory(mebibytes: int | None) -> str | None:
    return units.size_text(mebibytes) if mebibytes else None


def _duration(seconds: int | None) -> str | None:
    if seconds is None:
        return "unlimited"
    return units.format_time(seconds) if seconds > 0 else None


def _node_type(group: NodeGroup, origin: Origin) -> str:
    node, probe = group.sample, origin.probes.get(group.name)
    text = f"\n[node_types.{group.name}]\n"
    if group.uneven:
        text += _remark(f"Nodes differ in {', '.join(group.uneven)}: these are the least values.")
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
    if isinstance(probe, NodeProbe):
        hardware["interfaces"] = list(probe.network[:1]) or None
        scratch = probe.scratch
        if scratch is not None:
            hardware["scratch"] = scratch.name if scratch.name[0] == "$" else scratch.path
    text += _toml(models.NodeType, hardware)
    others = [
        ":".join(filter(None, (gres.name, gres.kind, str(gres.count))))
        for gres in node.gres
        if gres.name != "gpu"
    ]
    if others:
        text += _remark(f"Other generic resources: {first_few(others)}.")
    out = [f"{node.name}: {node.reason}" for node in group.nodes if not node.up]
    if out:
        text += _remark(f"Out of service when this was written: {len(out)} of {len(group.nodes)}.")
        text += _remark(first_few(out, _SHOWN_OUT))
    if isinstance(probe, str):
        text += _remark(f"Not probed: {probe}.")
    elif probe is not None:
        text += _probe_remark(probe)
    return text


def _probe_remark(probe: NodeProbe) -> str:
    lines = [f"Found on {probe.host}:"]
    if not any(place.name == "ram" and place.writable for place in probe.places):
        lines.append("- no writable /dev/shm: stage with `target: local`")
    for place in probe.places:
        path = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
        kind = "RAM" if place.in_ram else "shared" if place.shared else "local"
        free = f"{place.free_kib / 1024**2:.1f} of {place.total_kib / 1024**2:.1f} GiB free"
        closed = "" if place.writable else ", not writable"
        lines.append(f"- {path}: {place.filesystem} ({kind}), {free}{closed}")
    for interface in probe.interfaces:
        speed = interface.speed_mbps
        parts = [f"{speed / 1000:g} Gbit/s" if speed else "speed unknown"]
        parts += ["IP over InfiniBand"] * interface.infiniband
        parts += ["no IPv4 address"] * (not interface.addressed)
        lines.append(f"- {interface.name}: {', '.join(parts)}")
    return "".join(map(_remark, lines))


def _resources(cluster: Cluster) -> str:
    """Return the default partition of jobs: set if there is only one, else proposed."""
    names = [partition.name for partition in cluster.partitions if _is_word(partition.name)]
    if cluster.default_partition is not None or not names:
        return ""
    if len(cluster.partitions) == 1:
        return f'partition = "{names[0]}" # the only one; Slurm has no default\n'
    remark = f"Slurm has no default partition: every job must name one of {first_few(names)}."
    return _off("partition", names[0], remark)


def _account(cluster: Cluster) -> str:
    """Return the default account of jobs: set if there is only one, else proposed."""
    user = cluster.user or "this user"
    if cluster.associations is None:
        return _remark("Accounts: Slurm's accounting did not answer.")
    known = [association for association in cluster.associations if _is_word(association.account)]
    accounts = list(dict.fromkeys(association.account for association in known))
    default = next((association.account for association in known if association.default), "")
    if not accounts:
        enforced = "associations" in cluster.limits.accounting_enforce
        support = ", and Slurm refuses jobs without one: ask the site's support" * enforced
        return _remark(f"Accounts: {user} has none{support}.")
    if len(accounts) == 1 and not default:
        return f'account = "{accounts[0]}" # the only one of {printable(user)}\n'
    charged = f"; {default} is charged when none is given" if default else ""
    remark = f"Accounts of {user}: {first_few(accounts)}{charged}."
    return _off("account", default or accounts[0], remark)
