"""The kinds of sources, and which one a request means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.copying import READ, check_empty, check_same
from hpml_orchestrator.staging.faults import SourceChangedError
from hpml_orchestrator.staging.packsource import PackSource
from hpml_orchestrator.staging.plan import scan_file, scan_tree
from hpml_orchestrator.staging.request import PACK_INDEX, PACK_STATE, kind_of, unfinished_pack
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.streams import compression_of
from hpml_orchestrator.staging.tarheaders import BLOCK, check_start
from hpml_orchestrator.staging.tarsource import TarSource
from hpml_orchestrator.staging.zipsource import ZipSource, check_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["FileSource", "TreeSource", "check_archive", "open_source"]


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
        tree.rate, tree.has_whole_packs = opens_per_second, request.kind == "auto"
        return tree
    if kind == "file":
        return FileSource(path, retry)
    if kind == "pack":
        return PackSource(path, retry, outside_links=outside_links)
    if kind == "zip":
        return ZipSource(path, retry, outside_links=outside_links)
    return TarSource(path, retry, most_bytes=room.bytes, outside_links=outside_links)


def check_archive(path: str, kind: str) -> None:
    """Refuse an archive that is none, by its first block or its last 64 KiB: it is not read whole.

    Args:
        path: the file.
        kind: as `kind_of` returns it; nothing is looked at where it is no archive's.

    Raises:
        StagingError: it would not be staged; says so as staging would.
        OSError: it cannot be read.
    """
    if kind not in {"tar", "zip"}:
        return
    with open(path, "rb", buffering=0) as stream:
        fd = stream.fileno()
        start = os.pread(fd, BLOCK, 0)
        if kind == "zip":
            check_end(path)
        elif not compression_of(start):
            check_start(path, start)


class TreeSource:
    """A directory; the engine copies it by itself, others can use the reader.

    Attributes:
        rate: entries that are looked at per second at most; 0 for any.
        has_whole_packs: a pack in it that is being made, or was cut off, is refused.
    """

    kind = "tree"
    ordered = False
    rate = 0.0
    has_whole_packs = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links

    def plan(self) -> Plan:
        """Look at the tree."""
        links = self._outside_links
        plan = scan_tree(self._path, self._retry, outside_links=links, rate=self.rate)
        if self.has_whole_packs:
            paths = {entry.path for entry in plan.files}
            for begun in sorted(path for path in paths if path.endswith(f"/{PACK_STATE}")):
                if begun.replace(PACK_STATE, PACK_INDEX) not in paths:
                    raise unfinished_pack(f"{self._path}/{os.path.dirname(begun)}")
        return plan

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
