"""Check every digest of a pack, and name what is damaged."""

from __future__ import annotations

import os
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from hpml_orchestrator.packing.index import read_index
from hpml_orchestrator.packing.workers import default_workers, in_parallel
from hpml_orchestrator.staging.faults import shown, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.packing.index import Index, Row
    from hpml_orchestrator.packing.workers import Tell

__all__ = ["Damage", "Verified", "verify"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Damage:
    """Something of a pack that is not as it was; `name` is empty where no file is concerned."""

    shard: str
    name: str
    reason: str


@dataclass(frozen=True)
class Verified:
    """What was checked, and what is damaged."""

    shards: int
    files: int
    bytes: int
    seconds: float
    damaged: tuple[Damage, ...]


def verify(
    directory: str,
    *,
    workers: int = 0,
    on_verify: Callable[[int, int, int, int], None] = lambda *_: None,
) -> Verified:
    """Read all archives of a pack and compare each file's digest and each archive's.

    Args:
        directory: the pack.
        workers: processes; 0: one for each CPU that this process may use.
        on_verify: is told (bytes done, files done, bytes in all, files in all).

    Raises:
        NotFoundError: it is no finished pack.
        StagingError: its index is damaged.
    """
    begin = time.monotonic()
    index = read_index(directory)
    rows: list[list[Row]] = [[] for _ in index.archives]
    for row in index.rows():
        if row.kind == 0:
            rows[row.shard].append(row)
    total = (sum(one.bytes for one in index.archives), sum(len(some) for some in rows))
    done = [0, 0]

    def progress(more_bytes: int, more_files: int) -> None:
        done[0] += more_bytes
        done[1] += more_files
        on_verify(done[0], done[1], *total)

    def work(number: int, tell: Tell) -> list[tuple[str, ...]]:
        return [astuple(one) for one in _Reader(index, number, tell).check(rows[number])]

    damaged: list[Damage] = []

    def found(*some: Iterable[str]) -> None:
        damaged.extend(Damage(*one) for one in some)

    in_parallel(
        range(len(index.archives)),
        work,
        workers=workers or default_workers(),
        progress=progress,
        done=found,
    )
    damaged.sort(key=lambda one: (one.shard, one.name))
    seconds = time.monotonic() - begin
    return Verified(len(index.archives), total[1], total[0], seconds, tuple(damaged))


class _Reader:
    """Reads an archive once, for the digests of its files and its own."""

    def __init__(self, index: Index, number: int, tell: Tell) -> None:
        self._archive = index.archives[number]
        self._path = os.path.join(index.directory, self._archive.file)
        self._whole = xxh3_128()
        self._tell = tell
        self._buffer = memoryview(b"")
        self._fd = -1

    def check(self, rows: list[Row]) -> list[Damage]:
        """Return what is damaged."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return [self._damage("", why(error))]
        try:
            return self._check(sorted(rows, key=lambda row: row.offset))
        except OSError as error:
            return [self._damage("", why(error))]
        finally:
            os.close(self._fd)

    def _check(self, rows: list[Row]) -> list[Damage]:
        archive = self._archive
        found: list[Damage] = []
        size = os.fstat(self._fd).st_size
        if size != archive.bytes:
            found.append(self._damage("", f"has {size} bytes, not {archive.bytes}"))
        at = 0
        for row in rows:
            self._feed(row.offset - at)
            if self._feed(row.size, files=1) != row.digest:
                found.append(self._damage(shown(os.fsdecode(row.name)), "is not what was packed"))
            at = row.offset + row.size
        self._feed(archive.bytes - at)
        if not found and self._whole.hexdigest() != archive.digest:
            found.append(self._damage("", "a header, or what fills up a block, is damaged"))
        return found

    def _feed(self, count: int, files: int = 0) -> bytes:
        """Read so many bytes and return their digest; the file's end is told by another digest."""
        digest = xxh3_128()
        left = count
        while left:
            if not self._buffer:
                self._buffer = memoryview(os.read(self._fd, _CHUNK_BYTES))
                if not self._buffer:
                    digest.update(b"cut short")
                    break
                self._whole.update(self._buffer)
                self._tell.add(len(self._buffer), 0)
            piece = self._buffer[:left]
            digest.update(piece)
            self._buffer = self._buffer[len(piece) :]
            left -= len(piece)
        self._tell.add(0, files)
        return digest.digest()

    def _damage(self, name: str, reason: str) -> Damage:
        return Damage(self._archive.file, name, reason)
