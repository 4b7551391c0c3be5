"""The sections of a site profile on kinds of nodes, and what a look at one found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.site import toml, words
from hpml_orchestrator.site.look import Look, Place
from hpml_orchestrator.site.nodes import fold

if TYPE_CHECKING:
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["Surroundings", "node_type"]

_ROWS_SHOWN = 5
_NODES_CHARS = 1024


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


def node_type(group: NodeGroup, around: Surroundings) -> list[str]:
    """Return the section of one kind of nodes."""
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
        reasons.setdefault(f"{state}{f': {node.reason}' if node.reason else ''}", []).append(
            node.name
        )
    for reason, listed in list(reasons.items())[:_ROWS_SHOWN]:
        lines += toml.comment(f"- {words.shorten(listed)}: {reason[:300]}")
    if len(reasons) > _ROWS_SHOWN:
        lines += toml.comment(
            f"- and {len(reasons) - _ROWS_SHOWN} more reasons; `sinfo -R` has all"
        )
    return lines


def _looked(group: NodeGroup, around: Surroundings) -> list[str]:
    look = around.looks.get(group.name)
    if look is None:
        return []
    if isinstance(look, str):
        return toml.comment(f"Not looked at: {look}.") + _without_file(group)
    lines = toml.comment(f"Found on {look.host}:") + _places(look) + _networks(look)
    scratch = look.scratch
    if scratch is not None:
        where = scratch.name if scratch.name[0] == "$" else scratch.path
        if words.fits("NodePath", where):
            lines += toml.entry("scratch", where, remark="local disk")
    interfaces, _ = words.names(look.network[:1], "InterfaceName")
    if interfaces:
        lines += toml.entry("interfaces", interfaces)
    if group.name in around.topologies:
        return lines + toml.entry("topology", around.topologies[group.name])
    lines += toml.comment("- no lstopo of hwloc 2 there: no topology file")
    return lines + _without_file(group)


def _without_file(group: NodeGroup) -> list[str]:
    """Say how to make a topology file without lstopo: by a command that stays on one line."""
    node = group.sample
    where = [
        f"{option} {name}"
        for option, name in (("-p", next(iter(node.partitions), "")), ("-w", node.name))
        if words.fits("PlainWord", name)
    ]
    file = f"{group.name if words.fits('PlainWord', group.name) else 'node'}.json"
    command = " ".join(["srun -N1 -n1 --exclusive", *where, "hpml topo --json >", file])
    return [
        *toml.comment("This makes a topology file, which binding by the launcher needs:"),
        f"#   {command}",
        *toml.comment(f'topology = "{file}"'),
    ]


def _places(look: Look) -> list[str]:
    ram = look.ram
    if ram is None or not ram.writable:
        lines = toml.comment("- no /dev/shm to write to: stage with `target: local`")
    else:
        lines = toml.comment(f"- /dev/shm: {_free(ram)}")
    for place in look.places:
        if place is not ram:
            kind = "RAM" if place.in_ram else "shared" if place.shared else "local"
            where = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
            closed = "" if place.writable else ", not to write to"
            lines += toml.comment(f"- {where}: {place.filesystem} ({kind}), {_free(place)}{closed}")
    return lines


def _networks(look: Look) -> list[str]:
    lines = []
    for one in look.interfaces:
        speed = f"{one.speed_mbps / 1000:g} Gbit/s" if one.speed_mbps else "speed unknown"
        address = "" if one.addressed else ", without an IPv4 address"
        kind = "IP over InfiniBand, " if one.infiniband else ""
        lines += toml.comment(f"- {one.name}: {kind}{speed}{address}")
    for device in look.infiniband:
        lines += toml.comment(f"- InfiniBand {device}")
    return lines


def _free(place: Place) -> str:
    return f"{place.free_kib / 1024**2:.1f} of {place.total_kib / 1024**2:.1f} GiB free"
