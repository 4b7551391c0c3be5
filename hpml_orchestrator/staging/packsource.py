"""A pack as a source: its shards are unpacked by several workers at once.

The index says where every file lies and what its digest is; modes and times stand in the headers of
the shards, and directories and links in `tree.tar`. The index's digest shows damage, not who wrote
it: names are checked as those of any other archive. Contents are compared with it by the engine,
where the node's Python has xxhash; elsewhere each file's size alone is.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.extents import ExtentReader, PerThread, Stamp, look_at_archive
from hpml_orchestrator.staging.faults import VERIFY_PACK, SourceChangedError, shown
from hpml_orchestrator.staging.members import Members
from hpml_orchestrator.staging.packindex import INDEX_FILE, TREE_FILE, read_index
from hpml_orchestrator.staging.plan import Entry
from hpml_orchestrator.staging.streams import FileBytes
from hpml_orchestrator.staging.tarheaders import BLOCK, HeaderError, header_fields, scan_members

if TYPE_CHECKING:
    from hpml_orchestrator.staging.extents import Blocks
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.packindex import Columns, Index
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader

__all__ = ["PackSource"]

_ALIGNED = BLOCK - 1
_NANO = 1_000_000_000
_LARGEST_USTAR = 8**11 - 1  # a larger size stands in a pax header before this one
_SLICE_FILES = 1024
_NEAR_BYTES = 1 << 16


class PackSource:
    """A directory that `hpml pack` made, to be unpacked.

    Args:
        path: the pack.
        retry: calls again after faults that pass.
        outside_links: take symbolic links that leave the root as they are.
    """

    kind = "pack"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links
        self._archives: list[Stamp] = []
        self._which = array("L")
        self._starts = array("Q")

    def plan(self) -> Plan:
        """Read index, headers and `tree.tar`; see `Source.plan`.

        Raises:
            NotFoundError: it is no finished pack.
            StagingError: an archive is missing or damaged, or the index is.
            OSError: the pack cannot be read.
        """
        index = read_index(self._path)
        self._archives = [self._stamp(one.file, one.bytes) for one in index.archives]
        files = index.files()
        self._check_places(files)
        self._which = array("L", files.shards)
        self._starts = array("Q", files.offsets)
        info = self._retry(lambda: os.stat(self._index_path))
        members = Members(self._path, info.st_mtime_ns, outside_links=self._outside_links)
        modes, times = self._headers(files)
        sizes = files.sizes
        columns = zip(files.names, modes, times, sizes, sizes, repeat(0))
        members.files(list(map(tuple.__new__, repeat(Entry), columns)))
        self._scan_tree(index, members)
        members.problems.raise_any()
        members.plan.expected = list(files.digests)
        return members.plan

    def _stamp(self, file: str, size: int) -> Stamp:
        """Look at an archive.

        Raises:
            StagingError: it is not there, or not as long as the index says.
        """
        path = os.path.join(self._path, file)
        if os.path.basename(file) != file:
            raise StagingError(f"{shown(self._path)}: its index names a file that is not in it")
        try:
            found, _ = look_at_archive(path, self._retry)
        except FileNotFoundError:
            raise StagingError(f"{shown(path)} is missing", hint=VERIFY_PACK) from None
        if found.size != size:
            raise self._damaged(path, f"has {found.size} bytes, not {size}")
        return found

    def _check_places(self, files: Columns) -> None:
        sizes = [stamp.size for stamp in self._archives]
        if files.shards and max(files.shards) >= len(sizes):
            raise self._damaged(self._index_path, "it names an archive that it does not know")
        places = zip(files.shards, files.offsets, files.sizes)
        for number, (shard, offset, size) in enumerate(places):
            if offset < BLOCK or offset & _ALIGNED or offset + size > sizes[shard]:
                name = shown(files.names[number])
                raise self._damaged(self._index_path, f"{name} cannot be where it says")

    @property
    def _index_path(self) -> str:
        return os.path.join(self._path, INDEX_FILE)

    def _headers(self, files: Columns) -> tuple[list[int], list[int]]:
        """Return modes and times of all files, from the headers before their data.

        They are read one by one, or from a server by several threads, with all between them where
        they are near each other.
        """
        count, readers = len(files.sizes), readers_for(self._path)
        is_near = readers > 1 and sum(files.sizes) < count * _NEAR_BYTES
        blocks = PerThread(self._archives, self._retry)
        read = partial(self._some_headers, files, blocks, is_near)
        slices = range(0, count, _SLICE_FILES)
        try:
            found = []
            if readers > 1:
                # the job may have no more threads
                with contextlib.suppress(RuntimeError), ThreadPoolExecutor(readers) as pool:
                    found = list(pool.map(read, slices))
            found = found or list(map(read, slices))
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        finally:
            blocks.close()
        return [mode for modes, _ in found for mode in modes], [t for _, ts in found for t in ts]

    def _some_headers(
        self, files: Columns, blocks: PerThread, is_near: bool, first: int
    ) -> tuple[list[int], list[int]]:
        """Read the headers of a slice of the files."""
        return self._retry(lambda: self._read_headers(files, blocks.get(), is_near, first))

    def _read_headers(
        self, files: Columns, blocks: Blocks, is_near: bool, first: int
    ) -> tuple[list[int], list[int]]:
        self._retry.check_stop()
        modes, times = [], []
        some = slice(first, first + _SLICE_FILES)
        for shard, offset, size in zip(files.shards[some], files.offsets[some], files.sizes[some]):
            at = offset - BLOCK
            if is_near:
                block = blocks.exactly(shard, at, BLOCK)
            else:
                block = os.pread(blocks.opened(shard), BLOCK, at)
                if len(block) < BLOCK:
                    raise SourceChangedError
            try:
                head = header_fields(block)
                if head.size != size and size <= _LARGEST_USTAR:
                    raise HeaderError("it is of another size")
            except HeaderError as error:
                path = self._archives[shard].path
                raise self._damaged(path, f"the header at byte {at}: {error}") from error
            modes.append(head.mode & 0o777)
            times.append(head.mtime * _NANO)
        blocks.check()
        return modes, times

    def _scan_tree(self, index: Index, members: Members) -> None:
        """Plan directories and links."""
        number = next((n for n, one in enumerate(index.archives) if one.file == TREE_FILE), None)
        if number is None:
            raise self._damaged(self._index_path, f"it does not know {TREE_FILE}")
        stamp = self._archives[number]
        data = FileBytes(stamp, self._retry)
        try:
            more = array("Q")
            scan_members(stamp.path, data, members, more, most_bytes=1 << 62)
        except SourceChangedError as error:
            raise StagingError(f"{shown(stamp.path)}: changed while it was read") from error
        finally:
            data.close()
        if more:
            raise self._damaged(stamp.path, "it holds files that the index does not know")

    def _damaged(self, path: str, reason: str) -> StagingError:
        return StagingError(f"{shown(path)} is damaged: {reason}", hint=VERIFY_PACK)

    def reader(self, plan: Plan) -> Reader:  # noqa: ARG002 - the places are known since `plan`
        """Open for reading what `plan` returned."""
        return ExtentReader(self._archives, self._which, self._starts, self._retry)

    def close(self) -> None:
        """Nothing is held."""
