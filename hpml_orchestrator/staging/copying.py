"""Copy the files of a batch: read, hash, write, and look whether the source changed."""

from __future__ import annotations

import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch, Shares
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer, Hashing
    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["CREATE", "DIRECTORY", "READ", "WRITE", "Copying", "Task", "check_empty", "check_same"]

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_MORE: Iterator[Buffer] = iter(())
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
        goes_on: copy all others where a file cannot be copied.
    """

    plan: Plan
    shares: Shares
    target: str
    how: Hashing | None
    piece_bytes: int
    drop_cache: bool
    ordered: bool
    take: Callable[[], object] | None
    goes_on: bool


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


def check_empty(fd: int) -> None:
    """Refuse a file that has contents though its size is 0, as those of /proc have.

    Raises:
        SourceChangedError: says so.
    """
    if os.read(fd, 1):
        raise SourceChangedError("says that it is empty but is not, as files of /proc do")


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
        self._to = os.open(task.target, DIRECTORY)

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
                    if self._task.ordered or self._board.faulty:
                        raise
                    again = _Again(copy, number, entry, batch, tally)
                    self._retry.again(again, error)
            except (SourceChangedError, DamagedSourceError) as error:
                tally.bytes = before
                self._wrong(entry, batch, str(error), error)
            except OSError as error:
                tally.bytes = before
                if error.errno in FULL:
                    raise StagingError(
                        f"cannot write {shown(entry.path)} of {self._task.plan.name}: {why(error)}",
                        hint="something else took the room that was free before; "
                        "choose another target",
                    ) from error
                self._wrong(entry, batch, why(error), error)
            tally.tell_often()
        tally.tell()

    def _wrong(self, entry: Entry, batch: Batch, reason: str, error: BaseException) -> None:
        if not self._task.goes_on:
            self._board.set_faulty()
        elif batch.end != WHOLE:
            with contextlib.suppress(FileNotFoundError):  # by the fault of another piece
                os.unlink(entry.path, dir_fd=self._to)
        self._problem(entry.path, reason, error)

    @abstractmethod
    def _file(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a whole file; what was made of it is gone after an error."""

    @abstractmethod
    def _piece(self, number: int, entry: Entry, batch: Batch, tally: Tally) -> None:
        """Copy a part of a file whose target is there already."""

    def _create(self, entry: Entry) -> int:
        return os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o600, dir_fd=self._to)

    @contextlib.contextmanager
    def _made(self, entry: Entry) -> Iterator[int]:
        """Create a file; it gets its time at the end, and is gone after an error."""
        target = self._create(entry)
        try:
            try:
                if entry.stored < entry.size:
                    os.ftruncate(target, entry.size)
                yield target
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise

    def _put(self, entry: Entry, data: Buffer, rest: Iterator[Buffer] = _NO_MORE) -> None:
        """Write a file that came whole, with as few steps as small files deserve.

        What a reader checks at the end of a file, it checks when it is asked for the rest.
        """
        size = entry.size
        target = self._create(entry)
        try:
            try:
                wrote = os.write(target, data) if size else 0
                while wrote < size:
                    wrote += os.write(target, memoryview(data)[wrote:])
                if next(rest, None) is not None:
                    raise SourceChangedError
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise

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
