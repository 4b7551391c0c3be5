"""Tar archives as sources: plain ones by place, compressed ones from front to back.

The first pass reads the headers and plans; nothing is written before that. A plain archive is then
read by several workers at once, a compressed one is decompressed a second time: only so is it known
before the first byte is written that it fits, and a bomb is given up as soon as it does not.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.extents import ExtentReader, Stamp, drop_pages, look_at_archive
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.members import Members, honest_bytes
from hpml_orchestrator.staging.streams import FileBytes, Stream, compression_of
from hpml_orchestrator.staging.tarheaders import scan_members

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader

__all__ = ["TarSource"]


class TarSource:
    """A tar archive; `ordered` when it is compressed.

    Args:
        path: the archive.
        retry: calls again after faults that pass.
        most_bytes: what there is room for; planning stops once the members hold more.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """

    kind = "tar"

    def __init__(
        self, path: str, retry: Retry, *, most_bytes: int, outside_links: bool = False
    ) -> None:
        self._path = path
        self._retry = retry
        self._most_bytes = most_bytes
        self._outside_links = outside_links
        self._starts = array("Q")
        self._stamp, start = look_at_archive(path, retry)
        self.ordered = compression_of(start) != ""

    def plan(self) -> Plan:
        """Read all headers; see `Source.plan`."""
        members = Members(self._path, self._stamp.mtime_ns, outside_links=self._outside_links)
        self._starts = array("Q")
        try:
            self._scan(members)
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        members.problems.raise_any()
        return members.plan

    def _scan(self, members: Members) -> None:
        starts, most = self._starts, self._most_bytes
        if not self.ordered:
            data = FileBytes(self._stamp, self._retry)
            try:
                scan_members(self._path, data, members, starts, most_bytes=most)
            finally:
                data.close()
            return
        most = min(most, honest_bytes(self._stamp.size))
        with Stream(self._path, self._retry, self._stamp) as stream:
            scan_members(self._path, stream, members, starts, most_bytes=most, skips=False)
            members.check_bytes(self._stamp.size)
            if not members.plan.at_least:
                stream.drain()

    def reader(self, plan: Plan) -> Reader:
        """Open for reading what `plan` returned."""
        if not self.ordered:
            return ExtentReader([self._stamp], None, self._starts, self._retry)
        ends = (start + entry.size for start, entry in zip(self._starts, plan.files) if entry.size)
        return StreamReader(self._stamp, self._starts, max(ends, default=0), self._retry)

    def close(self) -> None:
        """Nothing is held."""


class StreamReader:
    """A `Reader` of a compressed archive, whose files are asked for in their order."""

    def __init__(self, stamp: Stamp, starts: array[int], end: int, retry: Retry) -> None:
        self._stamp = stamp
        self._starts = starts
        self._end = end
        self._retry = retry
        self._stream: Stream | None = None

    def read(self, number: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield a part of a file; see `Reader`. Going back begins anew, which takes its time."""
        at, stop = self._starts[number] + start, self._starts[number] + end
        try:
            yield from self._pieces(at, stop)
        except ValueError:
            self.close()
            yield from self._pieces(at, stop)
        if stop == self._end and self._stream is not None:
            self._stream.drain()

    def _pieces(self, at: int, stop: int) -> Iterator[memoryview]:
        if self._stream is None:
            self._stream = Stream(self._stamp.path, self._retry, self._stamp)
        for piece in self._stream.pieces(at, stop):
            at += len(piece)
            yield piece
        if at < stop:
            raise SourceChangedError

    def close(self) -> None:
        """Close the archive; see `drop_pages`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            drop_pages(self._stamp.path)
