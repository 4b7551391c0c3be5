"""A pack as a source: its shards are unpacked by several workers at once.

The index says where every file lies, its mode, time and digest; directories and links stand in
`tree.tar`. The index's digest shows damage, not who wrote it: names are checked as those of any
other archive. Contents are compared with it by the engine, where the node's Python has xxhash;
elsewhere each file's size alone is.
"""

from __future__ import annotations

import os
import stat
from array import array
from itertools import repeat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.extents import ExtentReader, Stamp, look_at_archive
from hpml_orchestrator.staging.faults import VERIFY_PACK, SourceChangedError, shown
from hpml_orchestrator.staging.members import Members
from hpml_orchestrator.staging.packindex import INDEX_FILE, TREE_FILE, read_index
from hpml_orchestrator.staging.plan import Entry
from hpml_orchestrator.staging.streams import FileBytes
from hpml_orchestrator.staging.tarheaders import BLOCK, scan_members

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.packindex import Columns, Index
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader

__all__ = ["PackSource"]

_ALIGNED = BLOCK - 1
_NANO = 1_000_000_000


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
        modes = [stat.S_IFREG | mode & 0o777 for mode in files.modes]
        times = [seconds * _NANO for seconds in files.times]
        columns = zip(files.names, modes, times, files.sizes, files.sizes, repeat(0))
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
