"""The kinds of sources, and which one a request means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.archives import TarSource, ZipSource
from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.copying import READ, check_empty, check_same
from hpml_orchestrator.staging.faults import SourceChangedError
from hpml_orchestrator.staging.plan import scan_file, scan_tree
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["FileSource", "TreeSource", "open_source"]


def open_source(
    request: StageRequest, retry: Retry, room: Room, *, opens_per_second: float = 0.0
) -> Source:
    """Return the source that a request names.

    Args:
        request: what is to be staged.
        retry: calls again after faults that pass.
        room: what the target takes: scanning an archive stops when it holds more.
        opens_per_second: most entries of a tree that are looked at per second; 0 for any.

    Raises:
        InputError: the source is not what the request says it is.
        StagingError: this node lacks what it takes to read it.
        OSError: the source cannot be looked at.
    """
    kind = retry(lambda: kind_of(request))
    path, outside_links = request.source, request.outside_links
    if kind == "tree":
        tree = TreeSource(path, retry, outside_links=outside_links)
        tree.rate = opens_per_second
        return tree
    if kind == "file":
        return FileSource(path, retry)
    if kind == "zip":
        return ZipSource(path, retry, outside_links=outside_links)
    return TarSource(path, kind, retry, most_bytes=room.bytes, outside_links=outside_links)


class TreeSource:
    """A directory; the engine copies it by itself, others can use the reader.

    Attributes:
        rate: entries that are looked at per second at most; 0 for any.
    """

    kind = "tree"
    ordered = False
    rate = 0.0

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links

    def plan(self) -> Plan:
        """Look at the tree."""
        links = self._outside_links
        return scan_tree(self._path, self._retry, outside_links=links, rate=self.rate)

    def reader(self, plan: Plan) -> Reader:
        """Open the tree for reading."""
        return _TreeReader(plan, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class FileSource:
    """One regular file."""

    kind = "file"
    ordered = False

    def __init__(self, path: str, retry: Retry) -> None:
        self._path = path
        self._retry = retry

    def plan(self) -> Plan:
        """Look at the file."""
        return scan_file(self._path, self._retry)

    def reader(self, plan: Plan) -> Reader:
        """Open it for reading."""
        return _TreeReader(plan, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class _TreeReader:
    """Reads files of a directory."""

    def __init__(self, plan: Plan, retry: Retry) -> None:
        self._plan = plan
        self._retry = retry
        self._top = os.open(plan.source_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._drops = readers_for(plan.source_root) > 1  # see `drop_pages`

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        """Yield a part of a file; see `source.Reader`."""
        entry = self._plan.files[number]
        name = self._plan.origins.get(entry.path, entry.path)
        fd = self._retry(lambda: os.open(name, READ, dir_fd=self._top))
        begin = start
        try:
            check_same(entry, os.fstat(fd))
            if not entry.size:
                check_empty(fd)
            buffer = memoryview(bytearray(min(BLOCK_BYTES, end - start)))
            while start < end:
                count = self._pread(fd, buffer[: end - start], start)
                if not count:
                    raise SourceChangedError
                yield buffer[:count]
                start += count
            check_same(entry, os.fstat(fd))
        finally:
            if self._drops:
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _pread(self, fd: int, buffer: memoryview, at: int) -> int:
        return self._retry(lambda: os.preadv(fd, [buffer], at))

    def close(self) -> None:
        """Close the directory."""
        os.close(self._top)
