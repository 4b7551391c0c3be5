"""Read the central directory of a zip archive.

Python's zipfile is not used: it makes an object of many fields of every member, and forgives
archives whose members lie in one another. PKWARE, APPNOTE.TXT 6.3.10; Info-ZIP, extrafld.txt.
"""

from __future__ import annotations

import stat
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "DEFLATED",
    "LOCAL_BYTES",
    "LOCAL_MAGIC",
    "STORED",
    "Member",
    "check_end",
    "read_directory",
]

STORED, DEFLATED = 0, 8
LOCAL_MAGIC = b"PK\x03\x04"
LOCAL_BYTES = 30
"""Of the header before a member's data, without name and extra field."""

_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_MAGIC = b"PK\x01\x02"
_WIDE = struct.Struct("<Q")
_SECONDS = struct.Struct("<xl")  # behind a byte that tells which times are there
_LONGEST_COMMENT = 0xFFFF
_UNSET_16, _UNSET_32 = 0xFFFF, 0xFFFFFFFF
_UNIX_HOSTS = frozenset({3, 19})  # 19: macOS
_ENCRYPTED, _UTF8 = 0x1, 0x800
_EXTRA_ZIP64, _EXTRA_TIME, _EXTRA_UNICODE_NAME = 0x0001, 0x5455, 0x7075
_DOS_DIRECTORY = 0x10
_MOST_DIRECTORY_BYTES = 2 << 30
_LARGEST_RATIO = 1040
"""Deflate makes at most 1032 bytes of one: zlib's "Technical Details"."""


class Member(NamedTuple):
    """One member; `offset` is that of its local header, `fault` why it is refused."""

    name: str
    mode: int
    mtime_ns: int
    size: int
    packed: int
    offset: int
    method: int
    crc: int
    is_dir: bool
    fault: str


def read_directory(path: str, size: int, read: Callable[[int, int], bytes]) -> list[Member]:
    """Return all members of an archive.

    Args:
        path: the archive, for errors.
        size: its length.
        read: returns so many bytes at an offset.

    Raises:
        StagingError: it is no zip archive, is damaged, or its members lie in one another.
    """
    return _Directory(path, size, read).members()


def check_end(path: str, size: int, read: Callable[[int, int], bytes]) -> None:
    """Refuse what does not end as an archive does; its directory is not looked at.

    Raises:
        StagingError: it is no zip archive, or cut short.
    """
    _Directory(path, size, read).place()


class _Directory:
    def __init__(self, path: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self._path = path
        self._size = size
        self._read = read

    def members(self) -> list[Member]:
        start, length, count = self.place()
        if length > _MOST_DIRECTORY_BYTES:
            raise self._damaged("its directory is absurdly large")
        data = self._read(start, length)
        found = list(self._entries(data))
        if len(found) != count:
            raise self._damaged(f"its directory holds {len(found)} members, not {count}")
        self._check_apart(found, start)
        return found

    def place(self) -> tuple[int, int, int]:
        """Return where the central directory begins, its length and its number of entries."""
        begin = max(0, self._size - _END.size - _LONGEST_COMMENT)
        tail = self._read(begin, self._size - begin)
        at = tail.rfind(_END_MAGIC)
        while at >= 0:
            end = tail[at : at + _END.size]
            if len(end) == _END.size and at + _END.size + _END.unpack(end)[7] == len(tail):
                break
            at = tail.rfind(_END_MAGIC, 0, at)
        else:
            raise self._damaged("it has no end of a central directory")
        _, disk, first_disk, here, count, length, start, _ = _END.unpack(end)
        end_at = begin + at
        # who writes into a pipe tells in 64 bits what would fit into 32 as well
        if _UNSET_16 in {disk, count} or _UNSET_32 in {length, start} or start + length != end_at:
            long = self._place64(end_at)
            if long is not None:
                return long
        if disk or first_disk or here != count:
            raise self._damaged("it is one of several volumes: join them first")
        if start + length != end_at:
            raise self._damaged("its central directory is not where it should be")
        return start, length, count

    def _place64(self, end_at: int) -> tuple[int, int, int] | None:
        if end_at < _LOCATOR.size:
            return None
        magic, _, at, disks = _LOCATOR.unpack(self._read(end_at - _LOCATOR.size, _LOCATOR.size))
        if magic != _LOCATOR_MAGIC:
            return None
        if at + _END64.size > end_at or disks > 1:
            raise self._damaged("its zip64 end is not where it should be")
        found = _END64.unpack(self._read(at, _END64.size))
        magic, _, _, _, disk, first_disk, here, count, length, start = found
        if magic != _END64_MAGIC or disk or first_disk or here != count or start + length != at:
            raise self._damaged("its zip64 end is wrong")
        return start, length, count

    def _entries(self, data: bytes) -> Iterator[Member]:
        at = 0
        while at < len(data):
            if len(data) - at < _ENTRY.size or data[at : at + 4] != _ENTRY_MAGIC:
                raise self._damaged("its central directory is damaged")
            fields = _ENTRY.unpack_from(data, at)
            name_at = at + _ENTRY.size
            extra_at = name_at + fields[10]
            at = extra_at + fields[11] + fields[12]
            if at > len(data):
                raise self._damaged("its central directory is cut short")
            yield self._member(
                fields, data[name_at:extra_at], data[extra_at : extra_at + fields[11]]
            )

    def _member(self, fields: tuple[int, ...], raw: bytes, extra: bytes) -> Member:
        made, _, flags, method, dos_time, dos_date, crc, packed, size = fields[1:10]
        disk, _, attributes, offset = fields[13:17]
        extras = dict(_extras(extra)) if extra else {}
        wide = extras.get(_EXTRA_ZIP64, b"")
        values = [size, packed, offset]
        for number, value in enumerate(values):
            if value == _UNSET_32:
                if len(wide) < _WIDE.size:
                    raise self._damaged("a member lacks its zip64 field")
                values[number] = _WIDE.unpack_from(wide)[0]
                wide = wide[_WIDE.size :]
        size, packed, offset = values
        on_unix = made >> 8 in _UNIX_HOSTS
        name = _name(raw, flags, extras, on_unix=on_unix)
        mode = attributes >> 16 if on_unix else 0
        is_dir = name.endswith("/") or bool(stat.S_ISDIR(mode))
        if not is_dir and not on_unix and attributes & _DOS_DIRECTORY:
            is_dir = True
        fault = ""
        if flags & _ENCRYPTED:
            fault = "is encrypted"
        elif disk not in {0, _UNSET_16}:
            fault = "lies on another volume"
        elif method not in {STORED, DEFLATED}:
            fault = f"is compressed by method {method}; only stored and deflated ones are read"
        elif (method == STORED and size != packed) or size > _LARGEST_RATIO * (packed + 1):
            fault = f"says that {packed} bytes become {size}, which cannot be"
        if not mode & 0xFFFF:  # 0 with a type is what somebody chose
            mode |= 0o755 if is_dir else 0o644
        mtime_ns = _time(extras.get(_EXTRA_TIME, b""), dos_date, dos_time)
        return Member(name, mode, mtime_ns, size, packed, offset, method, crc, is_dir, fault)

    def _check_apart(self, members: list[Member], end: int) -> None:
        """Refuse members that share bytes: so a small archive could unpack to any size."""
        last = end
        for member in sorted(members, key=lambda one: -one.offset):
            if member.offset + LOCAL_BYTES + member.packed > last:
                raise self._damaged(f"{shown(member.name)} lies in another member, or in none")
            last = member.offset

    def _damaged(self, reason: str) -> StagingError:
        return StagingError(
            f"{shown(self._path)}: not a whole zip archive: {reason}",
            hint="the archive is cut short or damaged: make or copy it again",
        )


def _extras(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of an extra field; what is left over at its end is ignored, as unzip does."""
    at = 0
    while at + 4 <= len(data):
        key = int.from_bytes(data[at : at + 2], "little")
        length = int.from_bytes(data[at + 2 : at + 4], "little")
        yield key, data[at + 4 : at + 4 + length]
        at += 4 + length


def _name(raw: bytes, flags: int, extras: dict[int, bytes], *, on_unix: bool) -> str:
    if flags & _UTF8 or on_unix:
        return raw.decode("utf-8", "surrogateescape")
    told = extras.get(_EXTRA_UNICODE_NAME, b"")
    if told[:1] == b"\x01":  # behind version and CRC of the other name
        return told[5:].decode("utf-8", "surrogateescape")
    return raw.decode("cp437")


def _time(extra: bytes, date: int, clock: int) -> int:
    """Return a time in nanoseconds: Info-ZIP's, which is UTC, or that of DOS, which is local."""
    seconds = 0
    if len(extra) >= _SECONDS.size and extra[0] & 1:
        seconds = _SECONDS.unpack_from(extra)[0]
    else:
        fields = (1980 + (date >> 9), date >> 5 & 15, date & 31)
        hours = (clock >> 11, clock >> 5 & 63, (clock & 31) * 2)
        try:
            seconds = int(time.mktime((*fields, *hours, 0, 0, -1)))
        except (OverflowError, ValueError):
            seconds = 0
    return seconds * 1_000_000_000
