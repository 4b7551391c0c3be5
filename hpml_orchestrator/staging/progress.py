"""Copy progress, reported at most once per second; and the batches of a copy for its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.staging.plan import TreeEntry

OnProgress = Callable[[int, int, int, int], None]
"""Called with (bytes done, files done, bytes in all, files in all)."""

_PERIOD_SECONDS = 1.0

FILE_COST_BYTES = 64 << 10
"""Opening and creating a file takes as long as copying so many bytes (measured, warm cache)."""

_MOST_BATCHES = 8192
_LEAST_COST_BYTES = 2 << 20
_BATCHES_PER_WORKER = 8
_FEWEST_FILES = 4
_REPORT_SECONDS = 0.2


class CopyProgress:
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
        """Set the totals."""
        self._bytes_total, self._files_total = total_bytes, total_files

    def add(self, done_bytes: int, done_files: int = 0) -> None:
        """Add to the counts (negative: the work is repeated), and report them once a second."""
        with self._lock:
            self._bytes += done_bytes
            self._files += done_files
            if self._tell is None or self._clock() < self._next:
                return
            self._next = self._clock() + _PERIOD_SECONDS
            self._call()

    def finish(self) -> None:
        """Report the final figures."""
        with self._lock:
            self._call()

    def _call(self) -> None:
        if self._tell is not None:
            self._tell(self._bytes, self._files, self._bytes_total, self._files_total)


class FileRange(NamedTuple):
    """Files `first` to before `last`."""

    first: int
    last: int


def share_out(files: Sequence[TreeEntry], workers: int, *, streams: int = 1) -> list[FileRange]:
    """Divide files into batches of like effort.

    Args:
        files: of the plan.
        workers: how many will work at most.
        streams: processes. Each works in a different part of the tree, because processes that
            create files in one directory wait for each other.
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
            found.append(FileRange(first, number + 1))
            first, cost = number + 1, 0
    if first < len(files):
        found.append(FileRange(first, len(files)))
    # Reorder with a stride: batches that are taken one after the other, and so copied at the same
    # time, then lie in different parts of the tree.
    each = -(-len(found) // streams)
    return [one for at in range(each) for one in found[at::each]]


class Tally:
    """Counts the work of one thread and reports it from time to time.

    Args:
        done: called with bytes, files, and (number, digest) of files since the last report.
    """

    def __init__(self, done: Callable[[int, int, list[tuple[int, bytes]]], None]) -> None:
        self.bytes = self.files = 0
        self.digests: list[tuple[int, bytes]] = []
        self._done = done
        self._reported = (0, 0)
        self._next = 0.0

    def report_sometimes(self) -> None:
        """Report, a few times per second at most."""
        if time.monotonic() >= self._next:
            self.report()

    def report(self) -> None:
        """Report the work since the last report; negative bytes if a file is read again."""
        then, self._reported = self._reported, (self.bytes, self.files)
        self._done(self.bytes - then[0], self.files - then[1], self.digests)
        self.digests = []
        self._next = time.monotonic() + _REPORT_SECONDS
