"""Where `target: auto` leads: to RAM where data fits well beside the job, else to the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import Site

__all__ = ["NodeRoom", "Target", "choose_target", "room_of_site"]

RAM_SHARE = 0.5
"""Of the memory that a node has beside what the job asks for, how much staging may take: the rest
is for the page cache, for other jobs, and for what the job did not foresee."""


@dataclass(frozen=True)
class NodeRoom:
    """What the nodes that a job may land on have, each the least of them; None: not known.

    Attributes:
        memory_mib: memory that jobs can have.
        disk_mib: size of the local disk.
        scratch: whether the site names a directory on it.
    """

    memory_mib: int | None = None
    disk_mib: int | None = None
    scratch: bool = False


@dataclass(frozen=True)
class Target:
    """What `auto` became, and why, in words that need no quoting in a script."""

    target: str
    why: str


def room_of_site(job: Job, site: Site | None) -> NodeRoom:
    """Return what a site profile tells of the nodes of a job's partition."""
    if site is None:
        return NodeRoom()
    partition = job.resources.partition
    kinds = site.node_types_of(partition)
    limits = [
        int(one.max_memory_per_node.removesuffix("M"))
        for name in site.partitions_of(partition)
        if (one := site.partitions.get(name)) is not None and one.max_memory_per_node
    ]
    memory = [int(kind.memory.removesuffix("M")) for kind in kinds if kind.memory]
    disks = [int(kind.local_disk.removesuffix("M")) for kind in kinds if kind.local_disk]
    known = bool(kinds) and len(memory) == len(kinds)
    return NodeRoom(
        memory_mib=min([*memory, *limits]) if known else None,
        disk_mib=min(disks) if kinds and len(disks) == len(kinds) else None,
        scratch=site.path("scratch", partition) is not None,
    )


def choose_target(size_mib: int | None, *, own_mib: int, in_ram_mib: int, room: NodeRoom) -> Target:
    """Return where one entry of `stage` goes.

    Args:
        size_mib: of the data once staged, per node; None when it is not known.
        own_mib: memory that the job asks for itself, per node; 0 where it says nothing.
        in_ram_mib: what other entries bring to RAM.
        room: what the nodes have.

    >>> choose_target(100, own_mib=4096, in_ram_mib=0, room=NodeRoom(65536)).target
    'shm'
    """
    if not own_mib:
        return Target(
            "local", "the job asks for no memory, to which what goes to RAM would be added"
        )
    if size_mib is None:
        return Target("local", "its size is not known, and RAM has to be asked for")
    size = size_text(size_mib)
    if room.memory_mib is None:
        return Target("local", "the memory of the nodes is not known, a site profile would tell it")
    left = max(0, room.memory_mib - own_mib)
    beside = f"{size_text(left)} that a node has beside the {size_text(own_mib)} of the job"
    if room.disk_mib is not None and size_mib > room.disk_mib and in_ram_mib + size_mib <= left:
        return Target(
            "shm", f"{size} fit into the {beside}, not on a disk of {size_text(room.disk_mib)}"
        )
    others = f" with {size_text(in_ram_mib)} of other data" if in_ram_mib else ""
    if in_ram_mib + size_mib <= RAM_SHARE * left:
        return Target("shm", f"{size}{others} are at most half of the {beside}")
    return Target("local", f"{size}{others} are more than half of the {beside}")
