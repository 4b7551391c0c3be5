"""The index of a pack: every file's name, shard, place, size and digest, ready to be mapped.

One binary file, little-endian, so that opening it costs the same for ten files and for ten million:
nothing is parsed, and all readers of a node share its pages.

    0    8 bytes   magic, b"HPMLPACK"
    8   32 bytes   SHA-256 of all bytes behind it
    40   4 bytes   version, 2
    44   4 bytes   length of the header, a multiple of 8
    48             header: JSON in UTF-8, filled up with spaces
                   "files" N, "names_bytes", "tree" (digest of the metadata), "shard_bytes", and
                   "shards": [file, bytes, files, XXH3-128 of the archive], ...
                   N records of 56 bytes, in the order of the names:
                     u64 offset of the data in the archive, u64 size, u64 start of the name,
                     i64 modification time in seconds, u32 number of the archive, u8 kind, 1 byte 0,
                     u16 permissions, 16 bytes XXH3-128 (big-endian)
                   all names, one behind the other, without anything between them

Kinds: 0 file, 1 hard link, 2 symbolic link to a file of the pack; links have the place of the file
that they lead to. The order is that of `layout.place`. SHA-256, because a reader with nothing
but the standard library has to check it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from hpml_orchestrator.packing.shards import publish, write_all
from hpml_orchestrator.staging.packindex import (
    INDEX_FILE,
    INDEX_MAGIC,
    INDEX_RECORD,
    INDEX_START,
    INDEX_VERSION,
    Archive,
    Index,
    Row,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["INDEX_FILE", "KINDS", "Archive", "Index", "Row", "read_index", "write_index"]

KINDS = ("file", "hard link", "symbolic link")


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
        place = (row.offset, row.size, start, row.mtime, row.shard)
        records += INDEX_RECORD.pack(*place, row.kind, row.mode, row.digest)
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
    start_of_all = INDEX_START.pack(INDEX_VERSION, len(header))
    digest = hashlib.sha256()
    for piece in (start_of_all, header, records, names):
        digest.update(piece)
    with publish(directory, INDEX_FILE) as fd:
        for piece in (INDEX_MAGIC + digest.digest() + start_of_all, header, records, names):
            write_all(fd, piece)
    return digest.hexdigest()
