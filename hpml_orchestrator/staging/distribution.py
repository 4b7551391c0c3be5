"""The two ways to bring data to all nodes of a job: a model of their times, and the choice.

The model is described in docs/staging-correctness.md, "How `auto` chooses".
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, StagingError, counted
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.chain import Follower, Head
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.link import START
from hpml_orchestrator.staging.stage import LocalSupply, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.staging.link import ChainPosition
    from hpml_orchestrator.staging.stage import Supply

METHODS = ("shared", "chain")
CHUNK_BYTES = 4 << 20
"""What the model assumes that each node holds before it forwards; in fact messages are smaller."""

_START_SECONDS = 0.5
"""Time until a chain's first byte: the nodes have to find one another."""

_OPENS_AT_ONCE = 64  # by one node
_OPEN_SECONDS = 1e-3  # at a metadata server under load

_WORTH = 0.9
"""`chain` must take at most this part of the time of `shared` to be chosen."""


@dataclass(frozen=True)
class Rates:
    """Rates of file system, network and nodes; 0 means unknown.

    The defaults are cautious figures of published systems, not measurements of this one: a mid-size
    Lustre or NFS server gives some 5 GB/s and some 20,000 opens per second to all its clients; a
    node with a 25 Gbit/s card gets 2 to 3 GB/s; NVMe writes 2 GB/s.

    Attributes:
        shared_rate: of the file system for all nodes, bytes/s.
        link_rate: between two nodes, and of the file system for one node, bytes/s.
        disk_rate: of a node's target, bytes/s.
        metadata_rate: files opened per second by all nodes together.
    """

    shared_rate: float = 0.0
    link_rate: float = 0.0
    disk_rate: float = 0.0
    metadata_rate: float = 0.0


@dataclass(frozen=True)
class Strategy:
    """The chosen method, a sentence with the reason, and the predicted seconds of all methods."""

    method: str
    reason: str
    seconds: Mapping[str, float]


def seconds_of(method: str, *, size: int, files: int, nodes: int, rates: Rates) -> float:
    """Return the seconds that the model predicts for a method.

    Args:
        method: one of METHODS.
        size: bytes of the data.
        files: that are opened at the source.
        nodes: of the job.
        rates: what is known.
    """
    shared, link = rates.shared_rate or 5e9, rates.link_rate or 2.5e9
    disk, metadata = rates.disk_rate or 2e9, rates.metadata_rate or 20_000.0
    one_node = _OPENS_AT_ONCE / _OPEN_SECONDS
    if method == "shared":
        # The server is the limit with many nodes; with few, each waits for its own round trips.
        opens = files * nodes / min(metadata, nodes * one_node)
        return max(size * nodes / shared, size / min(link, disk)) + opens
    opens = files / min(metadata, one_node)
    depth = (nodes - 1) * (CHUNK_BYTES / link + _OPEN_SECONDS)
    return _START_SECONDS + size / min(shared, link, disk) + opens + depth


def choose(
    *, size: int, files: int, nodes: int, rates: Rates | None = None, wanted: str = "auto"
) -> Strategy:
    """Choose how all nodes get the data.

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
    of_what = f"{human_bytes(size)} in {counted(files, 'file')} to {nodes} nodes"
    if nodes == 1:
        return Strategy("shared", "there is one node: it reads for itself", seconds)
    if wanted != "auto":
        return Strategy(wanted, f"{wanted}, as requested: {of_what}", seconds)
    times = ", ".join(f"{one} {seconds[one]:.1f} s" for one in METHODS)
    if seconds["chain"] <= _WORTH * seconds["shared"]:
        return Strategy("chain", f"chain: {of_what}, by the model {times}", seconds)
    return Strategy(
        "shared", f"every node reads for itself: {of_what}, by the model {times}", seconds
    )


def _print(sentence: str) -> None:
    sys.stderr.write(f"hpml: {sentence}\n")


def supply_for(
    request: Stage,
    method: str,
    place: ChainPosition,
    *,
    most_bytes: int,
    options: CopyOptions | None = None,
    options_of_all: CopyOptions | None = None,
    rates: Rates | None = None,
    report: Callable[[str], object] = _print,
) -> Supply:
    """Return the `Supply` of a request for this node; every node of the job calls this.

    Args:
        request: what is staged; the same on all nodes.
        method: "auto", "shared" or "chain".
        place: this node's among the others.
        most_bytes: limit for scanning an archive: what the target could hold.
        options: how the first node copies where only it reads.
        options_of_all: how each node copies where all of them read; the same when left out.
        rates: what is known of file system, network and nodes, for "auto".
        report: prints one sentence; called on the first node.

    Raises:
        InputError: the method is none of these.
        StagingError: the first node could not choose, or did not come.
        StagingStopped: the place's should_stop returned True.
    """
    if method != "auto" or place.nodes == 1:
        method = choose(size=0, files=0, nodes=place.nodes, wanted=method).method
        if place.index == 0 and place.nodes > 1:
            report(f"{request.name} comes to {place.nodes} nodes by {method}, as requested")
    if place.index and method != "shared":
        start = place.record(0, START)
        method = str(start["method"])
        if method == "chain":
            return Follower(request, place, bytes.fromhex(str(start["secret"])))
    reading = options or CopyOptions()
    if method == "shared":
        return _local(request, place, most_bytes, reading, options_of_all)
    try:
        # Announce this node before reading the source, which may take minutes: once it is there,
        # the others wait for its choice without a limit.
        place.post("0", node=place.node)
        supply = _local(request, place, most_bytes, reading, options_of_all)
        if method == "auto":
            choice = _choice(supply, place.nodes, rates)
            report(f"{request.name}: {choice.reason}")
            method = choice.method
        secret = secrets.token_bytes(32)
        place.post(START, method=method, secret=secret.hex())
    except BaseException as error:
        # Without this the others would wait for a record that never comes.
        place.fail(error)
        raise
    return Head(supply, place, secret, reading) if method == "chain" else supply


def _local(
    request: Stage,
    place: ChainPosition,
    most_bytes: int,
    reading: CopyOptions,
    options: CopyOptions | None,
) -> LocalSupply:
    """Return the supply of a node that reads the source; `reading` is how it looks at it first."""
    retry, rate = Retry(should_stop=place.should_stop), reading.opens_per_second
    try:
        source = open_source(request, retry, most_bytes, opens_per_second=rate)
    except OSError as error:
        raise StagingError(
            f"cannot stage {request.name} from {shown(request.source)}: {why(error)}"
        ) from error
    return LocalSupply(request, source, options or reading)


def _choice(supply: LocalSupply, nodes: int, rates: Rates | None) -> Strategy:
    plan, path = supply.plan(), supply.request.source
    size = os.path.getsize(path) if os.path.isfile(path) else plan.bytes
    files = len(plan.files) if supply.kind == "tree" else 1
    return choose(size=size, files=files, nodes=nodes, rates=rates)
