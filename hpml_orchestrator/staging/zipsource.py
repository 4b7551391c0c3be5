"""A zip archive as a source: planned from its directory, read by several workers at once."""

from __future__ import annotations

import os
import stat
import threading
import zlib
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.extents import Blocks, PerThread, open_archive, stamp_of
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.members import Members
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.zipdirectory import (
    DEFLATED,
    LOCAL_BYTES,
    LOCAL_MAGIC,
    Member,
    read_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.staging.extents import Stamp
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader

__all__ = ["ZipSource"]

_LONGEST_LINK_BYTES = 4096
_PIECE_BYTES = 1 << 16  # of compressed data: what comes of it is at most BLOCK_BYTES at a time
_DAMAGED = "is damaged: its checksum is wrong"


class ZipSource:
    """A zip archive.

    Args:
        path: the archive.
        retry: calls again after faults that pass.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """

    kind = "zip"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links
        self._members: list[Member] = []
        fd = open_archive(path, retry)
        try:
            self._stamp = stamp_of(path, fd)
        finally:
            os.close(fd)

    def plan(self) -> Plan:
        """Read the central directory; see `Source.plan`."""
        blocks = Blocks([self._stamp], self._retry)
        try:

            def read(at: int, count: int) -> bytes:
                return blocks.exactly(0, at, count)

            found = read_directory(self._path, self._stamp.size, read)
            return self._plan(found, blocks)
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        finally:
            blocks.close()

    def _plan(self, found: list[Member], blocks: Blocks) -> Plan:
        members = Members(self._path, self._stamp.mtime_ns, outside_links=self._outside_links)
        members.check_count(len(found))
        self._members = []
        for member in sorted(found, key=lambda one: one.offset):
            self._retry.check_stop()
            kind = stat.S_IFMT(member.mode)
            if member.fault:
                members.refuse(member.name, member.fault)
            elif member.is_dir:
                members.directory(member.name, member.mode & 0o7777, member.mtime_ns)
            elif kind == stat.S_IFLNK:
                if member.size > _LONGEST_LINK_BYTES:
                    members.refuse(member.name, "symbolic link of absurd length")
                    continue
                text = b"".join(map(bytes, _Inflating(self._stamp, member, blocks).pieces()))
                target = text.decode("utf-8", "surrogateescape")
                members.symlink(member.name, target, member.mtime_ns)
            elif kind not in {0, stat.S_IFREG}:
                members.refuse(member.name)
            elif members.file(member.name, member.mode & 0o7777, member.mtime_ns, member.size):
                self._members.append(member)
        members.problems.raise_any()
        members.check_bytes(self._stamp.size)
        return members.plan

    def reader(self, plan: Plan) -> Reader:  # noqa: ARG002 - the members are known since `plan`
        """Open for reading what `plan` returned."""
        return ZipReader(self._stamp, self._members, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class ZipReader:
    """A `Reader` of a zip archive. A file asked for in parts is read on from where it stopped."""

    def __init__(self, stamp: Stamp, members: Sequence[Member], retry: Retry) -> None:
        self._stamp = stamp
        self._members = members
        self._blocks = PerThread([stamp], retry)
        self._local = threading.local()

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        """Yield a part of a file; see `Reader`.

        A checksum covers a whole member: where its end is asked for, all before is read too.
        """
        member = self._members[number]
        last: tuple[int, int, _Inflating] | None = getattr(self._local, "last", None)
        self._local.last = None
        if last is not None and last[:2] == (number, start):
            inflating, at = last[2], start
        else:
            inflating, at = _Inflating(self._stamp, member, self._blocks.get()), 0
        if member.method != DEFLATED and at < start and end < member.size:
            inflating.skip(start)  # of what is stored, any part can be had
            at = start
        for piece in inflating.pieces(end - at):
            if at + len(piece) > start:
                yield memoryview(piece)[max(0, start - at) :]
            at += len(piece)
        if at != end:
            raise StagingError(
                f"{shown(self._stamp.path)}: {shown(member.name)} is damaged: cut short"
            )
        if end < member.size:
            self._local.last = (number, end, inflating)

    def close(self) -> None:
        """Close the archive."""
        self._blocks.close()


class _Inflating:
    """The contents of one member, from front to back."""

    def __init__(self, stamp: Stamp, member: Member, blocks: Blocks) -> None:
        self._path = stamp.path
        self._member = member
        self._blocks = blocks
        head = blocks.exactly(0, member.offset, LOCAL_BYTES)
        if head[:4] != LOCAL_MAGIC:
            raise self._damaged("is damaged: it has no header")
        extra = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        self._at = member.offset + LOCAL_BYTES + extra
        self._stop = self._at + member.packed
        if self._stop > stamp.size:
            raise self._damaged("is damaged: its header is wrong")
        self._inflate = zlib.decompressobj(-15) if member.method == DEFLATED else None
        self._input: Buffer = b""
        self._crc = 0
        self._done = 0
        self._checked = True

    def skip(self, to: int) -> None:
        """Go on to a place of a member that is stored; its checksum is then not known."""
        self._at += to - self._done
        self._done = to
        self._checked = False

    def pieces(self, count: int = -1) -> Iterator[Buffer]:
        """Yield the next so many bytes, or all that are left; compare the checksum at the end.

        Raises:
            StagingError: the member is damaged.
        """
        member = self._member
        end = member.size if count < 0 else min(member.size, self._done + count)
        while self._done < end:
            piece = self._next(end - self._done)
            self._done += len(piece)
            if self._checked:
                self._crc = zlib.crc32(piece, self._crc)
            yield piece
        if self._done == member.size and self._checked and self._crc != member.crc:
            raise self._damaged(_DAMAGED)

    def _next(self, most: int) -> Buffer:
        most = min(most, BLOCK_BYTES)
        if self._inflate is None:
            piece = next(self._blocks.pieces(0, self._at, min(self._stop, self._at + most)), b"")
            self._at += len(piece)
            if not piece:
                raise self._damaged(_DAMAGED)
            return piece
        while True:
            if not self._input and self._at < self._stop:
                stop = min(self._stop, self._at + _PIECE_BYTES)
                self._input = bytes(next(self._blocks.pieces(0, self._at, stop)))
                self._at += len(self._input)
            try:
                piece = self._inflate.decompress(self._input, most)
            except zlib.error as error:
                raise self._damaged(f"is damaged: {error}") from error
            self._input = self._inflate.unconsumed_tail
            if piece:
                return piece
            if self._inflate.eof or (not self._input and self._at >= self._stop):
                raise self._damaged("is damaged: it ends early")

    def _damaged(self, reason: str) -> StagingError:
        return StagingError(
            f"{shown(self._path)}: {shown(self._member.name)} {reason}",
            hint="make or copy the archive again; `unzip -t` tells all that is damaged",
        )
