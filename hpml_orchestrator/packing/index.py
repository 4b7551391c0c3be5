"""The index of a pack: every file's name, shard, place, size and digest, ready to be mapped.

One binary file, little-endian, so that opening it costs the same for ten files and for ten million:
nothing is parsed, and all readers of a node share its pages.

    0    8 bytes   magic, b"HPMLPACK"
    8   32 bytes   SHA-256 of all bytes behind it
    40   4 bytes   version, 1
    44   4 bytes   length of the header, a multiple of 8
    48             header: JSON in UTF-8, filled up with spaces
                   "files" N, "names_bytes", "tree" (digest of the metadata), "shard_bytes", and
                   "shards": [file, bytes, files, XXH3-128 of the archive], ...
                   N records of 48 bytes, in the order of the names:
                     u64 offset of the data in the archive, u64 size, u64 start of the name,
                     u32 number of the archive, u8 kind, 3 bytes 0, 16 bytes XXH3-128 (big-endian)
                   all names, one behind the other, without anything between them

Kinds: 0 file, 1 hard link, 2 symbolic link to a file of the pack; links have the place of the file
that they lead to. The order is that of `packing/order.py`. SHA-256, because a reader with nothing
but the standard library has to check it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import NotFoundError, StagingError
from hpml_orchestrator.packing.files import publish
from hpml_orchestrator.staging.faults import shown, why

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["INDEX_FILE", "KINDS", "Archive", "Index", "Row", "read_index", "write_index"]

INDEX_FILE = "pack.index"
KINDS = ("file", "hard link", "symbolic link")
VERSION = 1

_MAGIC = b"HPMLPACK"
_START = struct.Struct("<II")
_RECORD = struct.Struct("<QQQIB3x16s")
_BODY_AT = len(_MAGIC) + hashlib.sha256().digest_size
_HEADER_AT = _BODY_AT + _START.size
_PIECE_BYTES = 1 << 20


class Row(NamedTuple):
    """One name of a pack."""

    name: bytes
    shard: int
    offset: int
    size: int
    kind: int
    digest: bytes


class Archive(NamedTuple):
    """One archive of a pack; `digest` is XXH3-128 of the whole, in hexadecimal."""

    file: str
    bytes: int
    files: int
    digest: str


@dataclass(frozen=True)
class Index:
    """What an index says."""

    directory: str
    tree: str
    shard_bytes: int
    archives: Sequence[Archive]
    count: int
    digest: str
    _body: mmap.mmap
    _records_at: int

    def rows(self) -> Iterator[Row]:
        """Yield all rows in the order of the names."""
        names_at = self._records_at + self.count * _RECORD.size
        body = self._body
        end_of_names = len(body) - names_at
        for number in range(self.count):
            at = self._records_at + number * _RECORD.size
            offset, size, start, shard, kind, digest = _RECORD.unpack_from(body, at)
            following = at + _RECORD.size + 16
            end = end_of_names
            if number + 1 < self.count:
                end = int.from_bytes(body[following : following + 8], "little")
            name = body[names_at + start : names_at + end]
            yield Row(name, shard, offset, size, kind, digest)


def write_index(
    directory: str,
    rows: Iterable[Row],
    archives: Sequence[Archive],
    *,
    tree: str,
    shard_bytes: int,
) -> str:
    """Publish the index of a pack, and return its SHA-256.

    Args:
        directory: the pack.
        rows: in the order of the names.
        archives: in the order of their numbers.
        tree: digest of the metadata of what was packed.
        shard_bytes: the size that was asked for.

    Raises:
        OSError: it cannot be written.
    """
    records, names = bytearray(), bytearray()
    count = 0
    for row in rows:
        start = len(names)
        records += _RECORD.pack(row.offset, row.size, start, row.shard, row.kind, row.digest)
        names += row.name
        count += 1
    told = {
        "files": count,
        "names_bytes": len(names),
        "tree": tree,
        "shard_bytes": shard_bytes,
        "shards": archives,
    }
    header = json.dumps(told, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start_of_all = _START.pack(VERSION, len(header))
    digest = hashlib.sha256()
    for piece in (start_of_all, header, records, names):
        digest.update(piece)
    with publish(directory, INDEX_FILE) as fd, os.fdopen(os.dup(fd), "wb") as stream:
        for piece in (_MAGIC, digest.digest(), start_of_all, header, records, names):
            stream.write(piece)
    return digest.hexdigest()


def read_index(directory: str) -> Index:
    """Open the index of a pack and check its digest.

    Raises:
        NotFoundError: there is no such pack.
        StagingError: it cannot be read, is damaged, or was written by a newer hpml.
    """
    path = os.path.join(directory, INDEX_FILE)
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < _HEADER_AT:
                raise _damaged(path, "too short")
            body = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            digest = hashlib.sha256()
            stream.seek(_BODY_AT)
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    except FileNotFoundError:
        raise NotFoundError(
            f"{shown(directory)} is no finished pack: it has no {INDEX_FILE}",
            hint="`hpml pack SOURCE DEST` makes one, with --resume it completes one",
        ) from None
    except NotADirectoryError:
        raise NotFoundError(f"{shown(directory)} is no directory") from None
    except OSError as error:
        raise StagingError(f"cannot read {shown(path)}: {why(error)}") from error
    if body[: len(_MAGIC)] != _MAGIC:
        raise _damaged(path, "it does not begin as an index does")
    if body[len(_MAGIC) : _BODY_AT] != digest.digest():
        raise _damaged(path, "its digest is not that of its contents")
    version, length = _START.unpack_from(body, _BODY_AT)
    if version != VERSION:
        raise StagingError(
            f"{shown(path)} has version {version}; this hpml reads {VERSION}",
            hint="use the newer hpml that wrote it",
        )
    told = json.loads(body[_HEADER_AT : _HEADER_AT + length])
    archives = [Archive(*one) for one in told["shards"]]
    return Index(
        directory,
        told["tree"],
        told["shard_bytes"],
        archives,
        told["files"],
        digest.hexdigest(),
        body,
        _HEADER_AT + length,
    )


def _damaged(path: str, reason: str) -> StagingError:
    return StagingError(f"{shown(path)} is damaged: {reason}", hint="pack the tree again")
