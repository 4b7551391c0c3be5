"""The kinds of sources, and which one a request means."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.archive import DAMAGED, members_of, scan_archive
from hpml_orchestrator.staging.copying import READ, check_same
from hpml_orchestrator.staging.faults import SourceChangedError, shown, why
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

__all__ = ["FileSource", "TarSource", "TreeSource", "open_source"]


def open_source(request: StageRequest, retry: Retry, room: Room) -> Source:
    """Return the source that a request names.

    Args:
        request: what is to be staged.
        retry: calls again after faults that pass.
        room: what the target takes: scanning an archive stops when it holds more.

    Raises:
        InputError: the source is not what the request says it is.
        OSError: the source cannot be looked at.
    """
    kind = retry(lambda: kind_of(request))
    if kind == "tree":
        return TreeSource(request.source, retry, outside_links=request.outside_links)
    if kind == "file":
        return FileSource(request.source, retry)
    return TarSource(request.source, retry, most_bytes=room.bytes)


class TreeSource:
    """A directory; the engine copies it by itself, others can use the reader."""

    kind = "tree"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links

    def plan(self) -> Plan:
        """Look at the tree."""
        return scan_tree(self._path, self._retry, outside_links=self._outside_links)

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

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        """Yield a part of a file; see `source.Reader`."""
        entry = self._plan.files[number]
        name = self._plan.origins.get(entry.path, entry.path)
        fd = self._retry(lambda: os.open(name, READ, dir_fd=self._top))
        try:
            check_same(entry, os.fstat(fd))
            buffer = memoryview(bytearray(min(BLOCK_BYTES, end - start)))
            while start < end:
                count = self._pread(fd, buffer[: end - start], start)
                if not count:
                    raise SourceChangedError
                yield buffer[:count]
                start += count
            check_same(entry, os.fstat(fd))
        finally:
            os.close(fd)

    def _pread(self, fd: int, buffer: memoryview, at: int) -> int:
        return self._retry(lambda: os.preadv(fd, [buffer], at))

    def close(self) -> None:
        """Close the directory."""
        os.close(self._top)


class TarSource:
    """A tar archive, perhaps compressed, that is unpacked from front to back."""

    kind = "tar"
    ordered = True

    def __init__(self, path: str, retry: Retry, *, most_bytes: int) -> None:
        self._path = path
        self._retry = retry
        self._most_bytes = most_bytes

    def plan(self) -> Plan:
        """Look at every member."""
        return scan_archive(self._path, self._retry, most_bytes=self._most_bytes)

    def reader(self, plan: Plan) -> Reader:
        """Open the archive at its start."""
        return _TarReader(self._path, plan, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class _TarReader:
    """Reads members in the order of the plan."""

    def __init__(self, path: str, plan: Plan, retry: Retry) -> None:
        self._path = path
        self._plan = plan
        self._members = members_of(path, retry)
        self._last = len(plan.files) - 1

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        """Yield the next member; see `source.Reader`."""
        entry = self._plan.files[number]
        found = next(self._members, None)
        if found is None or found[:2] != (entry.path, entry.size):
            raise self._changed()
        if (start, end) != (0, entry.size):
            raise ValueError("an archive is read file by file")
        data = found[2]
        while start < end:
            try:
                block = data.read(min(BLOCK_BYTES, end - start))
            except (*DAMAGED, OSError) as error:
                raise StagingError(f"cannot read {shown(self._path)}: {why(error)}") from error
            if not block:
                raise self._changed()
            yield block
            start += len(block)
        if number == self._last:
            for _ in self._members:  # to the end: checksums of compressed data are verified there
                raise self._changed()

    def _changed(self) -> StagingError:
        return StagingError(f"{shown(self._path)}: changed while it was unpacked")

    def close(self) -> None:
        """Close the archive."""
        with contextlib.closing(self._members):
            pass
