"""Each node stages one part of the data: for training whose sampler knows that.

Files of one sample (all that has the same directory and the same name up to the first dot) stay
together. Samples are dealt out in the order of their names, one node after the other, so that each
part has some of every directory; where they do not come out even, the first samples are dealt out
once more, as PyTorch's DistributedSampler does: all parts have equally many, and no rank waits
for a batch that another does not have. A link to a file counts as a sample of its own, as it does
for a data set, and becomes a file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.request import PACK_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["PartitionSource", "part_numbers", "part_of", "without_links"]


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


def without_links(plan: Plan) -> tuple[Plan, list[int]]:
    """Return a plan whose links to its files are files, and whose contents each file then has.

    So every name is dealt out once, and has its contents wherever it is dealt to.

    Returns:
        The plan, and for each of its files a number in `plan.files`.

    Raises:
        InputError: a link leads to a directory, whose samples would count where it is, too.
    """
    numbers = {entry.path: number for number, entry in enumerate(plan.files)}
    directories = {entry.path for entry in plan.directories} | {"."}
    leads = {link.path: _resolved(link.path, link.target) for link in plan.symlinks}
    firsts = {link.path: link.first for link in plan.hard_links}
    kept = []
    for link in plan.symlinks:
        target, passed = link.path, set[str]()
        while target in leads and target not in passed:  # a link may lead to a link, or in a circle
            passed.add(target)
            target = leads[target]
        if target in directories:
            raise InputError(
                f"partition deals out files, but {shown(link.path)} is a link to a directory",
                field="distribution",
                value="partition",
                hint="stage the directories that have the files, or use chain",
            )
        if firsts.get(target, target) in numbers:
            firsts[link.path] = target
        else:
            kept.append(link)
    files, whose = list(plan.files), list(range(len(plan.files)))
    origins = dict(plan.origins)
    for path, first in firsts.items():
        number = numbers[firsts.get(first, first)]
        entry = plan.files[number]
        files.append(entry._replace(path=path))
        whose.append(number)
        origins[path] = plan.origins.get(entry.path, entry.path)
    expected = [plan.expected[number] for number in whose] if plan.expected else []
    made = replace(plan, files=files, hard_links=[], symlinks=kept, origins=origins)
    return replace(made, expected=expected), whose


def part_of(plan: Plan, part: int, parts: int) -> tuple[Plan, list[int]]:
    """Return a part of a plan with all of its directories, and the numbers of its files there.

    Links that lead out of the tree are dealt out like files.
    """
    count = len(plan.files)
    names = [*(entry.path for entry in plan.files), *(link.path for link in plan.symlinks)]
    found = part_numbers(names, part, parts) if names else []
    numbers = [number for number in found if number < count]
    kept = replace(
        plan,
        files=[plan.files[number] for number in numbers],
        symlinks=[plan.symlinks[number - count] for number in found if number >= count],
        expected=[plan.expected[number] for number in numbers] if plan.expected else [],
    )
    return kept, numbers


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
        whole, whose = without_links(plan)
        part, numbers = part_of(whole, self._part, self._parts)
        self._numbers = [whose[number] for number in numbers]
        return part

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


def _resolved(path: str, target: str) -> str:
    """Return what a symbolic link names, relative to the top; as it is where that is outside."""
    if target.startswith("/"):
        return target
    return os.path.normpath(os.path.join(os.path.dirname(path), target))
