"""Tar archives and directories of tar shards as sources, read with the standard library.

Nothing of an archive is trusted: `tarfile` only says what is in it, members.py decides
what may be written, and the engine writes it. The first pass reads the headers and plans, nothing
is written before that; a compressed archive is decompressed a second time, and a bomb is given up
as soon as it does not fit.
"""

from __future__ import annotations

import io
import os
import struct
import tarfile
import threading
import zipfile
import zlib
from array import array
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.members import MOST_MEMBERS, UNKNOWN, Members, honest_bytes
from hpml_orchestrator.staging.request import shards_of
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.streams import (
    ArchiveFile,
    Stamp,
    Stream,
    compression_of,
    drop_pages,
    look_at_archive,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Entry, Plan
    from hpml_orchestrator.staging.source import Reader

    Row = tuple[bytes, str, int, int, int, int, str]
    # type, name, mode, mtime in ns, size, offset of the data, link

__all__ = ["TarSource", "check_archive", "not_whole"]

_NANO = 1_000_000_000
_MOST_DIGITS = 20
_FORM = struct.Struct("100s8s16x12s12s8sc100s88x155s12x")
_EXTENSIONS = b"xgXLK"
_LARGEST_EXTENSION_BYTES = 16 << 20
"""Names and attributes are small: a larger extension is an attempt to eat memory."""
_GLOBAL_BYTES = 1 << 20  # those for all members that follow are kept in memory
_ROWS_AT_ONCE = 10_000
_MANY_BYTES = 64 << 20  # of shards, from where on workers read their headers
_NEAR_BYTES, _SERVED_NEAR_BYTES = 1 << 13, 1 << 17
_UNSUPPORTED = {
    b"M": "goes on from another volume: join the volumes first",
    b"D": "belongs to an incremental archive of GNU tar: make a plain one",
}


def check_archive(path: str, kind: str) -> None:
    """Refuse an archive that is none, by its first block or its last 64 KiB: it is not read whole.

    Args:
        path: the file.
        kind: as `kind_of` returns it; nothing is looked at where it is no archive's.

    Raises:
        StagingError: it would not be staged; says so as staging would.
        OSError: it cannot be read.
    """
    if kind == "zip" and not zipfile.is_zipfile(path):
        raise not_whole(path, "zip", "it has no end of a central directory")
    if kind == "tar":
        with open(path, "rb", buffering=0) as stream:
            start = stream.read(tarfile.BLOCKSIZE)
        if not compression_of(start) and start != bytes(tarfile.BLOCKSIZE):
            try:
                _Info.of(path).frombuf(start, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise not_whole(path, "tar", f"it does not begin as one does: {error}") from error


class TarSource:
    """A tar archive, or a directory of shards; `ordered` when it is compressed.

    Args:
        path: the archive, or the directory.
        kind: "tar" or "pack".
        retry: calls again after faults that pass.
        most_bytes: what there is room for; planning stops once the members hold more.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        InputError: the directory holds something else, or nothing.
        StagingError: it is no regular file, or a shard is compressed.
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

    def plan(self) -> Plan:
        """Read all headers; see `Source.plan`."""
        changed = os.stat(self._path).st_mtime_ns
        members = Members(self._path, changed, outside_links=self._outside_links)
        self._starts, self._which = array("Q"), array("L")
        for number, rows in self._rows(members):
            for row in rows:
                if self._judge(row, members):
                    self._starts.append(row[5])
                    self._which.append(number)
                if members.total_bytes > self._most_bytes:
                    members.plan.at_least = True
                    return members.plan
        if self.ordered:
            members.check_bytes(self._stamps[0].size)
        members.problems.raise_any()
        members.plan.stamps = [stamp[1:] for stamp in self._stamps]
        return members.plan

    def _judge(self, row: Row, members: Members) -> bool:
        """Let the judge take a member; True when it is a file of the plan."""
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
            members.refuse(name, _UNSUPPORTED.get(kind, UNKNOWN))
        return False

    def _rows(self, members: Members) -> Iterator[tuple[int, list[Row]]]:
        """Yield what the headers say, archive by archive; of many shards by forked workers."""
        numbers = range(len(self._stamps))
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

        def told(number: int, rows: list[Row]) -> None:
            found[number] += rows

        run_crew(workers, work, numbers, told=told, heartbeat=self._retry.check_stop)
        yield from enumerate(found)

    def _scan(self, number: int, members: Members | None) -> Iterator[Row]:
        """Yield what the headers of one archive say.

        Raises:
            StagingError: it is no whole archive, or changed meanwhile.
            OSError: it cannot be read.
        """
        stamp = self._stamps[number]
        try:
            if not self.ordered:
                served = readers_for(stamp.path) > 1
                near = _SERVED_NEAR_BYTES if served else _NEAR_BYTES
                with ArchiveFile(stamp, self._retry) as raw, io.BufferedReader(raw, near) as data:
                    yield from _tar_rows(stamp.path, data, stamp.size)
                return
            most = min(self._most_bytes, honest_bytes(stamp.size))
            with Stream(stamp, self._retry) as stream:
                for row in _tar_rows(stamp.path, cast("IO[bytes]", stream), 0):
                    yield row
                    if members is not None and members.total_bytes > most:
                        members.check_bytes(stamp.size)  # what follows is not even read
                stream.drain()
        except SourceChangedError as error:
            raise StagingError(f"{shown(stamp.path)}: changed while it was read") from error

    def reader(self, plan: Plan) -> Reader:
        """Open for reading what `plan` returned."""
        if not self.ordered:
            return _PlainReader(self._stamps, self._which, self._starts, plan.files, self._retry)
        return _StreamReader(self._stamps[0], self._starts, plan.files, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class _PlainReader:
    """A `Reader` of files that lie as they are in archives; each thread reads by itself.

    Args:
        stamps: the archives.
        which: number of the archive of each file of the plan.
        starts: where each file of the plan begins in it.
        files: of the plan.
        retry: calls again after faults that pass.
    """

    def __init__(
        self,
        stamps: Sequence[Stamp],
        which: Sequence[int],
        starts: Sequence[int],
        files: Sequence[Entry],
        retry: Retry,
    ) -> None:
        self._stamps = stamps
        self._which = which
        self._starts = starts
        self._files = files
        self._retry = retry
        self._local = threading.local()
        self._all: list[dict[int, io.BufferedReader]] = []

    def _stream(self, archive: int) -> io.BufferedReader:
        """Return this thread's own, which is open in place of that of another archive."""
        try:
            mine: dict[int, io.BufferedReader] = self._local.mine
        except AttributeError:
            mine = self._local.mine = {}
            self._all.append(mine)
        if archive not in mine:
            self._close(mine)
            raw = ArchiveFile(self._stamps[archive], self._retry)
            mine[archive] = io.BufferedReader(raw, BLOCK_BYTES)
        return mine[archive]

    def _close(self, streams: dict[int, io.BufferedReader]) -> None:
        for archive, stream in streams.items():
            stream.close()
            drop_pages(self._stamps[archive].path)
        streams.clear()

    def read(self, number: int) -> Iterator[bytes]:
        """Yield a file; see `Reader`."""
        size = self._files[number].size
        stream = self._stream(self._which[number])
        stream.seek(self._starts[number])
        if size <= BLOCK_BYTES:
            data = stream.read(size)
            if len(data) < size:
                raise SourceChangedError
            return iter((data,))
        return self._blocks(stream, size)

    @staticmethod
    def _blocks(stream: io.BufferedReader, size: int) -> Iterator[bytes]:
        while size:
            data = stream.read(min(size, BLOCK_BYTES))
            if not data:
                raise SourceChangedError
            yield data
            size -= len(data)

    def close(self) -> None:
        """Close all archives; no thread reads any more."""
        for streams in self._all:
            self._close(streams)


class _StreamReader:
    """A `Reader` of a compressed archive, whose files are asked for in their order."""

    def __init__(
        self, stamp: Stamp, starts: array[int], files: Sequence[Entry], retry: Retry
    ) -> None:
        self._stamp = stamp
        self._starts = starts
        self._files = files
        self._end = max((at + one.size for at, one in zip(starts, files) if one.size), default=0)
        self._retry = retry
        self._stream: Stream | None = None

    def read(self, number: int) -> Iterator[memoryview]:
        """Yield a file; see `Reader`. Going back begins anew, which takes its time."""
        at = self._starts[number]
        stop = at + self._files[number].size
        try:
            yield from self._pieces(at, stop)
        except ValueError:
            self.close()
            yield from self._pieces(at, stop)
        if stop == self._end and self._stream is not None:
            self._stream.drain()

    def _pieces(self, at: int, stop: int) -> Iterator[memoryview]:
        if self._stream is None:
            self._stream = Stream(self._stamp, self._retry)
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


def _tar_rows(path: str, data: IO[bytes], size: int) -> Iterator[Row]:
    """Yield what the headers of an archive say.

    Args:
        path: the archive, for errors.
        data: its bytes.
        size: how many there are; 0 when that is not known.

    Raises:
        StagingError: it is no tar archive, cut short or damaged.
        OSError: it cannot be read.
    """
    try:
        with tarfile.open(fileobj=data, mode="r:", tarinfo=_Info.of(path)) as tar:
            for count, info in enumerate(iter(tar.next, None)):
                if count >= MOST_MEMBERS:
                    raise StagingError(f"{shown(path)}: holds more than {MOST_MEMBERS} members")
                tar.members = []  # type: ignore[attr-defined] # they would all be kept
                row = _row(path, cast("_Info", info))
                if size and row[5] + row[4] > size:
                    raise not_whole(path, "tar", "it ends inside a member")
                yield row
            _check_end(path, data, tar.offset)
    except (tarfile.TarError, OverflowError, EOFError) as error:
        raise not_whole(path, "tar", str(error)) from error


def _check_end(path: str, data: IO[bytes], at: int) -> None:
    """Refuse an archive without an end, which tarfile does not ask for, or with more behind it."""
    data.seek(at)
    block = data.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or block.strip(b"\0"):
        what = "a damaged header" if block else "nothing"
        reason = f"no end-of-archive mark where the members end, but {what} (at byte {at})"
        raise not_whole(path, "tar", reason)
    while block := data.read(BLOCK_BYTES):
        if block.strip(b"\0"):
            raise StagingError(
                f"{shown(path)}: not a whole tar archive: something follows its "
                f"end-of-archive mark, behind byte {at}",
                hint="it has a hole, or several archives were joined: join them with tar -A",
            )


def _row(path: str, info: _Info) -> Row:
    records = info.pax_headers
    mtime_ns = int(info.mtime * _NANO) if "mtime" not in records else _nanoseconds(records["mtime"])
    size = records.get("size", "0")
    if not size.isdigit() or len(size) > _MOST_DIGITS:
        raise not_whole(path, "tar", "it holds a member with an absurd size")
    if any(key.startswith("GNU.sparse") for key in records):
        info._sparse()  # noqa: SLF001 - of our class
    kind = tarfile.REGTYPE if info.isreg() else info.type
    length = info.size if info.isreg() else 0
    return kind, info.name, info.mode & 0o7777, mtime_ns, length, info.offset_data, info.linkname


def _nanoseconds(text: str) -> int:
    """Return a time of a pax header, decimal seconds, in nanoseconds; 0 for none we know."""
    sign = -1 if text[:1] == "-" else 1  # before 1970
    whole, _, part = text[sign < 0 :].partition(".")
    if not whole.isdigit() or len(whole) > _MOST_DIGITS or (part and not part.isdigit()):
        return 0
    return sign * (int(whole) * _NANO + int(part[:9].ljust(9, "0")))


class _Info(tarfile.TarInfo):
    """A member as tarfile reads it, without what tarfile believes or keeps too readily."""

    archive = ""
    kept_bytes = 0  # of extended headers for all members that follow

    @classmethod
    def of(cls, archive: str) -> type[_Info]:
        """Return the class for one archive."""
        return type("Info", (cls,), {"archive": archive})

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _Info:
        """Read a header; that of a file by a short way, in a third of the time."""
        if len(buf) == tarfile.BLOCKSIZE and any(buf[:257]):
            name, *numbers, kind, _, prefix = _FORM.unpack(buf)
            for number in numbers:
                if not number[0] & 0x80 and number.strip(b" \0").strip(b"01234567"):
                    raise not_whole(cls.archive, "tar", "a damaged header: a number in it is none")
            mode, size, mtime, check = numbers
            if kind == tarfile.REGTYPE and not (prefix[0] or size[0] & 0x80 or mtime[0] & 0x80):
                # the low half of Adler-32 is the sum of the bytes + 1, modulo 65521
                found = zlib.adler32(buf[156:], zlib.adler32(b" " * 8, zlib.adler32(buf[:148])))
                if (_octal(check) + 1) % 65521 == found & 0xFFFF:
                    info = cls(name.partition(b"\0")[0].decode(encoding, errors))
                    info.mode, info.size, info.mtime = _octal(mode), _octal(size), _octal(mtime)
                    return info
        made = super().frombuf(buf, encoding, errors)
        made._check()  # noqa: SLF001 - its own
        return made

    def _check(self) -> None:
        if self.size < 0:
            raise not_whole(self.archive, "tar", "it holds a header with a negative size")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._sparse()
        if self.type in _EXTENSIONS:
            kind = type(self)
            kind.kept_bytes += self.size if self.type == tarfile.XGLTYPE else 0
            if self.size > _LARGEST_EXTENSION_BYTES or kind.kept_bytes > _GLOBAL_BYTES:
                raise not_whole(self.archive, "tar", "it holds a header of absurd size")
        elif self.type == b"V":  # the name of the whole
            self.type, self.name, self.mode = tarfile.DIRTYPE, ".", 0o755

    def _sparse(self, *_: object) -> NoReturn:
        raise StagingError(
            f"{shown(self.archive)}: {shown(self.name)} is a sparse member of GNU tar",
            hint="repack the archive without --sparse",
        )

    # for sparse members tarfile reads lists of any length into memory
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse


def _octal(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


def not_whole(path: str, kind: str, reason: str) -> StagingError:
    """Return the error for an archive that is cut short or damaged."""
    return StagingError(
        f"{shown(path)}: not a whole {kind} archive: {reason}",
        hint="the archive is cut short or damaged: make or copy it again",
    )
