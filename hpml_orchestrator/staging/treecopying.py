"""Copy the files of a directory, with few system calls for each."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.copying import (
    DIRECTORY,
    READ,
    WRITE,
    Copying,
    Task,
    check_empty,
    check_same,
)
from hpml_orchestrator.staging.faults import (
    SourceChangedError,
)
from hpml_orchestrator.staging.filehash import FileHash
from hpml_orchestrator.staging.plan import data_ranges
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Entry

__all__ = ["TreeCopying"]

_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_ZEROS = bytes(BLOCK_BYTES)


class TreeCopying(Copying):
    """Copies from a directory of the same machine, with few system calls per file."""

    def __init__(
        self,
        task: Task,
        board: Board,
        retry: Retry,
        problem: Callable[[str, str, BaseException], None],
    ) -> None:
        super().__init__(task, board, retry, problem)
        self._from = os.open(task.plan.source_root, DIRECTORY)
        self._local = threading.local()

    def close(self) -> None:
        """Close what is open."""
        os.close(self._from)
        super().close()

    def _buffer(self) -> memoryview:
        try:
            found: memoryview = self._local.buffer
        except AttributeError:
            found = self._local.buffer = memoryview(bytearray(BLOCK_BYTES))
        return found

    def _open(self, entry: Entry) -> int:
        task = self._task
        if task.take is not None:
            task.take()
        origins = task.plan.origins
        path = origins.get(entry.path, entry.path) if origins else entry.path
        return os.open(path, READ, dir_fd=self._from)

    def _file(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        size, mtime_ns = entry.size, entry.mtime_ns
        task = self._task
        how = task.how
        source = self._open(entry)
        try:
            if (
                size > BLOCK_BYTES
                or entry.stored < size
                or self._board.faulty
                or task.plan.expected
            ):
                self._blocks(source, number, entry, batch, tally)
                return
            view = self._buffer()[:size]
            got = os.readv(source, (view,)) if size else 0
            while 0 < got < size:
                more = os.readv(source, (view[got:],))
                got = got + more if more else -1
            info = os.fstat(source)
            # the plan is the look before, this is the look after
            if info.st_mtime_ns != mtime_ns or got != size:
                raise SourceChangedError
            check_same(entry, info)
            if not size:
                check_empty(source)
            if task.drop_cache:
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(source)
        if how is not None:
            digest = how.new()
            digest.update(view)
            self._board.put(number, digest.digest())
        self._put(entry, view)
        tally.bytes += size
        tally.files += 1

    def _blocks(self, source: int, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a whole open file block by block, or only look at it."""
        check_same(entry, os.fstat(source))
        if self._board.faulty:
            return
        digest = self._summer(number, batch)
        with self._made(entry) as target:
            self._fill(source, target, (0, entry.size), entry, digest, tally)
            check_same(entry, os.fstat(source))
            self._settle(digest)
        tally.files += 1

    def _piece(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a part of a file whose target is there already."""
        source = self._open(entry)
        try:
            check_same(entry, os.fstat(source))
            if self._board.faulty:
                return
            digest = self._summer(number, batch)
            target = os.open(entry.path, WRITE, dir_fd=self._to)
            try:
                self._fill(source, target, (batch.start, batch.end), entry, digest, tally)
            finally:
                os.close(target)
            check_same(entry, os.fstat(source))
            self._settle(digest)
        finally:
            os.close(source)
        if batch.end == entry.size:
            tally.files += 1

    def _fill(
        self,
        source: int,
        target: int,
        part: tuple[int, int],
        entry: Entry,
        digest: FileHash | None,
        tally: Tally,
    ) -> None:
        """Copy a part of an open file, holes left out."""
        at, end = part
        ranges = [part]
        if entry.stored < entry.size:
            ranges = data_ranges(source, entry.size)
        for first, last in ranges:
            start, stop = max(first, at), min(last, end)
            if start >= stop:
                continue
            self._hole(start - at, digest, tally)
            if digest is None:
                self._send(source, target, start, stop, tally)
            else:
                self._pass(source, target, start, stop, digest, tally)
            at = stop
        self._hole(end - at, digest, tally)
        if self._task.drop_cache:
            os.posix_fadvise(source, part[0], end - part[0], os.POSIX_FADV_DONTNEED)

    def _hole(self, count: int, digest: FileHash | None, tally: Tally) -> None:
        tally.bytes += count
        while digest is not None and count > 0:
            self._retry.check_stop()
            digest.update(_ZEROS if count >= BLOCK_BYTES else memoryview(_ZEROS)[:count])
            count -= BLOCK_BYTES

    def _pass(
        self, source: int, target: int, at: int, end: int, digest: FileHash, tally: Tally
    ) -> None:
        buffer = self._buffer()
        while at < end:
            count = os.preadv(source, (buffer[: min(BLOCK_BYTES, end - at)],), at)
            if not count:
                raise SourceChangedError
            view = buffer[:count]
            digest.update(view)
            wrote = 0
            while wrote < count:
                wrote += os.pwrite(target, view[wrote:], at + wrote)
            tally.bytes += count
            tally.tell()
            at += count
            if at < end:
                self._retry.check_stop()

    def _send(self, source: int, target: int, at: int, end: int, tally: Tally) -> None:
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            count = _send(source, target, at, min(BLOCK_BYTES, end - at))
            if not count:
                raise SourceChangedError
            tally.bytes += count
            tally.tell()
            at += count
            if at < end:
                self._retry.check_stop()


def _send(source: int, target: int, offset: int, count: int) -> int:
    """Copy up to count bytes inside the kernel, or through memory where it cannot."""
    try:
        return os.sendfile(target, source, offset, count)
    except OSError as error:
        if error.errno not in _NO_SENDFILE:
            raise
    data = os.pread(source, count, offset)
    return os.write(target, data) if data else 0
