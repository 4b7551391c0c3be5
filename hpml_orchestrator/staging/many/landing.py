"""Where chunks become files on a node: created once, by descriptor, with the plan's sizes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.hashing import PIECE_BYTES, Hashing
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from hpml_orchestrator.staging.hashing import Buffer, Digest
    from hpml_orchestrator.staging.many.stream import Head
    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["Landed", "Landing", "make_large_and_empty", "pieces_of"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_AGAIN = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_OPEN = 1024
_ZEROS = bytes(BLOCK_BYTES)


class Landed(NamedTuple):
    """A piece of a file that is there: of which file, from where, and its digest."""

    number: int
    start: int
    digest: bytes


class _Open:
    """A piece that has begun to come."""

    def __init__(self, fd: int, at: int, digest: Digest) -> None:
        self.fd = fd
        self.at = at
        self.digest = digest


def pieces_of(entry: Entry) -> int:
    """Return of how many pieces a file's contents come; an empty file needs none."""
    return -(-entry.size // PIECE_BYTES)


def make_large_and_empty(plan: Plan, dir_fd: int) -> None:
    """Create the files that several workers write together, and those that nobody sends.

    Raises:
        OSError: one cannot be made.
    """
    for entry in plan.files:
        if 0 < entry.size <= PIECE_BYTES:
            continue
        fd = os.open(entry.path, _CREATE, _mode(entry), dir_fd=dir_fd)
        try:
            if entry.size:
                os.ftruncate(fd, entry.size)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)


class Landing:
    """Takes the chunks of one data connection.

    Args:
        plan: what may come.
        dir_fd: the directory to fill; -1 writes nothing, for a node that has the data already.
        how: how files are hashed.
        same: whether a chunk's digest is what `how` makes of its bytes.
    """

    def __init__(self, plan: Plan, dir_fd: int, how: Hashing, *, same: bool) -> None:
        self._files = plan.files
        self._dir_fd = dir_fd
        self._how = how
        self._same = same
        self._open: dict[tuple[int, int], _Open] = {}
        self._made = bytearray(len(plan.files))

    def check(self, head: Head) -> None:
        """Refuse a chunk that the plan has no place for.

        Raises:
            StagingError: there is no such file, or no such place in it.
        """
        if head.number >= len(self._files):
            raise StagingError(f"a chunk came for file {head.number}, which is not in the plan")
        entry = self._files[head.number]
        end = head.offset + head.length
        if head.length == 0 or end > entry.size:
            raise StagingError(f"a chunk came for a place that {shown(entry.path)} does not have")
        if head.offset // PIECE_BYTES != (end - 1) // PIECE_BYTES:
            raise StagingError(f"a chunk of {shown(entry.path)} lies in two pieces")

    def take(self, head: Head, data: Buffer) -> Landed | None:
        """Write a chunk that was checked; returns its piece when that is complete.

        Raises:
            StagingError: it does not follow the one before.
            OSError: it cannot be written.
        """
        entry = self._files[head.number]
        start = head.offset - head.offset % PIECE_BYTES
        end = min(start + PIECE_BYTES, entry.size)
        key = (head.number, start)
        if head.offset == start:
            self._forget(key)
            if head.length == end - start:
                return self._whole(head, entry, data, start)
            if len(self._open) >= _MOST_OPEN:
                raise StagingError(f"chunks of more than {_MOST_OPEN} files came at once")
            self._open[key] = _Open(self._create(head.number, entry), start, self._how.new())
        piece = self._open.get(key)
        if piece is None or piece.at != head.offset:
            raise StagingError(f"chunks of {shown(entry.path)} came out of order")
        self._write(piece.fd, entry, data, head.offset)
        piece.digest.update(data)
        piece.at += head.length
        if piece.at < end:
            return None
        self._finish(piece.fd, entry)
        piece.fd = -1
        del self._open[key]
        return Landed(head.number, start, piece.digest.digest())

    def close(self) -> None:
        """Close what is open."""
        for key in list(self._open):
            self._forget(key)

    def _whole(self, head: Head, entry: Entry, data: Buffer, start: int) -> Landed:
        fd = self._create(head.number, entry)
        try:
            self._write(fd, entry, data, head.offset)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self._finish(fd, entry)
        if self._same:
            return Landed(head.number, start, head.digest)
        digest = self._how.new()
        digest.update(data)
        return Landed(head.number, start, digest.digest())

    def _create(self, number: int, entry: Entry) -> int:
        if self._dir_fd < 0:
            return -1
        if entry.size > PIECE_BYTES or self._made[number]:
            return os.open(entry.path, _AGAIN, dir_fd=self._dir_fd)
        fd = os.open(entry.path, _CREATE, _mode(entry), dir_fd=self._dir_fd)
        self._made[number] = 1
        return fd

    def _write(self, fd: int, entry: Entry, data: Buffer, offset: int) -> None:
        if fd < 0 or (entry.stored < entry.size and data == _ZEROS[: len(data)]):
            return  # a hole stays one
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            offset += count
            view = view[count:]

    def _finish(self, fd: int, entry: Entry) -> None:
        if fd >= 0:
            try:
                if entry.stored < entry.size:
                    os.ftruncate(fd, entry.size)
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)

    def _forget(self, key: tuple[int, int]) -> None:
        piece = self._open.pop(key, None)
        if piece is not None and piece.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(piece.fd)


def _mode(entry: Entry) -> int:
    return (entry.mode & 0o777) | 0o600
