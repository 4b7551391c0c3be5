"""Each node stages one part of the data: for training whose sampler knows that.

Files of one sample (all that has the same directory and the same name up to the first dot) stay
together. Samples are dealt out in the order of their names, one node after the other, so that each
part has some of every directory; where they do not come out even, the first samples are dealt out
once more, as PyTorch's DistributedSampler does: all parts have equally many, and no rank waits
for a batch that another does not have.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.plan import Plan
from hpml_orchestrator.staging.request import PACK_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["PartitionSource", "part_numbers", "part_of"]


def part_numbers(names: list[str], part: int, parts: int) -> list[int]:
    """Return the numbers of the files that belong to a part, ascending.

    >>> part_numbers(["a.jpg", "a.txt", "b.jpg", "b.txt", "c.jpg", "c.txt"], 1, 2)
    [0, 1, 2, 3]
    """
    keys = [_sample(name) for name in names]
    samples = sorted(set(keys))
    each = -(-len(samples) // parts)
    mine = {samples[(turn * parts + part) % len(samples)] for turn in range(each)}
    return [number for number, key in enumerate(keys) if key in mine]


def part_of(plan: Plan, numbers: list[int]) -> Plan:
    """Return a plan of some of the files, with all directories and the links that still lead on."""
    kept = [plan.files[number] for number in numbers]
    names = {entry.path for entry in kept}
    hard = [link for link in plan.hard_links if link.first in names]
    there = names | {link.path for link in hard} | {entry.path for entry in plan.directories}
    return replace(
        plan,
        files=kept,
        hard_links=hard,
        symlinks=[link for link in plan.symlinks if _leads(link.path, link.target, there)],
        origins={name: origin for name, origin in plan.origins.items() if name in names},
        expected=[plan.expected[number] for number in numbers] if plan.expected else [],
    )


class PartitionSource:
    """A `Source` with one part of another's files.

    Args:
        source: the whole.
        part: which, from 0 on.
        parts: how many there are.
    """

    def __init__(self, source: Source, part: int, parts: int) -> None:
        self._source = source
        self._part = part
        self._parts = parts
        self._whole: Plan | None = None
        self._numbers: list[int] = []
        self.kind = source.kind
        self.ordered = source.ordered

    def plan(self) -> Plan:
        """Look at the whole, and say what of it will be made.

        Raises:
            InputError: it cannot be divided: one file, or a pack that is not unpacked.
            StagingError, OSError: as the source's.
        """
        plan = self._whole = self._source.plan()
        names = [entry.path for entry in plan.files]
        if self.kind == "file" or PACK_INDEX in names:
            what = "this is one file" if self.kind == "file" else "a pack is read as a whole"
            raise InputError(
                f"partition divides trees and archives that are unpacked, but {what}",
                field="distribution",
                value="partition",
                hint="use chain, or for a pack kind: pack, which unpacks it",
            )
        if plan.at_least:
            return plan
        self._numbers = part_numbers(names, self._part, self._parts) if names else []
        return part_of(plan, self._numbers)

    def reader(self, plan: Plan) -> Reader:
        """Open the whole for reading; numbers are those of the part."""
        whole = self._whole if self._whole is not None else plan
        return _PartReader(self._source.reader(whole), self._numbers)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class _PartReader:
    def __init__(self, reader: Reader, numbers: list[int]) -> None:
        self._reader = reader
        self._numbers = numbers

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        return self._reader.read(self._numbers[number], start, end)

    def close(self) -> None:
        self._reader.close()


def _sample(name: str) -> tuple[bytes, bytes]:
    directory, _, base = os.fsencode(name).rpartition(b"/")
    return directory, base.partition(b".")[0]


def _leads(path: str, target: str, there: set[str]) -> bool:
    """Say whether a symbolic link leads to something of the part, or out of the tree."""
    if target.startswith("/"):
        return True
    return os.path.normpath(os.path.join(os.path.dirname(path), target)) in there | {"."}
