"""A plan as bytes, so that one node reads the metadata and the others are told."""

from __future__ import annotations

import os
import stat
import struct
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.plan import (
    DEEPEST,
    Entry,
    HardLink,
    Plan,
    Symlink,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PlanReader", "plan_parts"]

# kind, mode, mtime in ns, size, bytes stored, lengths of name, of the second name, of the digest
_RECORD = struct.Struct(">cIqQQHHB")
_PART_BYTES = 256 << 10
_MOST_BYTES = 1 << 62
_KINDS = b"TDFHS"  # in the order in which they come
_LONGEST_NAME = 0xFFFF


def plan_parts(plan: Plan) -> Iterator[bytes]:
    """Yield a plan in parts of about 256 KiB, whole records each.

    Raises:
        StagingError: a name is too long to be told.
    """
    part = bytearray()
    for record in _records(plan):
        part += record
        if len(part) >= _PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def _records(plan: Plan) -> Iterator[bytes]:
    yield _entry(b"T", plan.top)
    for entry in plan.directories:
        yield _entry(b"D", entry)
    expected = plan.expected
    for number, entry in enumerate(plan.files):
        yield _entry(b"F", entry, expected[number] if expected else b"")
    for hard in plan.hard_links:
        yield _record(b"H", hard.path, hard.first)
    for link in plan.symlinks:
        yield _record(b"S", link.path, link.target, mtime_ns=link.mtime_ns)


def _entry(kind: bytes, entry: Entry, expected: bytes = b"") -> bytes:
    path = os.fsencode(entry.path)
    if len(path) > _LONGEST_NAME:
        raise StagingError(f"{shown(entry.path)[:200]}…: a name of {len(path)} bytes")
    size = (entry.mode, entry.mtime_ns, entry.size, entry.stored)
    return _RECORD.pack(kind, *size, len(path), 0, len(expected)) + path + expected


def _record(kind: bytes, path: str, other: str, *, mtime_ns: int = 0) -> bytes:
    first, second = os.fsencode(path), os.fsencode(other)
    if max(len(first), len(second)) > _LONGEST_NAME:
        raise StagingError(f"{shown(path)[:200]}…: a name of {len(first)} bytes")
    return _RECORD.pack(kind, 0, mtime_ns, 0, 0, len(first), len(second), 0) + first + second


class PlanReader:
    """Puts a plan together from parts, and believes none of it unchecked.

    Args:
        source: what is staged, for errors.
        outside_links: take symbolic links that leave the tree.
    """

    def __init__(self, source: str, *, outside_links: bool) -> None:
        self._plan = Plan(source, Entry("", 0, 0))
        self._outside_links = outside_links
        self._stage = -1
        self._directories = {""}
        self._names: set[str] = set()
        self._files: set[str] = set()

    def add(self, part: bytes) -> None:
        """Take the next part.

        Raises:
            StagingError: it is damaged, or names something that may not be made.
        """
        at = 0
        while at < len(part):
            if len(part) - at < _RECORD.size:
                raise _wrong("it is cut short")
            kind, mode, mtime, size, stored, first, second, third = _RECORD.unpack_from(part, at)
            at += _RECORD.size
            if len(part) - at < first + second + third:
                raise _wrong("it is cut short")
            path = os.fsdecode(part[at : at + first])
            other = os.fsdecode(part[at + first : at + first + second])
            expected = bytes(part[at + first + second : at + first + second + third])
            at += first + second + third
            self._step(kind)
            self._take(kind, Entry(path, mode, mtime, size, stored), other, expected)

    def finish(self, *, at_least: bool) -> Plan:
        """Return the plan.

        Args:
            at_least: the first node stopped counting early.

        Raises:
            StagingError: it has no top.
        """
        if self._stage < 0:
            raise _wrong("it is empty")
        if not any(self._plan.expected):
            self._plan.expected = []
        self._plan.at_least = at_least
        return self._plan

    def _step(self, kind: bytes) -> None:
        stage = _KINDS.find(kind)
        if stage < 0 or stage < self._stage or (stage == 0) != (self._stage < 0):
            raise _wrong("its parts are out of order")
        self._stage = stage

    def _take(self, kind: bytes, entry: Entry, other: str, expected: bytes) -> None:
        if kind == b"T":
            if entry.path:
                raise _wrong("its top has a name")
            self._plan.top = entry
            return
        self._check(entry)
        if kind == b"D":
            self._directories.add(entry.path)
            self._plan.directories.append(entry)
        elif kind == b"F":
            self._files.add(entry.path)
            self._plan.files.append(entry)
            self._plan.expected.append(expected)
        elif kind == b"H":
            if other not in self._files:
                raise _wrong(f"{shown(entry.path)} is a further name of no file")
            self._plan.hard_links.append(HardLink(entry.path, other))
        else:
            fault = _link_fault(entry.path, other, outside_links=self._outside_links)
            if fault:
                raise _wrong(f"{shown(entry.path)}: {fault}")
            self._plan.symlinks.append(Symlink(entry.path, other, entry.mtime_ns))

    def _check(self, entry: Entry) -> None:
        path = entry.path
        parent, _, base = path.rpartition("/")
        bad = path.startswith("/") or base in {"", ".", ".."} or "\0" in path
        if bad or path.count("/") > DEEPEST:
            raise _wrong(f"the name {shown(path)!r} may not be made")
        if parent not in self._directories:
            raise _wrong(f"{shown(path)} is in no directory of it")
        if path in self._names:
            raise _wrong(f"{shown(path)} comes twice")
        if stat.S_IFMT(entry.mode) not in {0, stat.S_IFREG, stat.S_IFDIR}:
            raise _wrong(f"{shown(path)} is neither file nor directory")
        if max(entry.size, entry.stored) > _MOST_BYTES:
            raise _wrong(f"{shown(path)} has an absurd size")
        self._names.add(path)


def _link_fault(path: str, target: str, *, outside_links: bool) -> str:
    """Return why a symbolic link is refused, "" when its text stays below the top.

    Where a text leads through other links, only the real tree can tell: the first node looked.
    """
    if not target or "\0" in target:
        return "symbolic link to nothing"
    if outside_links:
        return ""
    if target.startswith("/"):
        return f"symbolic link to an absolute path ({shown(target)})"
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return f"symbolic link that leaves the tree ({shown(target)})"
    return ""


def _wrong(why: str) -> StagingError:
    return StagingError(f"the plan that came over the network cannot be used: {why}")
