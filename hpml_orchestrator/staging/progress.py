"""Copy progress, reported at most once per second; and how a copy is shared out between workers.

Workers leave what they have done in memory that all of them share.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.staging.hashing import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.staging.plan import Entry

__all__ = [
    "FILE_COST_BYTES",
    "Batch",
    "OnProgress",
    "Progress",
    "Shared",
    "Tally",
    "share_out",
]

OnProgress = Callable[[int, int, int, int], None]
"""Called with (bytes done, files done, bytes in all, files in all)."""

_PERIOD_SECONDS = 1.0

FILE_COST_BYTES = 64 << 10
"""Opening and creating a file takes as long as copying so many bytes (measured, warm cache)."""

_MOST_BATCHES = 8192
_LEAST_COST_BYTES = 2 << 20
_BATCHES_PER_WORKER = 8
_FEWEST_FILES = 4
_TALLY = struct.Struct("=qq")


class Progress:
    """Counts bytes and files of one copy; safe from several threads."""

    def __init__(
        self,
        tell: OnProgress | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock() + _PERIOD_SECONDS
        self._bytes = self._files = 0
        self._bytes_total = self._files_total = 0

    def expect(self, total_bytes: int, total_files: int) -> None:
        """Set what there is to do."""
        self._bytes_total, self._files_total = total_bytes, total_files

    def add(self, done_bytes: int, done_files: int = 0) -> None:
        """Count what was done (or undone: negative) and tell when a second has passed."""
        with self._lock:
            self._bytes += done_bytes
            self._files += done_files
            if self._tell is None or self._clock() < self._next:
                return
            self._next = self._clock() + _PERIOD_SECONDS
            self._call()

    def finish(self) -> None:
        """Tell the final figures."""
        with self._lock:
            self._call()

    def _call(self) -> None:
        if self._tell is not None:
            self._tell(self._bytes, self._files, self._bytes_total, self._files_total)


class Batch(NamedTuple):
    """Files `first` to before `last`."""

    first: int
    last: int


def share_out(files: Sequence[Entry], workers: int, *, streams: int = 1) -> list[Batch]:
    """Divide files into batches of like effort.

    Args:
        files: what is to be copied.
        workers: how many will work at most.
        streams: processes, which are kept in different parts of the tree: creating files in one
            directory makes them wait for each other.
    """
    total = sum(entry.size for entry in files) + len(files) * FILE_COST_BYTES
    most = max(_LEAST_COST_BYTES, total // _MOST_BATCHES)
    most = min(most, total // (max(1, workers) * _BATCHES_PER_WORKER))
    most = max(most, _FEWEST_FILES * FILE_COST_BYTES, total // _MOST_BATCHES)
    found = []
    first = cost = 0
    for number, entry in enumerate(files):
        cost += entry.size + FILE_COST_BYTES
        if cost >= most:
            found.append(Batch(first, number + 1))
            first, cost = number + 1, 0
    if first < len(files):
        found.append(Batch(first, len(files)))
    each = -(-len(found) // streams)
    return [one for at in range(each) for one in found[at::each]]


class Shared:
    """Memory that all workers share: whether all is lost, how far they are, the digests."""

    def __init__(self, files: int, threads: int) -> None:
        self._files = files
        self._tallies = range(_TALLY.size, _TALLY.size * (threads + 1), _TALLY.size)
        self._digests = _TALLY.size * (threads + 1)
        self.memory = mmap.mmap(-1, self._digests + files * DIGEST_BYTES)

    @property
    def faulty(self) -> bool:
        """Something is wrong with the source: nothing more is copied, only looked at."""
        return self.memory[0] != 0

    def set_faulty(self) -> None:
        """Let all workers know that nothing will be published."""
        self.memory[0] = 1

    def put(self, number: int, digest: bytes) -> None:
        """Keep the digest of a file."""
        at = self._digests + number * DIGEST_BYTES
        self.memory[at : at + DIGEST_BYTES] = digest

    def digests(self) -> list[bytes]:
        """Return those of all files."""
        data = self.memory[self._digests :]
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)][
            : self._files
        ]

    def tally(self, thread: int, progress: Progress | None) -> Tally:
        """Return what counts for one thread; the progress is told at once, else by `done`."""
        return Tally(self.memory, self._tallies[thread], progress)

    def done(self) -> tuple[int, int]:
        """Return the bytes and files of all threads."""
        each = [_TALLY.unpack_from(self.memory, at) for at in self._tallies]
        return sum(one[0] for one in each), sum(one[1] for one in each)

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()


class Tally:
    """The bytes and files that one thread did; others see them after `tell`."""

    __slots__ = ("_at", "_memory", "_progress", "_told", "bytes", "files")

    def __init__(self, memory: mmap.mmap, at: int, progress: Progress | None) -> None:
        self.bytes = self.files = 0
        self._memory = memory
        self._at = at
        self._progress = progress
        self._told = (0, 0)

    def tell(self) -> None:
        """Let the figures be seen."""
        _TALLY.pack_into(self._memory, self._at, self.bytes, self.files)
        if self._progress is not None:
            then, self._told = self._told, (self.bytes, self.files)
            self._progress.add(self.bytes - then[0], self.files - then[1])
