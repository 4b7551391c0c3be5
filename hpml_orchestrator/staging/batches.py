"""How the files of a plan are shared out: batches of small ones, pieces of large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.staging.hashing import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.hashing import Hashing
    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["FILE_COST_BYTES", "WHOLE", "Batch", "Shares", "share_out"]

WHOLE = -1
"""End of a batch whose files are copied whole."""

FILE_COST_BYTES = 64 << 10
"""Opening and creating a file takes as long as copying so many bytes (measured, warm cache)."""

_MOST_BATCHES = 8192
_LEAST_COST_BYTES = 2 << 20
_BATCHES_PER_WORKER = 8
_FEWEST_FILES = 4


class Batch(NamedTuple):
    """Files `first` to before `last`, or the bytes `start` to `end` of file `first`.

    `slot` is where the digest of such a piece goes.
    """

    first: int
    last: int
    start: int = 0
    end: int = WHOLE
    slot: int = 0


class Shares(NamedTuple):
    """What there is to do.

    Attributes:
        batches: pieces first, because they take longest.
        pieces: slots of the digests of a file's pieces, by the file's number.
        slots: how many digests there are.
    """

    batches: list[Batch]
    pieces: dict[int, range]
    slots: int

    def digests(self, plan: Plan, slot: Callable[[int], bytes], how: Hashing) -> list[bytes]:
        """Return the digest of every file from those in the slots."""
        found = [slot(number) for number in range(len(plan.files))]
        for number, slots in self.pieces.items():
            found[number] = file_digest([slot(one) for one in slots], how)
        return found


def share_out(
    plan: Plan, workers: int, *, piece_bytes: int, ordered: bool = False, streams: int = 1
) -> Shares:
    """Divide the files of a plan.

    Args:
        plan: what is to be copied.
        workers: how many will work at most.
        piece_bytes: larger files are divided.
        ordered: one batch of everything, in the plan's order.
        streams: processes, which are kept in different parts of the tree: creating files in one
            directory makes them wait for each other.
    """
    files = plan.files
    pieces: dict[int, range] = {}
    work: list[Batch] = []
    slots = len(files)
    for number, entry in enumerate(files):
        if entry.size > piece_bytes:
            count = -(-entry.size // piece_bytes)
            pieces[number] = range(slots, slots + count)
            slots += count
    if ordered:
        return Shares([Batch(0, len(files))], pieces, slots)
    for number, held in pieces.items():
        # a digest can only be compared, and a zip's member inflated, from front to back
        if plan.whole or (plan.expected and plan.expected[number]):
            work.append(Batch(number, number + 1))
            continue
        size = files[number].size
        for at, slot in enumerate(held):
            end = min(size, (at + 1) * piece_bytes)
            work.append(Batch(number, number + 1, at * piece_bytes, end, slot))
    small = _batches(files, pieces, workers)
    each = -(-len(small) // streams)
    work += [one for at in range(each) for one in small[at::each]]
    return Shares(work, pieces, slots)


def _batches(files: list[Entry], pieces: dict[int, range], workers: int) -> list[Batch]:
    total = sum(entry.size for entry in files) + len(files) * FILE_COST_BYTES
    most = max(_LEAST_COST_BYTES, total // _MOST_BATCHES)
    most = min(most, total // (max(1, workers) * _BATCHES_PER_WORKER))
    most = max(most, _FEWEST_FILES * FILE_COST_BYTES, total // _MOST_BATCHES)
    found = []
    first = cost = 0
    for number, entry in enumerate(files):
        if number in pieces:
            if number > first:
                found.append(Batch(first, number))
            first, cost = number + 1, 0
            continue
        cost += entry.size + FILE_COST_BYTES
        if cost >= most:
            found.append(Batch(first, number + 1))
            first, cost = number + 1, 0
    if first < len(files):
        found.append(Batch(first, len(files)))
    return found
