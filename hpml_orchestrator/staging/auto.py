"""Target `auto` on this node: look at the source and at the places, then `choose`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.capacity import Room, file_system_type, room_at
from hpml_orchestrator.staging.choose import Candidate, Choice, Origin, choose
from hpml_orchestrator.staging.faults import why
from hpml_orchestrator.staging.mounts import MEMORY_TYPES, SHARED_TYPES, is_own_type
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.sample import epoch_seconds, sample_source, sample_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import Bases, StageRequest

__all__ = ["TARGETS", "choose_target", "own_storage"]

TARGETS = ("shm", "local")
"""In the order of preference."""

NO_ROOM = Room(0, "no place to stage to", None, 4096, in_memory=False)
_USABLE_KINDS = frozenset({"tree", "file"})


def choose_target(
    request: StageRequest,
    bases: Bases,
    plan: Callable[[Room], Plan],
    *,
    epochs: int | None = None,
    room: Callable[[str], Room] = room_at,
    own: Callable[[str], str] | None = None,
) -> Choice:
    """Choose "shm", "local" or IN_PLACE for a request, whatever target it names itself.

    Args:
        request: what is to be staged.
        bases: what "shm" and "local" stand for on this node.
        plan: measures the source; called once with the largest room that there is, and not at all
            where the data need not be moved.
        epochs: how often everything will be read; with it, source and places are timed for a moment
            each, and what does not pay is not chosen. None: it is not known.
        room: measures the room in a directory.
        own: tells the node's own storage; `own_storage` when left out.

    Raises:
        CapacityError: nothing fits, and the data cannot be used where it is.
        InputError: there is no place, and likewise; or the source is not what the request says.
        StagingError: the source cannot be looked at.
        OSError: likewise.
    """
    usable = kind_of(request) in _USABLE_KINDS
    origin = Origin(request.source, (own or own_storage)(request.source), usable)
    if origin.own and usable:
        return choose(origin, [Candidate(target, "") for target in TARGETS], epochs=epochs)
    places = [_place(target, bases, room) for target in TARGETS]
    rooms = [one.room for one in places if one.room is not None]
    found = plan(max(rooms, key=lambda one: one.bytes, default=NO_ROOM))
    candidates = [_needing(one, found) for one in places]
    if epochs is not None and usable:
        source = epoch_seconds(sample_source(found), len(found.files), found.bytes)
        origin = replace(origin, epoch_seconds=source)
        candidates = [_timed(one, found, source) for one in candidates]
    return choose(origin, candidates, epochs=epochs)


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
        return Candidate(target, "", refused="this node has no such directory")
    try:
        kind = file_system_type(base)
        if kind in SHARED_TYPES:
            return Candidate(target, base, refused=f"{base} lies on {kind}, which nodes share")
        if not os.access(base, os.W_OK | os.X_OK):
            return Candidate(target, base, refused=f"{base} cannot be written")
        return Candidate(target, base, room=room(base))
    except OSError as error:
        return Candidate(target, base, refused=f"{base}: {why(error)}")


def _needing(one: Candidate, plan: Plan) -> Candidate:
    if one.room is None:
        return one
    return replace(one, need=plan.need(one.room.block_bytes, one.room.inode_bytes))


def _timed(one: Candidate, plan: Plan, source_seconds: float | None) -> Candidate:
    if one.refused or one.fault() or source_seconds is None:
        return one
    try:
        written, read = sample_target(one.where, plan.files)
    except OSError as error:
        return replace(one, refused=f"{one.where} cannot be written: {why(error)}")
    files, size = len(plan.files), plan.bytes
    writing = epoch_seconds(written, files, size)
    reading = epoch_seconds(read, files, size)
    if writing is None or reading is None:
        return one
    return replace(one, epoch_seconds=reading, stage_seconds=source_seconds + writing)
