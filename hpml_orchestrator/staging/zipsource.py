"""A zip archive as a source: planned by Python's zipfile, unpacked by several workers at once."""

from __future__ import annotations

import stat
import struct
import time
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.extents import PerThread, look_at_archive
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.members import Members
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.staging.extents import Stamp
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader

__all__ = ["ZipReader", "ZipSource", "check_end"]

_LOCAL_BYTES = 30
"""Of the header before a member's data, without name and extra field (APPNOTE.TXT 6.3.10)."""

_COUNTS = {b"PK\x05\x06": ("<H", 10), b"PK\x06\x06": ("<Q", 32)}
"""What follows the directory, short or long, and where in it the number of members is."""

_CENTRAL_BYTES = 46  # of an entry of the directory, likewise
_LONGEST_LINK_BYTES = 4096
_PIECE_BYTES = 1 << 16  # of compressed data: what comes of it is at most BLOCK_BYTES at a time
_UNIX_HOSTS = frozenset({3, 19})  # 19: macOS
_ENCRYPTED, _UTF8, _DOS_DIRECTORY = 0x1, 0x800, 0x10
_EXTRA_TIME = 0x5455  # Info-ZIP, extrafld.txt: a byte of flags, then seconds since the epoch, UTC
_TIME = struct.Struct("<l")
_LARGEST_RATIO = 1040
"""Deflate makes at most 1032 bytes of one: zlib's "Technical Details"."""


class _Member(NamedTuple):
    """Where a file's data are, and what becomes of them."""

    name: str
    size: int
    packed: int
    offset: int
    deflated: bool
    crc: int


def check_end(path: str) -> None:
    """Refuse what does not end as an archive does; its directory is not looked at.

    Raises:
        StagingError: it is no zip archive, or cut short.
    """
    if not zipfile.is_zipfile(path):
        raise _not_whole(path, "it has no end of a central directory")


class ZipSource:
    """A zip archive.

    Args:
        path: the archive.
        retry: calls again after faults that pass.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """

    kind = "zip"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links
        self._members: list[_Member] = []
        self._stamp, _ = look_at_archive(path, retry)

    def plan(self) -> Plan:
        """Read the central directory; see `Source.plan`."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                found, end = archive.infolist(), archive.start_dir
                self._check_count(archive)
        except (zipfile.BadZipFile, struct.error, ValueError) as error:  # names, times
            raise _not_whole(self._path, str(error)) from error
        members = Members(self._path, self._stamp.mtime_ns, outside_links=self._outside_links)
        members.check_count(len(found))
        members.plan.whole = True
        self._members = []
        reader = ZipReader(self._stamp, [], self._retry)
        try:
            last = end
            for info in sorted(found, key=lambda one: -one.header_offset):
                # Members that share bytes would let a small archive unpack to any size.
                if info.header_offset + _LOCAL_BYTES + info.compress_size > last:
                    name = shown(info.filename)
                    raise _not_whole(self._path, f"{name} lies in another member, or in none")
                last = info.header_offset
            for info in sorted(found, key=lambda one: one.header_offset):
                self._retry.check_stop()
                self._take(info, members, reader)
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        finally:
            reader.close()
        members.problems.raise_any()
        members.check_bytes(self._stamp.size)
        return members.plan

    def _check_count(self, archive: zipfile.ZipFile) -> None:
        """Refuse a directory that has lost members: zipfile reads what is there."""
        found, at = archive.infolist(), archive.start_dir
        for info in found:
            encoding = "utf-8" if info.flag_bits & _UTF8 else "cp437"
            name = info.orig_filename.encode(encoding)
            at += _CENTRAL_BYTES + len(name) + len(info.extra) + len(info.comment)
        assert archive.fp is not None  # noqa: S101 - it is open
        archive.fp.seek(at)
        tail = archive.fp.read(_CENTRAL_BYTES)
        layout, offset = _COUNTS.get(tail[:4], ("", 0))
        if not layout or struct.unpack_from(layout, tail, offset)[0] != len(found):
            raise zipfile.BadZipFile("its central directory is damaged")

    def _take(self, info: zipfile.ZipInfo, members: Members, reader: ZipReader) -> None:
        """Add a member to the plan."""
        on_unix = info.create_system in _UNIX_HOSTS
        name = info.orig_filename
        if on_unix and not info.flag_bits & _UTF8:  # zipfile takes these bytes for cp437
            name = name.encode("cp437").decode("utf-8", "surrogateescape")
        mode = info.external_attr >> 16 if on_unix else 0
        kind = stat.S_IFMT(mode)
        is_directory = name.endswith("/") or kind == stat.S_IFDIR
        is_directory |= not on_unix and bool(info.external_attr & _DOS_DIRECTORY)
        mode = mode or (0o755 if is_directory else 0o644)  # 0 with a type is what somebody chose
        mtime_ns = _mtime(info) * 1_000_000_000
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        size, packed = info.file_size, info.compress_size
        member = _Member(name, size, packed, info.header_offset, deflated, info.CRC)
        if info.flag_bits & _ENCRYPTED:
            members.refuse(name, "is encrypted")
        elif not deflated and info.compress_type != zipfile.ZIP_STORED:
            method = f"is compressed by method {info.compress_type}"
            members.refuse(name, f"{method}; only stored and deflated ones are read")
        elif size > _LARGEST_RATIO * (packed + 1) or (not deflated and size != packed):
            members.refuse(name, f"says that {packed} bytes become {size}, which cannot be")
        elif is_directory:
            members.directory(name, mode & 0o7777, mtime_ns)
        elif kind == stat.S_IFLNK:
            if size > _LONGEST_LINK_BYTES:
                members.refuse(name, "symbolic link of absurd length")
            else:
                target = b"".join(map(bytes, reader.contents(member)))
                members.symlink(name, target.decode("utf-8", "surrogateescape"), mtime_ns)
        elif kind not in {0, stat.S_IFREG}:
            members.refuse(name)
        elif members.file(name, mode & 0o7777, mtime_ns, size):
            self._members.append(member)

    def reader(self, plan: Plan) -> Reader:  # noqa: ARG002 - the members are known since `plan`
        """Open for reading what `plan` returned."""
        return ZipReader(self._stamp, self._members, self._retry)

    def close(self) -> None:
        """Nothing is held."""


class ZipReader:
    """A `Reader` of a zip archive, whose checksums cover whole members: no part can be had."""

    def __init__(self, stamp: Stamp, members: Sequence[_Member], retry: Retry) -> None:
        self._stamp = stamp
        self._members = members
        self._blocks = PerThread([stamp], retry)

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:  # noqa: ARG002
        """Yield a file, whole; see `Reader`."""
        return self.contents(self._members[number])

    def contents(self, member: _Member) -> Iterator[Buffer]:
        """Yield a member's contents.

        Raises:
            StagingError: it is damaged.
        """
        crc = size = 0
        for piece in self._inflated(member) if member.deflated else self._stored(member):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
            if size > member.size:
                break
            yield piece
        if size != member.size or crc != member.crc:
            raise self._damaged(member, "is damaged: its checksum is wrong")

    def _stored(self, member: _Member) -> Iterator[memoryview]:
        blocks = self._blocks.get()
        head = blocks.exactly(0, member.offset, _LOCAL_BYTES)
        if head[:4] != b"PK\x03\x04":
            raise self._damaged(member, "is damaged: it has no header")
        start = member.offset + _LOCAL_BYTES + sum(struct.unpack_from("<2H", head, 26))
        if start + member.packed > self._stamp.size:
            raise self._damaged(member, "is damaged: its header is wrong")
        return blocks.pieces(0, start, start + member.packed)

    def _inflated(self, member: _Member) -> Iterator[bytes]:
        inflate = zlib.decompressobj(-15)
        try:
            for block in self._stored(member):
                for at in range(0, len(block), _PIECE_BYTES):
                    rest: Buffer = block[at : at + _PIECE_BYTES]
                    while rest and (piece := inflate.decompress(rest, BLOCK_BYTES)):
                        yield piece
                        rest = inflate.unconsumed_tail
            if piece := inflate.flush():
                yield piece
        except zlib.error as error:
            raise self._damaged(member, f"is damaged: {error}") from error

    def _damaged(self, member: _Member, reason: str) -> StagingError:
        return StagingError(
            f"{shown(self._stamp.path)}: {shown(member.name)} {reason}",
            hint="make or copy the archive again; `unzip -t` tells all that is damaged",
        )

    def close(self) -> None:
        """Close the archive."""
        self._blocks.close()


def _not_whole(path: str, reason: str) -> StagingError:
    return StagingError(
        f"{shown(path)}: not a whole zip archive: {reason}",
        hint="the archive is cut short or damaged: make or copy it again",
    )


def _mtime(info: zipfile.ZipInfo) -> int:
    """Return a time in seconds: Info-ZIP's, which is UTC, or that of DOS, which is local."""
    extra, at = info.extra, 0
    while at + 4 <= len(extra):
        key, length = struct.unpack_from("<2H", extra, at)
        told = extra[at + 4 : at + 4 + length]
        if key == _EXTRA_TIME and len(told) > _TIME.size and told[0] & 1:
            return int(_TIME.unpack_from(told, 1)[0])
        at += 4 + length
    try:
        return int(time.mktime((*info.date_time, 0, 0, -1)))
    except (OverflowError, ValueError):
        return 0
