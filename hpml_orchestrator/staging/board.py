"""Memory that the workers of a copy share: whether all is lost, how far they are, the digests."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.hashing import DIGEST_BYTES

if TYPE_CHECKING:
    from hpml_orchestrator.staging.progress import Progress

__all__ = ["Board", "Done", "Tally"]

_TALLY = struct.Struct("=qq")
_TALLIES_AT = 64
_TOLD_TOGETHER = 15
_FAULTY = 0


class Done:
    """What was done: bytes and files."""

    __slots__ = ("bytes", "files")

    def __init__(self) -> None:
        self.bytes = self.files = 0


class Board:
    """One mapping of anonymous memory, made before the workers are forked.

    Args:
        slots: digests at most.
        tallies: at most.
    """

    def __init__(self, slots: int, tallies: int = 1) -> None:
        self._tallies = tallies
        self._digests = _TALLIES_AT + tallies * _TALLY.size
        self._memory = mmap.mmap(-1, self._digests + slots * DIGEST_BYTES)

    @property
    def faulty(self) -> bool:
        """Something is wrong with the source: nothing more is copied, only looked at."""
        return self._memory[_FAULTY] != 0

    def set_faulty(self) -> None:
        """Let all workers know that nothing will be published."""
        self._memory[_FAULTY] = 1

    def put(self, slot: int, digest: bytes) -> None:
        """Keep a digest."""
        at = self._digests + slot * DIGEST_BYTES
        self._memory[at : at + DIGEST_BYTES] = digest

    def digest(self, slot: int) -> bytes:
        """Return a digest that was put."""
        at = self._digests + slot * DIGEST_BYTES
        return self._memory[at : at + DIGEST_BYTES]

    def tally(self, number: int, progress: Progress | None = None) -> Tally:
        """Return the tally of one thread; the progress is told at once, else by `done`."""
        return Tally(self._memory, _TALLIES_AT + number * _TALLY.size, progress)

    def done(self) -> Done:
        """Return the sum over all tallies."""
        total = Done()
        for number in range(self._tallies):
            at = _TALLIES_AT + number * _TALLY.size
            some_bytes, files = _TALLY.unpack_from(self._memory, at)
            total.bytes += some_bytes
            total.files += files
        return total

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Tally(Done):
    """What one thread did; others see it after `tell`."""

    __slots__ = ("_at", "_memory", "_progress", "_told")

    def __init__(self, memory: mmap.mmap, at: int, progress: Progress | None) -> None:
        super().__init__()
        self._memory = memory
        self._at = at
        self._progress = progress
        self._told = (0, 0)

    def tell_often(self) -> None:
        """Let the figures be seen, but not for every small file of a worker."""
        if self._progress is not None or self.files & _TOLD_TOGETHER == 0:
            self.tell()

    def tell(self) -> None:
        """Let the figures be seen."""
        _TALLY.pack_into(self._memory, self._at, self.bytes, self.files)
        if self._progress is not None:
            then = self._told
            self._told = (self.bytes, self.files)
            self._progress.add(self.bytes - then[0], self.files - then[1])
