"""Copy the files of a batch: read, hash, write, and look whether the source changed."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.batches import WHOLE
from hpml_orchestrator.staging.faults import (
    FULL,
    DamagedSourceError,
    SourceChangedError,
    shown,
    why,
)
from hpml_orchestrator.staging.filehash import FileHash
from hpml_orchestrator.staging.plan import data_ranges
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch, Shares
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Hashing
    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["CREATE", "READ", "WRITE", "Copying", "Task", "TreeCopying", "check_same"]

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_ZEROS = bytes(BLOCK_BYTES)

_clock = time.perf_counter


class Task(NamedTuple):
    """What all workers know.

    Attributes:
        plan: what is copied.
        shares: how it is divided.
        target: the directory that is filled.
        how: hashes every file; None for none.
        piece_bytes: larger files are hashed in pieces of this size.
        drop_cache: let the source's pages leave the memory once they are read.
        ordered: a file can only be read once, so that no call is made again.
        take: called before a source file is opened; waits when that is too often.
    """

    plan: Plan
    shares: Shares
    target: str
    how: Hashing | None
    piece_bytes: int
    drop_cache: bool
    ordered: bool
    take: Callable[[], object] | None


def check_same(entry: Entry, info: os.stat_result) -> None:
    """Refuse a source file that is not what the plan says.

    Raises:
        SourceChangedError: its type, size, time or inode differs.
    """
    if (
        info.st_mtime_ns != entry.mtime_ns
        or info.st_size != entry.size
        or info.st_ino != entry.inode
        or not stat.S_ISREG(info.st_mode)
    ):
        raise SourceChangedError


class Copying(ABC):
    """Copies batches; one per process, its threads call `do` at once.

    Args:
        task: what all workers know.
        board: stop, digests.
        retry: calls again after faults that pass.
        problem: told (path, reason, cause) of what cannot be copied; the others go on.
    """

    def __init__(
        self,
        task: Task,
        board: Board,
        retry: Retry,
        problem: Callable[[str, str, BaseException], None],
    ) -> None:
        self._task = task
        self._board = board
        self._retry = retry
        self._problem = problem
        self._to = os.open(task.target, _DIRECTORY)

    def close(self) -> None:
        """Close what is open."""
        os.close(self._to)

    def do(self, batch: Batch, tally: Tally) -> None:
        """Copy a batch.

        Raises:
            StagingError: the target is full.
            StagingStopped: should_stop said so.
        """
        files = self._task.plan.files
        copy = self._file if batch.end == WHOLE else self._piece
        for number in range(batch.first, batch.last):
            entry = files[number]
            self._retry.check_stop()
            before = tally.bytes
            try:
                try:
                    copy(number, entry, batch, tally)
                except OSError as error:
                    tally.bytes = before
                    if self._task.ordered:
                        raise
                    again = _Again(copy, number, entry, batch, tally)
                    self._retry.again(again, error)
            except (SourceChangedError, DamagedSourceError) as error:
                tally.bytes = before
                self._wrong(entry, str(error), error)
            except OSError as error:
                tally.bytes = before
                if error.errno in FULL:
                    raise StagingError(
                        f"cannot write {shown(entry.path)} of "
                        f"{shown(self._task.plan.source_root)}: {why(error)}",
                        hint="something else took the room that was free before; "
                        "choose another target",
                    ) from error
                self._wrong(entry, why(error), error)
            tally.tell_often()
        tally.tell()

    def _wrong(self, entry: Entry, reason: str, error: BaseException) -> None:
        self._board.set_faulty()
        self._problem(entry.path, reason, error)

    @abstractmethod
    def _file(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a whole file; what was made of it is gone after an error."""

    @abstractmethod
    def _piece(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a part of a file whose target is there already."""

    def _create(self, entry: Entry) -> int:
        return os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o600, dir_fd=self._to)

    def _summer(self, number: int, batch: Batch) -> FileHash | None:
        """Return what hashes a file, or a piece of one."""
        if self._task.how is None:
            return None
        expected = self._task.plan.expected
        wanted = expected[number] if expected and self._task.how.name == "xxh3_128" else b""
        if batch.end != WHOLE:
            return FileHash(self._task.how, self._task.piece_bytes, [batch.slot], b"")
        held = self._task.shares.pieces.get(number)
        return FileHash(self._task.how, self._task.piece_bytes, held or [number], wanted)

    def _settle(self, digest: FileHash | None) -> None:
        """Keep the digests; an unexpected one is an error."""
        if digest is None:
            return
        digest.end()
        for slot, value in digest.found():
            self._board.put(slot, value)


class _Again:
    """A call that can be made again, without a closure for every file."""

    def __init__(self, call: Callable[..., None], *arguments: object) -> None:
        self._call = call
        self._arguments = arguments
        tally = arguments[-1]
        self._tally: Tally = tally  # type: ignore[assignment]
        self._before = self._tally.bytes

    def __call__(self) -> None:
        self._tally.bytes = self._before
        self._call(*self._arguments)


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
        self._from = os.open(task.plan.source_root, _DIRECTORY)
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
        begin = _clock()
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
            if task.drop_cache:
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(source)
        if how is not None:
            digest = how.new()
            digest.update(view)
            self._board.put(number, digest.digest())
        middle = _clock()
        target = self._create(entry)
        try:
            try:
                wrote = os.write(target, view) if size else 0
                while wrote < size:
                    wrote += os.write(target, view[wrote:])
                os.utime(target, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise
        tally.read_seconds += middle - begin
        tally.write_seconds += _clock() - middle
        tally.bytes += size
        tally.files += 1

    def _blocks(self, source: int, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a whole open file block by block, or only look at it."""
        check_same(entry, os.fstat(source))
        if self._board.faulty:
            return
        digest = self._summer(number, batch)
        target = self._create(entry)
        try:
            try:
                if entry.stored < entry.size:
                    os.ftruncate(target, entry.size)
                self._fill(source, target, (0, entry.size), entry, digest, tally)
                check_same(entry, os.fstat(source))
                self._settle(digest)
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise
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
            begin = _clock()
            count = os.preadv(source, (buffer[: min(BLOCK_BYTES, end - at)],), at)
            if not count:
                raise SourceChangedError
            view = buffer[:count]
            digest.update(view)
            middle = _clock()
            wrote = 0
            while wrote < count:
                wrote += os.pwrite(target, view[wrote:], at + wrote)
            tally.read_seconds += middle - begin
            tally.write_seconds += _clock() - middle
            tally.bytes += count
            tally.tell()
            at += count
            if at < end:
                self._retry.check_stop()

    def _send(self, source: int, target: int, at: int, end: int, tally: Tally) -> None:
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            begin = _clock()
            count = _send(source, target, at, min(BLOCK_BYTES, end - at))
            if not count:
                raise SourceChangedError
            tally.write_seconds += _clock() - begin
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
