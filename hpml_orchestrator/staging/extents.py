"""Read files that lie as stretches of bytes in a few large ones: shards, tar and zip archives.

With pread into one buffer per thread rather than through a map: a fault of the file system, or an
archive cut short while it is read, is an error then and not SIGBUS, and small files that lie one
behind the other come with one call.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Entry

__all__ = [
    "Blocks",
    "ExtentReader",
    "PerThread",
    "Stamp",
    "drop_pages",
    "look_at_archive",
    "open_archive",
    "stamp_of",
]

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WHOLE_BYTES = BLOCK_BYTES // 4  # what is shorter is rather read again than handed on in two parts


class Stamp(NamedTuple):
    """An archive as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    inode: int


def stamp_of(path: str, fd: int) -> Stamp:
    """Return the stamp of an open file."""
    info = os.fstat(fd)
    return Stamp(path, info.st_size, info.st_mtime_ns, info.st_ino)


def open_archive(path: str, retry: Retry) -> int:
    """Open an archive for reading.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = retry(lambda: os.open(path, _READ))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StagingError(f"{shown(path)}: is no regular file")
    return fd


def look_at_archive(path: str, retry: Retry) -> tuple[Stamp, bytes]:
    """Return the stamp of an archive and its first bytes.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = open_archive(path, retry)
    try:
        return stamp_of(path, fd), retry(lambda: os.pread(fd, 8, 0))
    finally:
        os.close(fd)


def drop_pages(path: str) -> None:
    """Let the pages of a file that a server has leave the memory.

    The node has its own copy of the data then, and the source's pages would push out those of it.
    """
    if readers_for(path) > 1:
        with contextlib.suppress(OSError):
            fd = os.open(path, _READ)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Blocks:
    """A buffer that moves over archives; for one thread. `view[: end - start]` is [start, end).

    Args:
        archives: what is read.
        retry: calls again after faults that pass.
        drops: let an archive's pages leave the memory when it is closed.
    """

    __slots__ = ("_archives", "_drops", "_retry", "archive", "end", "fd", "start", "view")

    def __init__(self, archives: Sequence[Stamp], retry: Retry, *, drops: bool = False) -> None:
        self._archives = archives
        self._retry = retry
        self._drops = drops
        self.fd = -1
        self.view = memoryview(bytearray(BLOCK_BYTES))
        self.archive = -1
        self.start = self.end = 0

    def fill(self, archive: int, at: int, most: int = BLOCK_BYTES) -> None:
        """Read from an offset on, as much as fits or there is.

        Raises:
            SourceChangedError: the archive is not what it was, or ends here.
            OSError: it cannot be read.
        """
        fd = self.opened(archive)
        self.start = self.end = at
        target = self.view[:most]
        count = self._retry(lambda: os.preadv(fd, [target], at))
        if not count:
            raise SourceChangedError
        self.check()
        self.end = at + count

    def pieces(self, archive: int, at: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [at, stop) of an archive; a buffer is valid until the next is asked for.

        Raises:
            SourceChangedError: the archive is not what it was, or ends before.
            OSError: it cannot be read.
        """
        while at < stop:
            if archive != self.archive or not self.start <= at < self.end:
                self.fill(archive, at)
            until = min(stop, self.end)
            yield self.view[at - self.start : until - self.start]
            at = until

    def exactly(self, archive: int, at: int, count: int) -> bytes:
        """Return so many bytes at an offset."""
        return b"".join([bytes(piece) for piece in self.pieces(archive, at, at + count)])

    def opened(self, archive: int) -> int:
        """Return the descriptor of an archive, which is opened in place of another one.

        Raises:
            SourceChangedError: it, or the one before, is not what it was.
            OSError: it cannot be opened.
        """
        if archive == self.archive:
            return self.fd
        self.check()
        self.close()
        self.fd = open_archive(self._archives[archive].path, self._retry)
        self.archive = archive
        self.check()
        return self.fd

    def check(self) -> None:
        """Compare the open archive with what it was: so what was read before is of that one.

        Raises:
            SourceChangedError: it is another.
        """
        if self.fd >= 0:
            then = self._archives[self.archive]
            if stamp_of(then.path, self.fd) != then:
                raise SourceChangedError

    def close(self) -> None:
        """Close the archive that is open."""
        self.archive = -1
        self.start = self.end = 0
        if self.fd >= 0:
            if self._drops:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self.fd)
            self.fd = -1


class PerThread:
    """A `Blocks` for each thread that asks.

    Pages of archives on a server leave the memory in the end; see `drop_pages`.
    """

    def __init__(self, archives: Sequence[Stamp], retry: Retry) -> None:
        self._archives = archives
        self._retry = retry
        self._drops = any(readers_for(archive.path) > 1 for archive in archives[:1])
        self._local = threading.local()
        self._all: list[Blocks] = []

    def get(self) -> Blocks:
        """Return this thread's own."""
        try:
            blocks: Blocks = self._local.blocks
        except AttributeError:
            blocks = self._local.blocks = Blocks(self._archives, self._retry, drops=self._drops)
            self._all.append(blocks)
        return blocks

    def close(self) -> None:
        """Close all archives; no thread reads any more."""
        for blocks in self._all:
            blocks.close()


class ExtentReader:
    """A `Reader` of files that are stretches of bytes.

    Args:
        archives: the files that hold them.
        which: number of the archive of each file of the plan.
        starts: where each file of the plan begins in it.
        files: of the plan.
        retry: calls again after faults that pass.
    """

    def __init__(
        self,
        archives: Sequence[Stamp],
        which: Sequence[int],
        starts: Sequence[int],
        files: Sequence[Entry],
        retry: Retry,
    ) -> None:
        self._files = files
        self._which = which
        self._starts = starts
        self._blocks = PerThread(archives, retry)

    def read(self, number: int) -> Iterator[memoryview]:
        """Yield a file; see `Reader`."""
        archive = self._which[number]
        at = self._starts[number]
        stop = at + self._files[number].size
        blocks = self._blocks.get()
        if stop - at <= _WHOLE_BYTES:
            if archive != blocks.archive or at < blocks.start or stop > blocks.end:
                if at >= stop:
                    return iter(())
                blocks.fill(archive, at)
            if stop <= blocks.end:
                return iter((blocks.view[at - blocks.start : stop - blocks.start],))
        return blocks.pieces(archive, at, stop)

    def close(self) -> None:
        """Close what is open."""
        self._blocks.close()
