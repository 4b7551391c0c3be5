"""How data reaches a job's nodes: a model of both ways and their times, and target `auto`.

docs/staging-correctness.md, "How `auto` chooses", describes the model.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import CapacityError, InputError, StagingError, counted
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.records.mounts import file_system_type, is_own_type
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.chain import START, Follower, Head
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.request import (
    AUTO,
    IN_PLACE,
    Retry,
    StageResult,
    kind_of,
    shown,
    why,
)
from hpml_orchestrator.staging.space import MEMORY_TYPES, fits
from hpml_orchestrator.staging.stage import LocalSupply, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.staging.chain import ChainPosition
    from hpml_orchestrator.staging.space import Need, Room
    from hpml_orchestrator.staging.stage import CopyStager, Supply

METHODS = ("shared", "chain")
CHUNK_BYTES = 4 << 20
"""The model assumes that nodes buffer this much before forwarding; real messages are smaller."""

_START_SECONDS = 0.5
"""Time until a chain's first byte: nodes must find each other."""

_OPENS_AT_ONCE = 64  # per node
_OPEN_SECONDS = 1e-3  # by a metadata server under load

_WORTH = 0.9
"""`chain` is chosen only if it takes at most this fraction of the time of `shared`."""


@dataclass(frozen=True)
class Rates:
    """Rates of file system, network and nodes; 0 means unknown.

    The defaults are cautious figures of published systems, not measurements of this one: a mid-size
    Lustre or NFS server serves about 5 GB/s and 20,000 opens per second to all its clients; a node
    with a 25 Gbit/s card receives 2 to 3 GB/s; NVMe writes 2 GB/s.

    Attributes:
        shared_rate: file system, all nodes together, bytes/s.
        link_rate: between two nodes, and from the file system to one node, bytes/s.
        disk_rate: a node's target, bytes/s.
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
    """Return the predicted seconds of a method.

    Args:
        method: one of METHODS.
        size: size of the data, bytes.
        files: number of files opened at the source.
        nodes: number of nodes of the job.
        rates: known rates.
    """
    shared, link = rates.shared_rate or 5e9, rates.link_rate or 2.5e9
    disk, metadata = rates.disk_rate or 2e9, rates.metadata_rate or 20_000.0
    one_node = _OPENS_AT_ONCE / _OPEN_SECONDS
    if method == "shared":
        # With many nodes the server is the limit; with few, each node waits for its own round
        # trips.
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
        size: size of the data, bytes.
        files: number of files opened at the source.
        nodes: number of nodes of the job.
        rates: known rates of file system, network and nodes.
        wanted: one of METHODS, or "auto".

    Raises:
        InputError: `wanted` is neither.
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
        request: data to stage; the same on all nodes.
        method: "auto", "shared" or "chain".
        place: this node's position.
        most_bytes: limit for scanning an archive: the capacity of the target.
        options: how the first node copies if it alone reads the source.
        options_of_all: how each node copies if all read the source; by default `options`.
        rates: known rates of file system, network and nodes, for "auto".
        report: prints one sentence; called on the first node.

    Raises:
        InputError: the method is unknown.
        StagingError: the first node could not choose, or did not register.
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
        # Register before reading the source, which may take minutes: once this node is registered,
        # the others wait for its choice without a time limit.
        place.post("0", node=place.node)
        supply = _local(request, place, most_bytes, reading, options_of_all)
        if method == "auto":
            choice = _choice(supply, place.nodes, rates)
            report(f"{request.name}: {choice.reason}")
            method = choice.method
        secret = secrets.token_bytes(32)
        place.post(START, method=method, secret=secret.hex())
    except BaseException as error:
        # Otherwise the other nodes would wait for a record that never appears.
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
    """Return the supply of a node that reads the source; `reading` are the options for its scan."""
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


# Target `auto`: choose between the node's memory, its disk and using the data in place.
#
# Data may take at most half of the free memory: files in memory count towards the job's memory,
# and the job needs the other half.

_TARGETS = ("shm", "local")
"""In order of preference."""


@dataclass(frozen=True)
class Choice:
    """The chosen target.

    Attributes:
        target: "shm", "local" or IN_PLACE.
        why: the reason in a few words.
        others: (target, reason against it) of the other targets.
    """

    target: str
    why: str
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class StageOutcome:
    """Result of one request; `choice` is set for the target "auto"."""

    request: Stage
    result: StageResult
    choice: Choice | None = None


def stage_chosen(
    request: Stage,
    stager: CopyStager,
    *,
    storage: Callable[[str], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> StageOutcome:
    """Stage the request of a command line; choose the target if it is "auto".

    Args:
        request: data to stage.
        stager: stages it.
        storage: `own_storage`, or a fake.
        clock: returns seconds.

    Raises:
        HpmlError: as `CopyStager.stage`.
        CapacityError, InputError: the data does not fit or the node has no target, and the data
            cannot be used in place.
    """
    if request.target != AUTO:
        return StageOutcome(request, stager.stage(request))
    begin = clock()
    try:
        usable = kind_of(request) in {"tree", "file"}
        own = (storage or own_storage)(request.source) if usable else ""
        # Check the targets first: an archive is scanned only up to the capacity of the largest
        # usable one.
        refusals = {target: stager.refusal(target) for target in _TARGETS}
        supply = stager.local(request, *[one for one in _TARGETS if not refusals[one]])
        try:
            choice = _choose(request, stager, supply, own, refusals, usable=usable)
            if choice.target == IN_PLACE:
                return StageOutcome(request, _in_place(request, supply, clock() - begin), choice)
            chosen = replace(request, target=choice.target)
            return StageOutcome(chosen, stager.stage(chosen, supply), choice)
        finally:
            supply.close()
    except OSError as error:
        raise StagingError(f"cannot read {shown(request.source)}: {why(error)}") from error


def _choose(
    request: Stage,
    stager: CopyStager,
    supply: Supply,
    own: str,
    refusals: dict[str, str],
    *,
    usable: bool,
) -> Choice:
    """Choose the first target that has a copy, else the first with enough room."""

    def choice(target: str, reason: str, why_not: dict[str, str], instead: str) -> Choice:
        others = [one for one in (*_TARGETS, IN_PLACE) if one != target]
        return Choice(target, reason, tuple((one, why_not.get(one) or instead) for one in others))

    if own:
        here = f"it is on this node's own {own} already"
        return choice(IN_PLACE, here, {}, here)
    # Look for copies at all targets before measuring room: otherwise a kept copy that fills most of
    # a disk would make its own target look too small.
    plan = supply.plan()
    faults = dict(refusals)
    fitting = {}
    for target in (one for one in _TARGETS if not refusals[one]):
        if stager.has(target, supply):
            there = f"a copy is at {target} already"
            return choice(target, "a copy is there already", {}, there)
    for target in (one for one in _TARGETS if not refusals[one]):
        room = stager.room_without_idle(target)
        need = plan.need(room.block_bytes, room.inode_bytes)
        faults[target] = _misfit(need, room)
        fitting[target] = (need, room)
    best = next((target for target in _TARGETS if not faults[target]), "")
    if best:
        need, room = fitting[best]
        part = ", half of what is free" if room.in_memory else " that are free"
        free = human_bytes(_allowed(room).bytes)
        reason = f"{human_bytes(need.bytes)} fit in the {free}{part}"
        faults[IN_PLACE] = "every epoch would read from afar" if usable else "it must be unpacked"
        return choice(best, reason, faults, f"{best} comes first")
    if usable:
        return choice(IN_PLACE, "nothing fits", faults, "")
    reasons = "; ".join(f"{target}: {fault}" for target, fault in faults.items())
    kind = CapacityError if fitting else InputError
    raise kind(
        f"{reasons}; and it cannot be used in place because it must be unpacked",
        field="--to",
        value=AUTO,
        hint=f"unpack {request.source} elsewhere, or name a directory with --to",
    )


def _allowed(room: Room) -> Room:
    """Return the part of the room that data may take: half of memory, all of a disk."""
    return dataclasses.replace(room, bytes=room.bytes // 2) if room.in_memory else room


def _misfit(need: Need, room: Room) -> str:
    allowed = _allowed(room)
    if fits(need, allowed):
        return ""
    least = "at least " if need.at_least else ""
    if need.bytes > allowed.bytes:
        part = "half of " if room.in_memory else ""
        free = f"{part}what is free is {human_bytes(allowed.bytes)} ({room.limit})"
        return f"needs {least}{human_bytes(need.bytes)}, and {free}"
    return f"needs {least}{need.inodes} inodes, and {room.inodes} are free"


def own_storage(path: str, *, proc_root: str = "/proc", sys_root: str = "/sys") -> str:
    """Return the type of a node's own fast storage at a path, such as "disk (ext4)"; "" if none.

    Shared and network file systems, FUSE and spinning disks do not count as fast.

    Raises:
        OSError: the path does not exist.
    """
    kind = file_system_type(path, proc_root=proc_root)
    if kind in MEMORY_TYPES:
        return f"memory ({kind})"
    if not is_own_type(kind):
        return ""
    device = os.stat(path).st_dev
    block = f"{sys_root}/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{block}/queue", f"{block}/../queue"):  # a disk, a partition
        try:
            with open(f"{queue}/rotational", encoding="ascii") as stream:
                return "" if stream.read().strip() == "1" else f"disk ({kind})"
        except OSError:
            continue
    return f"disk ({kind})"


def _in_place(request: Stage, supply: Supply, seconds: float) -> StageResult:
    path, plan = os.path.realpath(request.source), supply.plan()
    return StageResult(
        name=request.name,
        path=path if os.path.isdir(path) else os.path.dirname(path),
        bytes=plan.bytes,
        files=plan.file_count,
        seconds=seconds,
        method=IN_PLACE,
        reused=False,
    )
