"""The ways to bring data to all nodes of a job: how long each takes, which is best, its `Supply`.

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

import dataclasses
import functools
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.capacity import room_at
from hpml_orchestrator.staging.engine import EngineOptions
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.many.follower import Follower
from hpml_orchestrator.staging.many.head import Head
from hpml_orchestrator.staging.many.member import Member
from hpml_orchestrator.staging.many.notices import Notices, Place
from hpml_orchestrator.staging.many.partition import PartitionSource
from hpml_orchestrator.staging.many.sbcast import Broadcast, has_sbcast, is_one_file
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.sources import open_source
from hpml_orchestrator.staging.supply import LocalSupply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.staging.capacity import Need, Room
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Reader, Source
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["METHODS", "Rates", "Way", "choose", "seconds_of", "supply_for"]

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
class Way:
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
) -> Way:
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
        return Way("shared", "there is one node: it reads for itself", seconds)
    if wanted != "auto":
        return Way(wanted, f"{wanted}, as asked for: {of_what}", seconds)
    free = [one for one in possible if one not in {"shared", "partition"}]
    best = min(free, key=lambda one: seconds[one])
    told = ", ".join(f"{one} {seconds[one]:.1f} s" for one in ["shared", *free])
    if seconds[best] <= _WORTH * seconds["shared"]:
        return Way(best, f"{best}: {of_what}, by the model {told}", seconds)
    return Way("shared", f"every node reads for itself: {of_what}, by the model {told}", seconds)


def _print(sentence: str) -> None:
    sys.stderr.write(f"hpml: {sentence}\n")


def supply_for(
    request: StageRequest,
    method: str,
    *,
    node_index: int,
    nodes: int,
    attempt: str,
    place: str,
    node: str,
    should_stop: Callable[[], bool],
    options: EngineOptions | None = None,
    options_of_all: EngineOptions | None = None,
    rates: Rates | None = None,
    interfaces: Sequence[str] = (),
    names: Sequence[str] = (),
    timeout: float = 30.0,
    join_seconds: float = 300.0,
    come_seconds: float = 300.0,
    tell: Callable[[str], object] = _print,
    room: Callable[[str], Room] = room_at,
    most: Callable[[], Room] | None = None,
    make_room: Callable[[Need], object] | None = None,
) -> Supply:
    """Return what brings the data of a request to this node; called on all nodes alike.

    Args:
        request: what is staged; the same on all nodes.
        method: "auto", "shared", "chain", "sbcast" or "partition".
        node_index: of this node in the job, from 0 on.
        nodes: how many the job has.
        attempt: the attempt's directory, on the shared file system.
        place: the job's directory on this node's target (`stager.area(request.target).job_dir`).
        node: this node's name.
        should_stop: asked a few times a second.
        options: how the engine copies where one node reads.
        options_of_all: how it copies where all nodes read at once; the same when left out.
        rates: what is known of file system, network and nodes, for "auto".
        interfaces: network interfaces between nodes, the best first.
        names: of all nodes in order, where they are known; for errors.
        timeout: seconds after which a silent node counts as lost.
        join_seconds: within how long a neighbour that has come must be reached.
        come_seconds: how long nodes wait for one another to come.
        tell: prints one sentence; called on the first node.
        room: measures the room in a directory.
        most: the room up to which an archive is counted (`stager.most_room(request)`); what is free
            when left out.
        make_room: removes kept data for what sbcast sends (`stager.make_room`).

    Raises:
        InputError: the method is none of these, or cannot be had for this source.
        StagingError: the first node could not choose, or did not come.
        StagingStopped: should_stop said so.
        OSError: the source cannot be looked at.
    """
    chain = Place(
        index=node_index,
        nodes=nodes,
        node=node,
        names=names,
        interfaces=interfaces,
        timeout=timeout,
        join_seconds=join_seconds,
        come_seconds=come_seconds,
    )
    notices = Notices(attempt, request.name, chain, should_stop=should_stop)
    found = options or EngineOptions()
    retry = Retry(time.sleep, should_stop)
    most = most or functools.partial(room, place)
    opened: Source | None = None
    if method != "auto" or nodes == 1:
        method = _checked(request, method, nodes)
        if node_index == 0 and nodes > 1:
            tell(f"{request.name} comes to {nodes} nodes by {method}, as asked for")
    elif node_index:
        method = str(notices.hear("choice")["method"])
    else:
        beating = Retry(time.sleep, notices.beat)
        opened = _Planned(_open(request, beating, most(), found))
        method = _decide(request, opened, notices, nodes, rates, tell)
    if method == "sbcast":
        if opened is not None:
            opened.close()
        return Broadcast(
            request,
            notices,
            directory=place,
            room=room,
            most=most,
            make_room=make_room,
            options=found,
        )
    if method == "chain":
        member = Member(notices)
        if node_index:
            return Follower(request, member)
        try:
            return Head(opened or _open(request, retry, most(), found), member, found)
        except (HpmlError, OSError) as error:
            notices.refuse(error, "secret")
            raise
    found = options_of_all or found
    source = opened or _open(request, retry, _share(most(), method, nodes), found)
    if method == "shared":
        return LocalSupply(source, found)
    supply = LocalSupply(PartitionSource(source, node_index, nodes), found)
    supply.method = "partition"
    return supply


def _share(room: Room, method: str, nodes: int) -> Room:
    """Return the room for the whole where a node takes a part of it."""
    return dataclasses.replace(room, bytes=room.bytes * (nodes if method == "partition" else 1))


def _open(request: StageRequest, retry: Retry, room: Room, options: EngineOptions) -> Source:
    try:
        return open_source(request, retry, room, opens_per_second=options.opens_per_second)
    except OSError as error:
        raise StagingError(
            f"cannot stage {request.name} from {shown(request.source)}: {why(error)}"
        ) from error


def _checked(request: StageRequest, method: str, nodes: int) -> str:
    """Return the method that was asked for, if it can be had."""
    one_file = method == "sbcast" and is_one_file(kind_of(request))
    return choose(
        size=0, files=0, nodes=nodes, wanted=method, one_file=one_file, has_sbcast=has_sbcast()
    ).method


def _decide(
    request: StageRequest,
    source: Source,
    notices: Notices,
    nodes: int,
    rates: Rates | None,
    tell: Callable[[str], object],
) -> str:
    """Look at the source, choose a way, and let the other nodes know."""
    try:
        plan = source.plan()
        kind = kind_of(request)
        choice = choose(
            size=_source_bytes(request, plan),
            files=len(plan.files) if kind == "tree" else 1,
            nodes=nodes,
            rates=rates,
            one_file=is_one_file(kind),
            archive=source.kind not in {"file", "tree"},
            # sbcast sends before the nodes look for a kept copy
            has_sbcast=has_sbcast() and not request.keep,
        )
    except BaseException as error:
        notices.refuse(error, "choice")
        raise
    notices.post("choice", method=choice.method, reason=choice.reason)
    tell(f"{request.name}: {choice.reason}")
    return choice.method


def _source_bytes(request: StageRequest, plan: Plan) -> int:
    """Return how much is read: of an archive its own size, not that of what is in it."""
    if os.path.isfile(request.source):
        return os.path.getsize(request.source)
    return plan.bytes


class _Planned:
    """A source that is looked at once, whoever asks."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._plan: Plan | None = None
        self.kind = source.kind
        self.ordered = source.ordered

    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = self._source.plan()
        return self._plan

    def reader(self, plan: Plan) -> Reader:
        return self._source.reader(plan)

    def close(self) -> None:
        self._source.close()
