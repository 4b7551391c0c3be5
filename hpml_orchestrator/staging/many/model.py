"""How long each way to bring data to all nodes of a job takes, and which one is best.

S bytes in F files go to N nodes. B_fs is what the shared file system gives all nodes together,
M_fs how many files it opens per second for all of them; b_node, b_link and b_disk are the rates at
which one node reads the shared file system, talks to another node and writes its target.

    shared     max(S N / B_fs, S / min(b_node, b_disk)) + F N / M
    chain      S / min(b_node, B_fs, b_link, b_disk) + F / M_1 + (N - 1) (chunk / b_link + l)
    sbcast     S / min(b_node, B_fs) + ceil(log_w N) S / (b_link / w) [+ S / b_disk for an archive]
    partition  1/N of shared

where every one of N nodes opens files no faster than one node can: M = min(M_fs, N m_1), with
m_1 = threads / latency of one node and M_1 = min(M_fs, m_1). Passing on in a chain is pipelined: a
node sends a chunk on while it takes the next, so its depth costs a chunk and a latency l per node.
sbcast sends a block to w nodes at a time, which pass it on (Slurm's tree, TreeWidth), and waits for
all before it sends the next. Model of the pipeline: docs/staging.md, "Many nodes".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.texts import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METHODS", "Choice", "Rates", "choose", "seconds_of"]

METHODS = ("shared", "chain", "sbcast", "partition")
CHUNK_BYTES = 4 << 20
"""What a node of the chain takes before it passes on: the buffer of a relay."""

_TREE_WIDTH = 16
_START_SECONDS = {"shared": 0.0, "chain": 0.5, "sbcast": 1.0, "partition": 0.0}
"""Time until the first byte: nodes find one another; sbcast asks the controller."""

_WORTH = 0.9
"""A way that needs other nodes is chosen when it takes at most so much of the time of `shared`."""


@dataclass(frozen=True)
class Rates:
    """What file system, network and nodes are able to; 0 stands for not known.

    Defaults are cautious figures of published systems, not measurements of this one: a mid-size
    Lustre or NFS server gives some 5 GB/s and some 20,000 opens per second to all its clients; a
    node with a 25 Gbit/s card gets 2 to 3 GB/s; NVMe writes 2 GB/s; 1 ms is what an open takes at
    a metadata server that others use, too.

    Attributes:
        shared_rate: of the file system for all nodes, bytes/s.
        node_rate: of the file system for one node, bytes/s; that of the link when not known.
        link_rate: between two nodes, bytes/s.
        disk_rate: of a node's target, bytes/s.
        metadata_rate: files opened per second by all nodes together.
        open_seconds: latency of an open.
        parallel: opens at a time per node.
    """

    shared_rate: float = 0.0
    node_rate: float = 0.0
    link_rate: float = 0.0
    disk_rate: float = 0.0
    metadata_rate: float = 0.0
    open_seconds: float = 0.0
    parallel: int = 64

    def filled(self) -> Rates:
        """Return the rates with defaults for what is not known."""
        link = self.link_rate or 2.5e9
        return replace(
            self,
            shared_rate=self.shared_rate or 5e9,
            node_rate=self.node_rate or link,
            link_rate=link,
            disk_rate=self.disk_rate or 2e9,
            metadata_rate=self.metadata_rate or 20_000.0,
            open_seconds=self.open_seconds or 1e-3,
        )


@dataclass(frozen=True)
class Choice:
    """A way, why, and what the model says of all.

    Attributes:
        method: one of METHODS.
        reason: a sentence to print.
        seconds: by method; only those that can be had.
    """

    method: str
    reason: str
    seconds: Mapping[str, float]


def seconds_of(
    method: str, *, size: int, files: int, nodes: int, rates: Rates, archive: bool = False
) -> float:
    """Return how long a way takes by the model.

    Args:
        method: one of METHODS.
        size: bytes of the data.
        files: that are opened at the source.
        nodes: of the job.
        rates: what is known.
        archive: one file that each node unpacks when it has it (counts for sbcast).
    """
    r = rates.filled()
    one_node = r.parallel / r.open_seconds
    if method in {"shared", "partition"}:
        opens = files * nodes / min(r.metadata_rate, nodes * one_node)
        both = max(size * nodes / r.shared_rate, size / min(r.node_rate, r.disk_rate))
        return (both + opens) / (nodes if method == "partition" else 1)
    read = min(r.node_rate, r.shared_rate)
    opens = files / min(r.metadata_rate, one_node)
    if method == "chain":
        slowest = min(read, r.link_rate, r.disk_rate)
        depth = (nodes - 1) * (CHUNK_BYTES / r.link_rate + r.open_seconds)
        return _START_SECONDS[method] + size / slowest + opens + depth
    width = min(_TREE_WIDTH, max(1, nodes - 1))
    levels = math.ceil(math.log(nodes, _TREE_WIDTH)) if nodes > 1 else 0
    sent = size / min(read, r.disk_rate) + levels * size * width / r.link_rate
    return _START_SECONDS[method] + sent + opens + (size / r.disk_rate if archive else 0.0)


def choose(
    *,
    size: int,
    files: int,
    nodes: int,
    rates: Rates | None = None,
    wanted: str = "auto",
    one_file: bool = False,
    archive: bool = False,
    has_sbcast: bool = False,
) -> Choice:
    """Choose how the data comes to all nodes.

    `partition` is only taken when it is asked for: it changes what a rank sees.

    Args:
        size: bytes of the data.
        files: that are opened at the source.
        nodes: of the job.
        rates: what is known of file system, network and nodes.
        wanted: one of METHODS, or "auto".
        one_file: the source is one file, which sbcast can send.
        archive: that file is unpacked on the nodes.
        has_sbcast: the command is there, and this is a job of Slurm's.

    Raises:
        InputError: `wanted` is none of them, or cannot be had.
    """
    if wanted not in {"auto", *METHODS}:
        raise InputError(
            f"must be auto or one of {', '.join(METHODS)}", field="distribution", value=wanted
        )
    can_sbcast = one_file and has_sbcast
    if wanted == "sbcast" and not can_sbcast:
        why = "sends one file" if not one_file else "is not here, or this is no job of Slurm's"
        hint = "make a tar archive of it, or use chain" if not one_file else "use chain"
        raise InputError(f"sbcast {why}", field="distribution", value=wanted, hint=hint)
    known = rates or Rates()
    possible = [one for one in METHODS if one != "sbcast" or can_sbcast]
    seconds = {
        one: seconds_of(one, size=size, files=files, nodes=nodes, rates=known, archive=archive)
        for one in possible
    }
    of_what = f"{human_bytes(size)} in {files} file{'s' * (files != 1)} to {nodes} nodes"
    if nodes == 1 and wanted != "partition":
        return Choice("shared", "there is one node: it reads for itself", seconds)
    if wanted != "auto":
        return Choice(wanted, f"{wanted}, as asked for: {of_what}", seconds)
    free = [one for one in possible if one not in {"shared", "partition"}]
    best = min(free, key=lambda one: seconds[one])
    told = ", ".join(f"{one} {seconds[one]:.1f} s" for one in ["shared", *free])
    if seconds[best] <= _WORTH * seconds["shared"]:
        return Choice(best, f"{best}: {of_what}, by the model {told}", seconds)
    return Choice("shared", f"every node reads for itself: {of_what}, by the model {told}", seconds)
