"""Read modes and times of a pack's files from the headers before their data.

The index tells where each header is, so that none has to be looked for: they are read one by one
where the shards answer at once, as from a cache, and otherwise by several threads, all between them
too where they are near each other.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.extents import Blocks, PerThread
from hpml_orchestrator.staging.faults import SourceChangedError
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.tarheaders import BLOCK, HeaderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.staging.extents import Stamp
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.packindex import Columns

    Found = tuple[list[int], list[int]]

__all__ = ["ShardError", "read_headers"]

_FORM = struct.Struct("100x8s16x12s12s8s")  # as `packing/ustar.py` writes it
_CHECK = struct.Struct("148s8x356s")
_BLANKS = 8 * ord(" ") - 1  # what the check sum counts for itself; Adler-32 begins with 1
_ADLER = 65521
_NANO = 1_000_000_000
_LARGEST_USTAR = 8**11 - 1
_FIRST_FILES = 64
_SLICE_FILES = 1024
_AT_ONCE_SECONDS = 25e-6  # for a header; from a cache it takes 3 us
_NEAR_BYTES = 1 << 16
_MOST_THREADS = 16
_MOST_PROCESSES = 8
_FEW_FILES = 8192  # fewer are read sooner than workers are there
_CHANGED = -(1 << 40)


class ShardError(Exception):
    """A shard is damaged; the message says where."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


def read_headers(files: Columns, archives: Sequence[Stamp], retry: Retry) -> Found:
    """Return the modes, and the times in nanoseconds, of all files.

    Raises:
        ShardError: a header is damaged.
        SourceChangedError: a shard is not what its stamp says.
        OSError: a shard cannot be read.
    """
    return _Headers(files, archives, retry).read()


class _Headers:
    def __init__(self, files: Columns, archives: Sequence[Stamp], retry: Retry) -> None:
        self._files = files
        self._archives = archives
        self._blocks = PerThread(archives, retry)
        self._retry = retry

    def read(self) -> Found:
        count = len(self._files.sizes)
        cuts = [0, *range(min(_FIRST_FILES, count), count, _SLICE_FILES), count]
        slices = list(zip(cuts, cuts[1:]))  # noqa: RUF007 - pairwise came with Python 3.10
        try:
            begin = time.perf_counter()
            found = [self._one_by_one(one) for one in slices[:1]]
            seconds = (time.perf_counter() - begin) / _FIRST_FILES
            rest = slices[1:]
            processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
            if seconds > _AT_ONCE_SECONDS:
                found += self._waiting(rest)
            elif count < _FEW_FILES or processes == 1:
                found += map(self._one_by_one, rest)
            else:
                found += self._forked(rest, processes)
        finally:
            self._blocks.close()
        return (
            [mode for modes, _ in found for mode in modes],
            [mtime for _, times in found for mtime in times],
        )

    def _waiting(self, slices: list[tuple[int, int]]) -> list[Found]:
        """Read what is slow to come, with threads."""
        near = sum(self._files.sizes) < len(self._files.sizes) * _NEAR_BYTES
        read = self._all_between if near else self._one_by_one
        crew = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="hpml-pack")
        with contextlib.suppress(RuntimeError), crew:  # the job may have no more threads
            return list(crew.map(read, slices))
        return list(map(read, slices))

    def _forked(self, slices: list[tuple[int, int]], processes: int) -> list[Found]:
        """Read what is there at once, with processes: understanding it takes the time."""
        found: dict[int, Found] = {}

        def work(_: int, take: Callable[[], int | None], tell: Callable[..., None]) -> None:
            self._blocks = PerThread(self._archives, self._retry)
            try:
                while (number := take()) is not None:
                    modes, times = self._one_by_one(slices[number])
                    tell(number, array("H", modes).tobytes(), array("q", times).tobytes())
            except SourceChangedError:
                tell(_CHANGED, b"", b"")
            except ShardError as error:
                tell(-1 - error.shard, str(error).encode(), b"")

        def told(number: int, modes: bytes, times: bytes) -> None:
            if number == _CHANGED:
                raise SourceChangedError
            if number < 0:
                raise ShardError(-1 - number, modes.decode())
            found[number] = (array("H", modes).tolist(), array("q", times).tolist())

        self._blocks.close()
        run_crew(processes, work, range(len(slices)), told=told, heartbeat=self._retry.check_stop)
        return [found[number] for number in range(len(slices))]

    def _one_by_one(self, part: tuple[int, int]) -> Found:
        return self._retry(lambda: self._headers(part, BLOCK))

    def _all_between(self, part: tuple[int, int]) -> Found:
        return self._retry(lambda: self._headers(part, BLOCK_BYTES))

    def _headers(self, part: tuple[int, int], most: int) -> Found:
        """Read the headers of files [first, last), so many bytes at a time."""
        self._retry.check_stop()
        files, blocks = self._files, self._blocks.get()
        first, last = part
        modes, times = [], []
        known: dict[bytes, int] = {}
        target = [blocks.view[:BLOCK]]
        places = zip(files.shards[first:last], files.offsets[first:last], files.sizes[first:last])
        for shard, offset, size in places:
            at = offset - BLOCK
            if most == BLOCK:
                fd = blocks.fd if shard == blocks.archive else blocks.open(shard)
                if os.preadv(fd, target, at) < BLOCK:
                    raise ShardError(shard, f"it ends in the header at byte {at}")
                begin = 0
            else:
                begin = _ready(blocks, shard, at)
            mode, length, mtime, check = _FORM.unpack_from(blocks.view, begin)
            front, back = _CHECK.unpack_from(blocks.view, begin)
            try:
                found = zlib.adler32(back, zlib.adler32(front)) & 0xFFFF
                if (int(check[:6], 8) - _BLANKS - found) % _ADLER:
                    raise HeaderError("its checksum is wrong")
                if int(length[:11], 8) != size and size <= _LARGEST_USTAR:
                    raise HeaderError("it is of another size")
                if mode not in known:
                    known[mode] = int(mode[:7], 8) & 0o777
                modes.append(known[mode])
                times.append(int(mtime[:11], 8) * _NANO)
            except (HeaderError, ValueError) as error:
                raise ShardError(shard, f"the header at byte {at}: {error}") from error
        blocks.check()
        return modes, times


def _ready(blocks: Blocks, shard: int, at: int) -> int:
    """See to it that a header is in the buffer, and return its place there."""
    if shard != blocks.archive or at < blocks.start or at + BLOCK > blocks.end:
        blocks.fill(shard, at)
        if at + BLOCK > blocks.end:
            raise ShardError(shard, f"it ends in the header at byte {at}")
    return at - blocks.start
