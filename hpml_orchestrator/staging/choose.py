"""Target `auto`: into RAM, onto the node's disk, or leave the data where it is; pure, and says why.

What does not fit is never chosen. Files in RAM count as the job's memory: of what is free there,
half is left to the job itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import CapacityError, InputError, counted
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.request import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.staging.capacity import Need, Room

__all__ = ["Candidate", "Choice", "Origin", "choose", "room_for_data"]

_MEMORY_SHARE = 2
"""The job keeps all but one part in so many of the memory that is free."""


@dataclass(frozen=True)
class Candidate:
    """A place that the data could go to.

    Attributes:
        target: "shm" or "local".
        where: the directory, for the message.
        need: what the data takes there; None when the place cannot be looked at.
        room: what is free there; None likewise.
        refused: why the place cannot be used at all; "" when it can.
        epoch_seconds: reading everything from there once, as measured; None when it was not.
        stage_seconds: bringing everything there, as measured; None when it was not.
    """

    target: str
    where: str
    need: Need | None = None
    room: Room | None = None
    refused: str = ""
    epoch_seconds: float | None = None
    stage_seconds: float | None = None

    def fault(self) -> str:
        """Return why the data cannot go there; "" when it can."""
        return self.refused or _too_large(self)


@dataclass(frozen=True)
class Origin:
    """Where the data is.

    Attributes:
        where: its path.
        own: the node's own fast storage that holds it, such as "disk (ext4)"; "" when it is far
            away, slow, or not known.
        usable: a training can read it there; an archive that shall be unpacked it cannot.
        epoch_seconds: reading everything once, as measured; None when it was not.
    """

    where: str
    own: str = ""
    usable: bool = True
    epoch_seconds: float | None = None


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


def choose(origin: Origin, candidates: Sequence[Candidate], *, epochs: int | None = None) -> Choice:
    """Choose the first candidate that fits and pays; else the data stays where it is.

    It pays when epochs * (time of an epoch from afar - time of an epoch from here) is more than the
    time that staging takes. Where times were measured, the candidate with the least time in all
    wins; else the first.

    Args:
        origin: where the data is.
        candidates: in the order of preference.
        epochs: how often everything will be read; None: not known, and payback is no reason.

    Raises:
        CapacityError: nothing fits, and the data cannot be used where it is.
        InputError: there is no place at all, and the data cannot be used where it is.
    """
    if origin.own and origin.usable:
        own = f"it is on this node's own {origin.own} already"
        return Choice(IN_PLACE, own, tuple((one.target, own) for one in candidates))
    faults: list[tuple[str, str]] = []
    fitting = []
    for one in candidates:
        fault = one.fault()
        if fault:
            faults.append((one.target, fault))
        else:
            fitting.append(one)
    if not fitting and not origin.usable:
        raise _nowhere(origin, faults, candidates)
    paying = []
    for one in fitting:
        loss = _loss(origin, one, epochs) if origin.usable else ""
        if loss:
            faults.append((one.target, loss))
        else:
            paying.append(one)
    if not paying:
        why = "nothing fits" if not fitting else "staging does not pay"
        return Choice(IN_PLACE, why, _in_order(faults, candidates))
    best = paying[0]
    if epochs is not None and all(_total(one, epochs) is not None for one in paying):
        best = min(paying, key=lambda one: _total(one, epochs) or 0.0)
    faults += [(one.target, _later(one, best, epochs)) for one in paying if one is not best]
    others = _in_order(faults, candidates)
    if origin.usable:
        others = (*others, (IN_PLACE, "every epoch would read from afar"))
    else:
        others = (*others, (IN_PLACE, "it must be unpacked"))
    return Choice(best.target, _fits(best) + _gain(origin, best, epochs), others)


def room_for_data(room: Room) -> int:
    """Return the bytes that may be staged: of memory half of what is free, of a disk all."""
    return room.bytes // _MEMORY_SHARE if room.in_memory else room.bytes


def _too_large(one: Candidate) -> str:
    if one.need is None or one.room is None:
        return "its room is not known"
    need, room = one.need, one.room
    least = "at least " if need.at_least else ""
    allowed = room_for_data(room)
    if need.bytes > allowed:
        part = "half of " if room.in_memory else ""
        return (
            f"needs {least}{human_bytes(need.bytes)}, and {part}what is free is "
            f"{human_bytes(allowed)} ({room.limit})"
        )
    if room.inodes is not None and need.inodes > room.inodes:
        return f"needs {least}{need.inodes} inodes, and {room.inodes} are free"
    return ""


def _fits(one: Candidate) -> str:
    assert one.need is not None  # noqa: S101 - it fits
    assert one.room is not None  # noqa: S101 - likewise
    free = human_bytes(room_for_data(one.room))
    part = ", half of what is free" if one.room.in_memory else " that are free"
    return f"{human_bytes(one.need.bytes)} fit in the {free}{part}"


def _total(one: Candidate, epochs: int | None) -> float | None:
    if epochs is None or one.epoch_seconds is None or one.stage_seconds is None:
        return None
    return one.stage_seconds + epochs * one.epoch_seconds


def _later(one: Candidate, best: Candidate, epochs: int | None) -> str:
    total, least = _total(one, epochs), _total(best, epochs)
    if total is None or least is None:
        return f"{best.target} comes first"
    return f"takes {total:.3g} s in all, {best.target} {least:.3g} s"


def _loss(origin: Origin, one: Candidate, epochs: int | None) -> str:
    """Return why staging there does not pay; "" when it does or is not known."""
    total = _total(one, epochs)
    if total is None or origin.epoch_seconds is None or epochs is None:
        return ""
    remote = epochs * origin.epoch_seconds
    if total < remote:
        return ""
    return (
        f"{counted(epochs, 'epoch')} from there: {total:.3g} s with staging, {remote:.3g} s without"
    )


def _gain(origin: Origin, one: Candidate, epochs: int | None) -> str:
    total = _total(one, epochs)
    if total is None or origin.epoch_seconds is None or epochs is None:
        return ""
    remote = epochs * origin.epoch_seconds
    return (
        f"; {counted(epochs, 'epoch')}: {total:.3g} s with staging, {remote:.3g} s without, "
        "as measured with a sample"
    )


def _in_order(
    faults: Sequence[tuple[str, str]], candidates: Sequence[Candidate]
) -> tuple[tuple[str, str], ...]:
    told = dict(faults)
    return tuple((one.target, told[one.target]) for one in candidates if one.target in told)


def _nowhere(
    origin: Origin, faults: Sequence[tuple[str, str]], candidates: Sequence[Candidate]
) -> InputError:
    told = "; ".join(f"{target}: {fault}" for target, fault in faults) or "no place is known"
    kind = CapacityError if any(not one.refused for one in candidates) else InputError
    return kind(
        f"{told}; and it cannot be used where it is, for it must be unpacked",
        field="--to",
        value="auto",
        hint=f"unpack {origin.where} elsewhere, or name a directory with --to",
    )
