"""From what a job asks for to the `Supply` of each of its nodes."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, StagingError
from hpml_orchestrator.staging.capacity import room_at
from hpml_orchestrator.staging.engine import EngineOptions
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.many.follower import Follower
from hpml_orchestrator.staging.many.head import Head
from hpml_orchestrator.staging.many.member import ChainPlace, Member
from hpml_orchestrator.staging.many.model import Rates, choose
from hpml_orchestrator.staging.many.notices import Notices
from hpml_orchestrator.staging.many.partition import PartitionSource
from hpml_orchestrator.staging.many.pulse import Pulse
from hpml_orchestrator.staging.many.sbcast import Broadcast, has_sbcast, is_one_file
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.sources import open_source
from hpml_orchestrator.staging.supply import LocalSupply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Reader, Source
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["supply_for"]


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

    Raises:
        InputError: the method is none of these, or cannot be had for this source.
        StagingError: the first node could not choose, or did not come.
        StagingStopped: should_stop said so.
        OSError: the source cannot be looked at.
    """
    notices = Notices(attempt, request.name, should_stop=should_stop)
    chain = ChainPlace(
        index=node_index,
        nodes=nodes,
        node=node,
        names=names,
        interfaces=interfaces,
        towards=names[0] if names and node_index else "",
        timeout=timeout,
        join_seconds=join_seconds,
        come_seconds=come_seconds,
    )
    found = options or EngineOptions()
    retry = Retry(time.sleep, should_stop)
    most = most or functools.partial(room, place)
    opened: Source | None = None
    if method != "auto" or nodes == 1:
        method = _checked(request, method, nodes)
        if node_index == 0 and nodes > 1:
            tell(f"{request.name} comes to {nodes} nodes by {method}, as asked for")
    elif node_index:
        method = _hear(Pulse(notices, chain))
    else:
        beating = Retry(time.sleep, Pulse(notices, chain).beat)
        opened = _Planned(_open(request, beating, most(), found))
        method = _decide(request, opened, notices, nodes, rates, tell)
    if method == "sbcast":
        if opened is not None:
            opened.close()
        return Broadcast(
            request, notices, chain, directory=place, room=room, most=most, options=found
        )
    if method == "chain":
        member = Member(notices, chain)
        if node_index:
            return Follower(request, member)
        try:
            return Head(opened or _open(request, retry, most(), found), member, found)
        except (HpmlError, OSError) as error:
            member.refuse(error)
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
            has_sbcast=has_sbcast(),
        )
    except BaseException as error:
        notices.post("choice", error=str(error) or why(error), hint=getattr(error, "hint", ""))
        raise
    notices.post("choice", method=choice.method, reason=choice.reason)
    tell(f"{request.name}: {choice.reason}")
    return choice.method


def _source_bytes(request: StageRequest, plan: Plan) -> int:
    """Return how much is read: of an archive its own size, not that of what is in it."""
    if os.path.isfile(request.source):
        return os.path.getsize(request.source)
    return plan.bytes


def _hear(pulse: Pulse) -> str:
    """Return what the first node chose."""
    told = pulse.wait("choice", 0)
    if "error" in told:
        raise StagingError(f"the first node: {told['error']}", hint=str(told.get("hint", "")))
    return str(told["method"])


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
