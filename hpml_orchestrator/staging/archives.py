"""Tar archives and directories of tar shards as sources, read with the standard library.

Nothing in an archive is trusted: `tarfile` only reads headers, members.py decides what may be
written, and the copier writes it. The first pass reads all headers and makes the plan; nothing is
written before. A compressed archive is decompressed twice, and a bomb only until it does not fit.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import zipfile
from array import array
from typing import IO, TYPE_CHECKING, NoReturn, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.faults import SourceChangedError, shown, why
from hpml_orchestrator.staging.members import MOST_MEMBERS, Members, honest_bytes
from hpml_orchestrator.staging.request import shards_of
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.streams import (
    DAMAGED,
    ArchiveFile,
    compression_of,
    decompressed,
    drop_pages,
    look_at_archive,
    not_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import SourceReader

    Row = tuple[bytes, str, int, int, int, int, str]
    # type, name, mode, mtime in ns, size, offset of the data, link

_NANO = 1_000_000_000
_MOST_DIGITS = 20
_EXTENSIONS = b"xgXLK"
_LARGEST_EXTENSION_BYTES = 16 << 20
"""Names and attributes are small: a larger extension is an attempt to exhaust memory."""
_GLOBAL_BYTES = 1 << 20  # tarfile keeps global headers in memory
_ROWS_AT_ONCE = 10_000
_MANY_BYTES = 64 << 20  # with more in all shards, forked workers read the headers
_NEAR_BYTES, _SERVED_NEAR_BYTES = 1 << 13, 1 << 17


def check_archive(path: str, kind: str) -> None:
    """Refuse a file that is not an archive, by its first block or its last 64 KiB.

    Args:
        path: the file.
        kind: as `kind_of` returns it; other kinds than archives are not read.

    Raises:
        StagingError: it would not be staged; with the message of staging.
        OSError: it cannot be read.
    """
    if kind == "zip" and not zipfile.is_zipfile(path):
        raise not_whole(path, "zip", "it has no end of a central directory")
    if kind == "tar":
        with open(path, "rb", buffering=0) as stream:
            start = stream.read(tarfile.BLOCKSIZE)
        if not compression_of(start) and start != bytes(tarfile.BLOCKSIZE):
            try:
                tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
            except tarfile.TarError as error:
                raise not_whole(path, "tar", f"it does not begin as one does: {error}") from error


class TarSource:
    """A tar archive, or a directory of shards; `ordered` when it is compressed.

    Args:
        path: the archive, or the directory.
        kind: "tar" or "pack".
        retry: calls again after faults that pass.
        most_bytes: planning stops when the members have more.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        InputError: the directory holds something else, or nothing.
        StagingError: it is not a regular file, or a shard is compressed.
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: str, kind: str, retry: Retry, *, most_bytes: int, outside_links: bool = False
    ) -> None:
        self.kind = kind
        self._path = path
        self._retry = retry
        self._most_bytes = most_bytes
        self._outside_links = outside_links
        self._starts = array("Q")
        self._which = array("L")
        paths = shards_of(path) if kind == "pack" else [path]
        looks = [look_at_archive(one, retry) for one in paths]
        self._stamps = [stamp for stamp, _ in looks]
        compressed = [stamp.path for stamp, start in looks if compression_of(start)]
        self.ordered = kind == "tar" and bool(compressed)
        if compressed and not self.ordered:
            raise StagingError(
                f"{shown(compressed[0])}: is compressed, which shards of a pack are not",
                hint="decompress the shards, or stage the directory with kind: tree",
            )

    def plan(self) -> CopyPlan:
        """Read all headers; see `Source.plan`."""
        changed = os.stat(self._path).st_mtime_ns
        members = Members(self._path, changed, outside_links=self._outside_links)
        self._starts, self._which = array("Q"), array("L")
        for number, rows in self._rows(members):
            for row in rows:
                if self._judge(row, members):
                    self._starts.append(row[5])
                    self._which.append(number)
                # The rest cannot fit, so do not read it. `at_least` keeps this part of an archive
                # from ever being published as the whole.
                if members.total_bytes > self._most_bytes:
                    members.plan.at_least = True
                    return members.plan
        if self.ordered:
            members.check_bytes(self._stamps[0].size)
        members.problems.raise_any()
        members.plan.stamps = [stamp[1:] for stamp in self._stamps]
        return members.plan

    def _judge(self, row: Row, members: Members) -> bool:
        """Pass a member to members.py; True if it is a file of the plan."""
        kind, name, mode, mtime_ns, size, _, link = row
        if kind == tarfile.REGTYPE:
            return members.file(name, mode, mtime_ns, size)
        if kind == tarfile.DIRTYPE:
            members.directory(name, mode, mtime_ns)
        elif kind == tarfile.SYMTYPE:
            members.symlink(name, link, mtime_ns)
        elif kind == tarfile.LNKTYPE:
            members.hard_link(name, link)
        else:
            members.refuse(name)
        return False

    def _rows(self, members: Members) -> Iterator[tuple[int, list[Row]]]:
        """Yield the members, archive by archive; forked workers read the headers of many shards."""
        numbers = range(len(self._stamps))
        # A compressed archive is always one file here, so `_scan` gets its members only in this
        # process, where it can give up on a bomb while decompressing.
        workers = min(len(os.sched_getaffinity(0)), len(numbers))
        if workers < 2 or sum(stamp.size for stamp in self._stamps) < _MANY_BYTES:  # noqa: PLR2004
            for number in numbers:
                for row in self._scan(number, members):
                    yield number, [row]
            return
        found: list[list[Row]] = [[] for _ in numbers]

        def work(_worker: int, take: Callable[[], int | None], tell: Callable[..., None]) -> None:
            for number in iter(take, None):
                rows = list(self._scan(number, None))
                for at in range(0, len(rows), _ROWS_AT_ONCE):
                    tell(number, rows[at : at + _ROWS_AT_ONCE])

        def on_report(number: int, rows: list[Row]) -> None:
            found[number] += rows

        run_crew(workers, work, numbers, on_report=on_report, heartbeat=self._retry.check_stop)
        yield from enumerate(found)

    def _scan(self, number: int, members: Members | None) -> Iterator[Row]:
        stamp = self._stamps[number]
        path, most = stamp.path, min(self._most_bytes, honest_bytes(stamp.size))
        near = _SERVED_NEAR_BYTES if readers_for(path) > 1 else _NEAR_BYTES
        try:
            with (
                self.opened(number, near) as data,
                tarfile.open(fileobj=data, mode="r:", tarinfo=_Info.of(path)) as tar,
            ):
                for count, info in enumerate(iter(tar.next, None)):
                    if count >= MOST_MEMBERS:
                        raise StagingError(f"{shown(path)}: holds more than {MOST_MEMBERS} members")
                    tar.members = []  # type: ignore[attr-defined] # tarfile keeps every one
                    yield _row(cast("_Info", info))
                    if self.ordered and members is not None and members.total_bytes > most:
                        members.check_bytes(stamp.size)  # raises, so the rest is never read
                while self.ordered and data.read(BLOCK_BYTES):
                    pass  # to the end, where the decompressor compares its checksum
        except SourceChangedError as error:
            raise StagingError(f"{shown(path)}: changed while it was read") from error
        except (tarfile.TarError, OverflowError, *DAMAGED) as error:
            raise not_whole(path, "tar", why(error)) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise not_whole(path, "tar", why(error)) from error  # bz2 reports damage like this

    @contextlib.contextmanager
    def opened(self, number: int, buffer_bytes: int = BLOCK_BYTES) -> Iterator[IO[bytes]]:
        """Open an archive and yield its uncompressed contents."""
        stamp = self._stamps[number]
        file = ArchiveFile(stamp.path, self._retry, stamp)
        with io.BufferedReader(file, BLOCK_BYTES if self.ordered else buffer_bytes) as raw:
            data = decompressed(file, raw) if self.ordered else raw
            with contextlib.closing(data):
                yield data
        drop_pages(stamp.path)

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open for reading what `plan` returned."""
        return _TarReader(self, plan)

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the number of the archive with a file of the plan, and the file's offset in it."""
        return self._which[number], self._starts[number]

    def close(self) -> None:
        """Do nothing: no descriptor stays open."""


class _TarReader:
    """A `SourceReader` of archives; each thread has one open."""

    def __init__(self, source: TarSource, plan: CopyPlan) -> None:
        self._source = source
        self._files = plan.files
        self._local = threading.local()
        self._all: list[contextlib.ExitStack] = []

    def _stream(self, archive: int) -> IO[bytes]:
        mine = self._local
        # A stream has one position: threads that shared it would move it under one another. Batches
        # follow the order of the plan, so a thread rarely changes archives.
        if getattr(mine, "archive", None) != archive:
            if not hasattr(mine, "stack"):
                mine.stack = contextlib.ExitStack()
                self._all.append(mine.stack)
            mine.stack.close()
            mine.stream = mine.stack.enter_context(self._source.opened(archive))
            mine.archive = archive
        return cast("IO[bytes]", mine.stream)

    def read(self, number: int) -> Iterator[bytes]:
        """Yield a file; see `SourceReader`."""
        size = self._files[number].size
        archive, start = self._source.place_of(number)
        stream = self._stream(archive)
        if size:
            stream.seek(start)
        if size > BLOCK_BYTES or self._source.ordered:
            return self._blocks(stream, number, size)
        data = stream.read(size)
        if len(data) < size:
            raise SourceChangedError
        return iter((data,))

    def _blocks(self, stream: IO[bytes], number: int, size: int) -> Iterator[bytes]:
        while size:
            data = stream.read(min(size, BLOCK_BYTES))
            if not data:
                raise SourceChangedError
            yield data
            size -= len(data)
        if self._source.ordered and number == len(self._files) - 1:
            while stream.read(BLOCK_BYTES):
                pass  # to the end, where the decompressor compares its checksum

    def close(self) -> None:
        """Close all archives; all threads have ended."""
        for stack in self._all:
            stack.close()


def _row(info: _Info) -> Row:
    records = info.pax_headers
    # A float has 53 bits, and nanoseconds since 1970 need 61: parse the text of a pax header
    # instead.
    mtime_ns = int(info.mtime * _NANO) if "mtime" not in records else _nanoseconds(records["mtime"])
    if info.size < 0:  # tarfile would seek backwards and loop for ever
        raise EOFError("it holds a member with a negative size")
    if any(key.startswith("GNU.sparse") for key in records):
        info._sparse()  # noqa: SLF001 - of our class
    kind = tarfile.REGTYPE if info.isreg() else info.type
    length = info.size if info.isreg() else 0
    return kind, info.name, info.mode & 0o7777, mtime_ns, length, info.offset_data, info.linkname


def _nanoseconds(text: str) -> int:
    """Convert a pax header's decimal seconds to nanoseconds; 0 if they cannot be parsed."""
    sign = -1 if text[:1] == "-" else 1  # before 1970
    whole, _, part = text[sign < 0 :].partition(".")
    if not whole.isdigit() or len(whole) > _MOST_DIGITS or (part and not part.isdigit()):
        return 0
    return sign * (int(whole) * _NANO + int(part[:9].ljust(9, "0")))


class _Info(tarfile.TarInfo):
    """A member as tarfile reads it, with the checks that tarfile lacks."""

    archive = ""
    kept_bytes = 0  # size of all global headers so far

    @classmethod
    def of(cls, archive: str) -> type[_Info]:
        """Return the class for one archive."""
        return type("Info", (cls,), {"archive": archive})

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Info:
        """Read a header."""
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):  # tarfile would treat a damaged header as the end of the archive
                raise tarfile.ReadError(f"a damaged header: {error}") from error
            raise
        if info.type == tarfile.GNUTYPE_SPARSE:
            info._sparse()  # noqa: SLF001 - its own
        if info.type in _EXTENSIONS:
            cls.kept_bytes += info.size if info.type == tarfile.XGLTYPE else 0
            if info.size > _LARGEST_EXTENSION_BYTES or cls.kept_bytes > _GLOBAL_BYTES:
                raise tarfile.ReadError("it holds a header of absurd size")
        return info

    def _proc_pax(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            found: tarfile.TarInfo = super()._proc_pax(tar)  # type: ignore[misc]
        except tarfile.HeaderError as error:  # newer Pythons take it for the end, too
            raise tarfile.ReadError(f"a damaged header: {error}") from error
        return found

    def _sparse(self, *_: object) -> NoReturn:
        raise StagingError(
            f"{shown(self.archive)}: {shown(self.name)} is a sparse member of GNU tar",
            hint="repack the archive without --sparse",
        )

    # tarfile would read the list of holes into memory, however long the archive makes it.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse
