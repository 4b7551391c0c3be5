"""Sources of data: one `Source` per kind, read by several workers at once.

The copier (`copy.py`) asks a source for its plan, forks its workers, and each of them opens a
reader. This module reads directories and files, archives.py archives.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from typing import TYPE_CHECKING, Any, Protocol, Union

from hpml_orchestrator.staging.plan import data_ranges, scan_file, scan_tree
from hpml_orchestrator.staging.request import SourceChangedError
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.plan import CopyPlan, TreeEntry
    from hpml_orchestrator.staging.request import Retry

Buffer = Union[bytes, bytearray, memoryview]

BLOCK_BYTES = 1 << 20
"""Amount to read, hash and write at a time: larger blocks do not fit a core's cache."""

WRITE_BYTES = 128 << 10
"""Amount to write per call, and to read of a large file, as in `cp`: for more, Linux 6.18 uses
larger folios in its page cache, and then 2 GiB on ext4 took five times as long in a VM."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ZEROS = bytes(BLOCK_BYTES)


class Source(Protocol):
    """Data of one kind.

    Attributes:
        kind: "tree", "file", "tar", "zip" or "pack".
        ordered: it can only be read from front to back, like a compressed archive: `reader` is
            opened once, in one process, which reads the files in the order of the plan.
    """

    kind: str
    ordered: bool

    def plan(self) -> CopyPlan:
        """Scan everything once and return the plan; write nothing.

        Raises:
            StagingError: something cannot be staged: names the first 20 paths and the count.
            OSError: the source itself cannot be read.
        """

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open for reading; called in the worker, after the fork."""

    def close(self) -> None:
        """Close all descriptors; called once at the end, also after errors."""


class SourceReader(Protocol):
    """Reads the files of a plan; one per worker, shared by its threads."""

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of `plan.files[number]`, at most BLOCK_BYTES at a time.

        A buffer stays valid while the next one is read. The result is exactly the file's bytes, or
        an error.

        Raises:
            SourceChangedError: the file has changed since it was planned.
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""


class Buffers(threading.local):
    """Two buffers per thread: one is filled while the other is written."""

    def __init__(self) -> None:
        self._two = itertools.cycle([memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)])

    def next(self, size: int) -> memoryview:
        """Return the first `size` bytes of the next buffer."""
        return next(self._two)[:size]

    def filled(self, fd: int, start: int, size: int) -> memoryview:
        """Return `size` bytes of a file from an offset, fewer only at its end."""
        view, got = self.next(size), 0
        while got < size and (more := os.preadv(fd, (view[got:],), start + got)):
            got += more
        return view[:got]

    def pieces(self, fd: int, start: int, stop: int) -> Iterator[Buffer]:
        """Yield the bytes of a file from `start` to `stop`."""
        while start < stop:
            view = self.filled(fd, start, min(WRITE_BYTES, stop - start))
            if not view:
                raise SourceChangedError
            yield view
            start += len(view)


class TreeSource:
    """A directory, or one regular file.

    Args:
        path: its path.
        retry: retries calls after transient faults.
        kind: "tree" or "file".
        outside_links: accept symbolic links that leave the tree, and copy them unchanged.
        follow_links: copy the targets of symbolic links.
        rate: limit of entries examined per second; 0 for none.
    """

    ordered = False

    def __init__(
        self,
        path: str,
        retry: Retry,
        kind: str = "tree",
        *,
        outside_links: bool = False,
        follow_links: bool = False,
        rate: float = 0.0,
    ) -> None:
        self.kind = kind
        self._path = path
        self._retry = retry
        self._links: dict[str, Any] = {"outside_links": outside_links, "follow_links": follow_links}
        self._rate = rate

    def plan(self) -> CopyPlan:
        """Scan the tree."""
        if self.kind == "file":
            return scan_file(self._path, self._retry)
        return scan_tree(self._path, self._retry, rate=self._rate, **self._links)

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open for reading."""
        return _TreeReader(plan, self._retry)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _TreeReader:
    """Reads the files of a directory with few system calls each."""

    def __init__(self, plan: CopyPlan, retry: Retry) -> None:
        self._plan = plan
        self._retry = retry
        self._top = os.open(plan.source_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Drop the source's pages: they would evict those of the node's copy.
        self._drops = readers_for(plan.source_root) > 1
        self._buffers = Buffers()

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield a file; see `SourceReader`."""
        entry = self._plan.files[number]
        if entry.size <= BLOCK_BYTES and entry.stored == entry.size:
            return iter((self._whole(entry),))
        return self._blocks(entry)

    def _open(self, entry: TreeEntry) -> int:
        origins = self._plan.origins
        path = origins.get(entry.path, entry.path) if origins else entry.path
        return os.open(path, _READ, dir_fd=self._top)

    def _whole(self, entry: TreeEntry) -> Buffer:
        """Return a small file's contents, compared with the plan once, after reading."""
        size = entry.size
        view = self._buffers.next(size)
        fd = self._open(entry)
        try:
            # One `fstat` after reading is enough: if the file changed before or during the read,
            # its time or size differs now. Open, read, stat and close are the only system calls.
            got = os.readv(fd, (view,)) if size else 0
            while 0 < got < size:
                more = os.readv(fd, (view[got:],))
                got = got + more if more else -1
            _check_same(entry, os.fstat(fd))
            if got != size:
                raise SourceChangedError
            if not size:
                _check_empty(fd)
            if self._drops:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        return view

    def _blocks(self, entry: TreeEntry) -> Iterator[Buffer]:
        fd = self._open(entry)
        try:
            _check_same(entry, os.fstat(fd))
            ranges = [(0, entry.size)]
            if entry.stored < entry.size:
                ranges = data_ranges(fd, entry.size)
            at = 0
            # Yield holes as zeros without reading: they count in the digest like any other data.
            for start, stop in [*ranges, (entry.size, entry.size)]:
                while at < start:
                    yield memoryview(_ZEROS)[: min(BLOCK_BYTES, start - at)]
                    at += min(BLOCK_BYTES, start - at)
                yield from self._buffers.pieces(fd, at, stop)
                at = max(at, stop)
            _check_same(entry, os.fstat(fd))
        finally:
            if self._drops:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._top)


def _check_same(entry: TreeEntry, info: os.stat_result) -> None:
    """Raise if a source file has changed since it was planned."""
    if (
        info.st_mtime_ns != entry.mtime_ns
        or info.st_size != entry.size
        or info.st_ino != entry.inode
        or not stat.S_ISREG(info.st_mode)
    ):
        raise SourceChangedError


def _check_empty(fd: int) -> None:
    """Refuse a file of size 0 that has contents, as in /proc."""
    if os.read(fd, 1):
        raise SourceChangedError("has size 0 but is not empty, as files of /proc")
