"""Headers of a POSIX tar archive: ustar, with a pax header only where a name or size needs one.

Written here because Python's tarfile takes three times as long for a header as the rest of a small
file does. IEEE Std 1003.1, `pax`, "ustar Interchange Format" and "pax Interchange Format".
"""

from __future__ import annotations

from zlib import adler32

__all__ = [
    "BLOCK_BYTES",
    "DIRECTORY",
    "END",
    "FILE",
    "HARD_LINK",
    "SYMLINK",
    "header",
    "header_bytes",
    "padding",
]

BLOCK_BYTES = 512
FILE, HARD_LINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"
END = bytes(2 * BLOCK_BYTES)
"""What an archive ends with."""

_NAME_BYTES = 100
_PREFIX_BYTES = 155
_LARGEST = 8**11 - 1
_PAX = b"x"
_PAX_NAME = b"././@PaxHeader"
_FRONT = b"%b%07o\x000000000\x000000000\0%011o\0%011o\0"  # user and group are 0
_BETWEEN = b"ustar\x0000" + bytes(64) + b"0000000\x000000000\0"  # they have no names; no devices
_SUM_OF_BLANKS = 8 * ord(" ")  # as which the field of the sum counts
_SUMMED_BYTES = 200


def header(
    name: bytes, kind: bytes = FILE, *, mode: int, mtime: int, size: int = 0, link: bytes = b""
) -> bytes:
    """Return the header of a member that belongs to user 0 and group 0, without their names.

    Args:
        name: relative path.
        kind: one of FILE, HARD_LINK, SYMLINK, DIRECTORY.
        mode: permission bits; others are left out.
        mtime: in seconds; what ustar cannot hold becomes the nearest it can.
        size: bytes of data, zero for all but files.
        link: target of a link.
    """
    records = []
    parts = _split(name)
    if parts is None:
        records.append((b"path", name))
        parts = (b"", name.rpartition(b"/")[2][:_NAME_BYTES])
    if len(link) > _NAME_BYTES:
        records.append((b"linkpath", link))
        link = link[:_NAME_BYTES]
    if size > _LARGEST:
        records.append((b"size", b"%d" % size))
        size = 0
    before = b""
    if records:
        text = b"".join(_record(key, value) for key, value in records)
        before = _block(_PAX_NAME, b"", _PAX, 0o644, 0, len(text), b"")
        before += text + bytes(padding(len(text)))
    return before + _block(parts[1], parts[0], kind, mode, mtime, size, link)


def header_bytes(name: bytes, size: int) -> int:
    """Return how long the header of a file is."""
    if len(name) <= _NAME_BYTES and size <= _LARGEST:
        return BLOCK_BYTES
    return len(header(name, mode=0, mtime=0, size=size))


def padding(size: int) -> int:
    """Return how many bytes fill the last block of so many."""
    return -size % BLOCK_BYTES


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """Return a name as ustar's prefix and name; None where it does not fit."""
    if len(name) <= _NAME_BYTES:
        return b"", name
    at = name.find(b"/", len(name) - _NAME_BYTES - 1)
    if not 0 < at <= _PREFIX_BYTES or at == len(name) - 1:
        return None
    return name[:at], name[at + 1 :]


def _record(key: bytes, value: bytes) -> bytes:
    """Return a pax record, whose length counts its own digits."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return b"%d%s" % (length, rest)


def _block(
    name: bytes, prefix: bytes, kind: bytes, mode: int, mtime: int, size: int, link: bytes
) -> bytes:
    time = min(max(mtime, 0), _LARGEST)
    front = _FRONT % (name.ljust(_NAME_BYTES, b"\0"), mode & 0o777, size, time)
    link, prefix = link.ljust(_NAME_BYTES, b"\0"), prefix.ljust(_PREFIX_BYTES + 12, b"\0")
    back = b"%b%b%b%b" % (kind, link, _BETWEEN, prefix)
    total = _sum(front) + _SUM_OF_BLANKS + _sum(back[:_SUMMED_BYTES]) + _sum(back[_SUMMED_BYTES:])
    return b"%b%06o\0 %b" % (front, total, back)


def _sum(data: bytes) -> int:
    """Return the sum of up to 256 bytes: one half of Adler-32 is that, and quick, plus one."""
    return (adler32(data) & 0xFFFF) - 1
