"""The ways to bring data to all nodes of a job: how long each takes, which is best, its `Supply`.

S bytes in F files go to N nodes. B_fs is what the shared file system gives all nodes together,
M_fs how many files it opens per second for all of them; b_node, b_link and b_disk are the rates at
which one node reads the shared file system, talks to another node and writes its target.

    shared     max(S N / B_fs, S / min(b_node, b_disk)) + F N / M
    chain      S / min(b_node, B_fs, b_link, b_disk) + F / M_1 + (N - 1) (chunk / b_link + l)

where every one of N nodes opens files no faster than one node can: M = min(M_fs, N m_1), with
m_1 = threads / latency of one node and M_1 = min(M_fs, m_1). Passing on in a chain is pipelined: a
node sends a chunk on while it takes the next, so its depth costs a chunk and a latency l per node.
Model of the pipeline: docs/staging.md, "Many nodes".
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.chain import Follower, Head
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.link import SECRET_BYTES
from hpml_orchestrator.staging.member import START, Notices, Place
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.sources import LocalSupply, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Source, Supply
    from hpml_orchestrator.staging.space import Room

__all__ = ["METHODS", "Rates", "Way", "choose", "seconds_of", "supply_for"]

METHODS = ("shared", "chain")
CHUNK_BYTES = 4 << 20
"""What a node of the chain takes before it passes on: the buffer of a relay."""

_START_SECONDS = 0.5
"""Time until the first byte of a chain: the nodes find one another."""

_WORTH = 0.9
"""A chain is chosen when it takes at most so much of the time of `shared`."""


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
        seconds: by method.
    """

    method: str
    reason: str
    seconds: Mapping[str, float]


def seconds_of(method: str, *, size: int, files: int, nodes: int, rates: Rates) -> float:
    """Return how long a way takes by the model.

    Args:
        method: one of METHODS.
        size: bytes of the data.
        files: that are opened at the source.
        nodes: of the job.
        rates: what is known.
    """
    r = rates.filled()
    one_node = r.parallel / r.open_seconds
    if method == "shared":
        opens = files * nodes / min(r.metadata_rate, nodes * one_node)
        return max(size * nodes / r.shared_rate, size / min(r.node_rate, r.disk_rate)) + opens
    slowest = min(r.node_rate, r.shared_rate, r.link_rate, r.disk_rate)
    opens = files / min(r.metadata_rate, one_node)
    depth = (nodes - 1) * (CHUNK_BYTES / r.link_rate + r.open_seconds)
    return _START_SECONDS + size / slowest + opens + depth


def choose(
    *, size: int, files: int, nodes: int, rates: Rates | None = None, wanted: str = "auto"
) -> Way:
    """Choose how the data comes to all nodes.

    Args:
        size: bytes of the data.
        files: that are opened at the source.
        nodes: of the job.
        rates: what is known of file system, network and nodes.
        wanted: one of METHODS, or "auto".

    Raises:
        InputError: `wanted` is none of them.
    """
    if wanted not in {"auto", *METHODS}:
        raise InputError(
            f"must be auto or one of {', '.join(METHODS)}", field="distribution", value=wanted
        )
    known = rates or Rates()
    seconds = {
        one: seconds_of(one, size=size, files=files, nodes=nodes, rates=known) for one in METHODS
    }
    of_what = f"{human_bytes(size)} in {files} file{'s' * (files != 1)} to {nodes} nodes"
    if nodes == 1:
        return Way("shared", "there is one node: it reads for itself", seconds)
    if wanted != "auto":
        return Way(wanted, f"{wanted}, as asked for: {of_what}", seconds)
    told = ", ".join(f"{one} {seconds[one]:.1f} s" for one in METHODS)
    if seconds["chain"] <= _WORTH * seconds["shared"]:
        return Way("chain", f"chain: {of_what}, by the model {told}", seconds)
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
    node: str,
    should_stop: Callable[[], bool],
    most: Callable[[], Room],
    options: CopyOptions | None = None,
    options_of_all: CopyOptions | None = None,
    rates: Rates | None = None,
    interfaces: Sequence[str] = (),
    names: Sequence[str] = (),
    timeout: float = 30.0,
    join_seconds: float = 300.0,
    come_seconds: float = 300.0,
    tell: Callable[[str], object] = _print,
) -> Supply:
    """Return what brings the data of a request to this node; called on all nodes alike.

    Args:
        request: what is staged; the same on all nodes.
        method: "auto", "shared" or "chain".
        node_index: of this node in the job, from 0 on.
        nodes: how many the job has.
        attempt: the attempt's directory, on the shared file system.
        node: this node's name.
        should_stop: asked a few times a second.
        most: the room up to which an archive is counted (`stager.most_room(request)`).
        options: how the engine copies where one node reads.
        options_of_all: how it copies where all nodes read at once; the same when left out.
        rates: what is known of file system, network and nodes, for "auto".
        interfaces: network interfaces between nodes, the best first.
        names: of all nodes in order, where they are known; for errors.
        timeout: seconds after which a silent node counts as lost.
        join_seconds: within how long a neighbour that has come must be reached.
        come_seconds: how long nodes wait for one another to come.
        tell: prints one sentence; called on the first node.

    Raises:
        InputError: the method is none of these.
        StagingError: the first node could not choose, or did not come.
        StagingStopped: should_stop said so.
        OSError: the source cannot be looked at.
    """
    place = Place(
        index=node_index,
        nodes=nodes,
        node=node,
        names=names,
        interfaces=interfaces,
        timeout=timeout,
        join_seconds=join_seconds,
        come_seconds=come_seconds,
    )
    notices = Notices(attempt, request.name, place, should_stop=should_stop)
    if method != "auto" or nodes == 1:
        method = choose(size=0, files=0, nodes=nodes, wanted=method).method
        if node_index == 0 and nodes > 1:
            tell(f"{request.name} comes to {nodes} nodes by {method}, as asked for")
    if node_index and method != "shared":
        told = notices.hear(START)
        method = str(told["method"])
        if method == "chain":
            return Follower(request.source, notices, bytes.fromhex(str(told["secret"])))
    reading = options or CopyOptions()
    stop = notices.beat if method == "auto" else should_stop
    asked = method
    try:
        source = _open(request, Retry(time.sleep, stop), most(), reading)
        supply = LocalSupply(source, options_of_all or reading)
        if method == "auto":
            method = _decide(request, supply.plan(), nodes, rates, tell)
        if method == "shared":
            if asked == "auto":
                notices.post(START, method=method)
            return supply
        secret = secrets.token_bytes(SECRET_BYTES)
        notices.post(START, method=method, secret=secret.hex())
    except BaseException as error:
        if asked != "shared":
            notices.refuse(error, START)
        raise
    return Head(supply, notices, secret, reading)


def _open(request: StageRequest, retry: Retry, room: Room, options: CopyOptions) -> Source:
    try:
        return open_source(request, retry, room, opens_per_second=options.opens_per_second)
    except OSError as error:
        raise StagingError(
            f"cannot stage {request.name} from {shown(request.source)}: {why(error)}"
        ) from error


def _decide(
    request: StageRequest,
    plan: Plan,
    nodes: int,
    rates: Rates | None,
    tell: Callable[[str], object],
) -> str:
    """Choose a way for what was found at the source."""
    choice = choose(
        size=_source_bytes(request, plan),
        files=len(plan.files) if kind_of(request) == "tree" else 1,
        nodes=nodes,
        rates=rates,
    )
    tell(f"{request.name}: {choice.reason}")
    return choice.method


def _source_bytes(request: StageRequest, plan: Plan) -> int:
    """Return how much is read: of an archive its own size, not that of what is in it."""
    if os.path.isfile(request.source):
        return os.path.getsize(request.source)
    return plan.bytes
