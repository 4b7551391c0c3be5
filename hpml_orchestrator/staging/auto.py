"""Target `auto`: into RAM, onto the node's disk, or leave the data where it is; and why.

What does not fit is never chosen. Files in RAM count as the job's memory: of what is free there,
half is left to the job itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    CapacityError,
    InputError,
    NotFoundError,
    StagingError,
    nearest,
)
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.faults import UNREADABLE, brief, shown, why
from hpml_orchestrator.staging.request import (
    AUTO,
    COMMANDS,
    IN_PLACE,
    StageRequest,
    StageResult,
    kind_of,
)
from hpml_orchestrator.staging.space import (
    MEMORY_TYPES,
    SHARED_TYPES,
    Room,
    file_system_type,
    is_own_type,
    room_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import Bases
    from hpml_orchestrator.staging.source import Supply
    from hpml_orchestrator.staging.space import Need
    from hpml_orchestrator.staging.stage import CopyStager

__all__ = [
    "NO_ROOM",
    "Candidate",
    "Choice",
    "Outcome",
    "choose",
    "choose_target",
    "own_storage",
    "stage_chosen",
]

_WORD_CHARACTERS = 40

_TARGETS = ("shm", "local")
"""In the order of preference."""

NO_ROOM = Room(0, "no place to stage to", None, 4096, in_memory=False)
_USABLE_KINDS = frozenset({"tree", "file"})


@dataclass(frozen=True)
class Candidate:
    """A place that the data could go to.

    Attributes:
        target: "shm" or "local".
        need: what the data takes there; None when the place cannot be looked at.
        room: what is free there; None likewise.
        refused: why the place cannot be used at all; "" when it can.
    """

    target: str
    need: Need | None = None
    room: Room | None = None
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        target: "shm", "local" or IN_PLACE.
        why: in a few words.
        others: (target, why not) of all that was not chosen.
    """

    target: str
    why: str
    others: tuple[tuple[str, str], ...]


def choose_target(
    request: StageRequest,
    bases: Bases,
    plan: Callable[[Room], Plan],
    *,
    room: Callable[[str], Room] = room_at,
    most: Callable[[str], Room] | None = None,
    has: Callable[[str], bool] | None = None,
    own: Callable[[str], str] | None = None,
) -> Choice:
    """Choose "shm", "local" or IN_PLACE for a request, whatever target it names itself.

    Args:
        request: what is to be staged.
        bases: what "shm" and "local" stand for on this node.
        plan: measures the source; called once with the largest room that there is, and not at all
            where the data need not be moved.
        room: measures the room in a directory, with what would be removed for the data.
        most: the room up to which an archive is counted; `room` when left out.
        has: whether a copy of the data is at a target already; asked after `plan`.
        own: tells the node's own storage; `own_storage` when left out.

    Raises:
        CapacityError: nothing fits, and the data cannot be used where it is.
        InputError: there is no place, and likewise; or the source is not what the request says.
        StagingError: the source cannot be looked at.
        OSError: likewise.
    """
    usable = kind_of(request) in _USABLE_KINDS
    storage = (own or own_storage)(request.source) if usable else ""
    if storage:
        here = f"it is on this node's own {storage} already"
        return Choice(IN_PLACE, here, tuple((target, here) for target in _TARGETS))
    places = [_place(target, bases, room) for target in _TARGETS]
    counted = most or room
    rooms = [counted(bases.resolve(one.target)) for one in places if one.room is not None]
    found = plan(max(rooms, key=lambda one: one.bytes, default=NO_ROOM))
    there = [one.target for one in places if one.room is not None and has and has(one.target)]
    if there:
        why_not = f"a copy is at {there[0]} already"
        others = [target for target in (*_TARGETS, IN_PLACE) if target != there[0]]
        return Choice(
            there[0], "a copy is there already", tuple((target, why_not) for target in others)
        )
    candidates = [
        replace(one, need=found.need(one.room.block_bytes, one.room.inode_bytes))
        if one.room
        else one
        for one in places
    ]
    return choose(request.source, candidates, usable=usable)


def choose(source: str, candidates: Sequence[Candidate], *, usable: bool = True) -> Choice:
    """Choose the first candidate that fits; else the data stays where it is.

    Args:
        source: where the data is, for errors.
        candidates: in the order of preference.
        usable: a training can read it there; an archive that shall be unpacked it cannot.

    Raises:
        CapacityError: nothing fits, and the data cannot be used where it is.
        InputError: there is no place at all, and the data cannot be used where it is.
    """
    faults = {one.target: _fault(one) for one in candidates}
    best = next((one for one in candidates if not faults[one.target]), None)
    if best is not None:
        others = [
            (one.target, faults[one.target] or f"{best.target} comes first")
            for one in candidates
            if one is not best
        ]
        there = "every epoch would read from afar" if usable else "it must be unpacked"
        return Choice(best.target, _fits(best), (*others, (IN_PLACE, there)))
    if usable:
        return Choice(IN_PLACE, "nothing fits", tuple(faults.items()))
    told = "; ".join(f"{target}: {fault}" for target, fault in faults.items())
    kind = CapacityError if any(not one.refused for one in candidates) else InputError
    raise kind(
        f"{told}; and it cannot be used where it is, for it must be unpacked",
        field="--to",
        value="auto",
        hint=f"unpack {source} elsewhere, or name a directory with --to",
    )


def own_storage(path: str, *, proc_root: str = "/proc", sys_root: str = "/sys") -> str:
    """Return which fast storage of this node holds a path, such as "disk (ext4)"; "" for none.

    File systems that nodes share, those of other machines and of user space, and disks that turn
    are not fast.

    Raises:
        OSError: the path is not there.
    """
    kind = file_system_type(path, proc_root=proc_root)
    if kind in MEMORY_TYPES:
        return f"memory ({kind})"
    if not is_own_type(kind):
        return ""
    device = os.stat(path).st_dev
    block = f"{sys_root}/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{block}/queue", f"{block}/../queue"):  # of a disk, of a partition
        try:
            with open(f"{queue}/rotational", encoding="ascii") as stream:
                return "" if stream.read().strip() == "1" else f"disk ({kind})"
        except OSError:
            continue
    return f"disk ({kind})"


def _place(target: str, bases: Bases, room: Callable[[str], Room]) -> Candidate:
    """Return a place with its room, or with why it cannot be used."""
    base = bases.shm if target == "shm" else bases.local
    if not base:
        return Candidate(target, refused="this node has no such directory")
    try:
        kind = file_system_type(base)
        if kind in SHARED_TYPES:
            return Candidate(target, refused=f"{base} lies on {kind}, which nodes share")
        if not os.access(base, os.W_OK | os.X_OK):
            return Candidate(target, refused=f"{base} cannot be written")
        return Candidate(target, room=room(base))
    except OSError as error:
        return Candidate(target, refused=f"{base}: {why(error)}")
    except StagingError as error:  # a root that belongs to another user, for example
        return Candidate(target, refused=str(error))


def _allowed(room: Room) -> int:
    """Return the bytes that may be staged: of memory half of what is free, of a disk all."""
    return room.bytes // 2 if room.in_memory else room.bytes


def _fault(one: Candidate) -> str:
    """Return why the data cannot go to a place; "" when it can."""
    if one.refused or one.need is None or one.room is None:
        return one.refused or "its room is not known"
    need, room = one.need, one.room
    least = "at least " if need.at_least else ""
    if need.bytes > _allowed(room):
        part = "half of " if room.in_memory else ""
        return (
            f"needs {least}{human_bytes(need.bytes)}, and {part}what is free is "
            f"{human_bytes(_allowed(room))} ({room.limit})"
        )
    if room.inodes is not None and need.inodes > room.inodes:
        return f"needs {least}{need.inodes} inodes, and {room.inodes} are free"
    return ""


def _fits(one: Candidate) -> str:
    assert one.need is not None  # noqa: S101 - it fits
    assert one.room is not None  # noqa: S101 - likewise
    part = ", half of what is free" if one.room.in_memory else " that are free"
    return f"{human_bytes(one.need.bytes)} fit in the {human_bytes(_allowed(one.room))}{part}"


@dataclass(frozen=True)
class Outcome:
    """What became of one request; `choice` where the target was to be chosen."""

    request: StageRequest
    result: StageResult
    choice: Choice | None = None


def stage_chosen(
    request: StageRequest,
    stager: CopyStager,
    bases: Bases,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Stage what a command line asks for: choose the target where it is "auto".

    Args:
        request: what is wanted.
        stager: brings it.
        bases: what "shm" and "local" stand for.
        clock: seconds.

    Raises:
        HpmlError: as `CopyStager.stage`, or there is no such source.
    """
    if not _is_there(request.source):
        raise NotFoundError(
            f"no such file or directory: {brief(request.source)}",
            hint=_meant(os.path.basename(request.source)),
        )
    if request.target != AUTO:
        return Outcome(request, stager.stage(request))
    begin = clock()
    opened: list[Supply] = []

    def plan(room: Room) -> Plan:
        opened.append(stager.local(request, room))
        return opened[0].plan()

    try:
        try:
            choice = choose_target(
                request,
                bases,
                plan,
                room=stager.room_without_idle,
                most=lambda base: stager.most_room(replace(request, target=base)),
                has=lambda target: stager.has(replace(request, target=target), opened[0]),
            )
            if choice.target == IN_PLACE:
                found = opened[0].plan() if opened else plan(NO_ROOM)
                return Outcome(request, _in_place(request, found, clock() - begin), choice)
        except OSError as error:
            raise StagingError(f"cannot read {shown(request.source)}: {why(error)}") from error
        chosen = replace(request, target=choice.target)
        return Outcome(chosen, stager.stage(chosen, opened[0]), choice)
    finally:
        for supply in opened:
            supply.close()


def _is_there(path: str) -> bool:
    """Say whether there is something at a path.

    Raises:
        StagingError: nobody could say, because a directory on the way is closed to this user.
    """
    try:
        os.lstat(path)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {brief(path)}: {why(error)}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError):
        return False
    return True


def _meant(word: str) -> str:
    near = nearest(word[:_WORD_CHARACTERS], COMMANDS)
    if near:
        return f"did you mean `hpml stage {near}`? its options stand behind it"
    return f"`hpml stage` also has the commands {', '.join(COMMANDS)}"


def _in_place(request: StageRequest, plan: Plan, seconds: float) -> StageResult:
    path = os.path.realpath(request.source)
    return StageResult(
        name=request.name,
        path=path if os.path.isdir(path) else os.path.dirname(path),
        bytes=plan.bytes,
        files=plan.file_count,
        seconds=seconds,
        method=IN_PLACE,
        reused=False,
    )
