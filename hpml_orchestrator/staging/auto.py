"""Target `auto`: choose between the node's memory, its disk, and the data in place, with a reason.

Data may take at most half of the free memory: files in memory count as memory of the job, which
needs the other half.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import CapacityError, InputError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.records.mounts import file_system_type, is_own_type
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.request import AUTO, IN_PLACE, StageResult, kind_of
from hpml_orchestrator.staging.space import MEMORY_TYPES, fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.space import Need, Room
    from hpml_orchestrator.staging.stage import CopyStager, Supply

_TARGETS = ("shm", "local")
"""In the order of preference."""


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
    """The result of one request; `choice` for the target "auto"."""

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
        request: the data.
        stager: stages it.
        storage: `own_storage`, or a fake.
        clock: seconds.

    Raises:
        HpmlError: as `CopyStager.stage`.
        CapacityError, InputError: nothing fits, or the node has no target; and the data cannot be
            used in place.
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
    # Look for a copy at every target before measuring room: a kept copy that fills most of a disk
    # would otherwise make its own target look too small.
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
    """Return the part of the room that data may take: half if it is memory, else all."""
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
    """Return the node's own fast storage that a path is on, such as "disk (ext4)"; "" if none.

    Shared and network file systems, FUSE and spinning disks do not count as fast.

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
