"""How far a copy is, told at most once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["OnProgress", "Progress"]

OnProgress = Callable[[int, int, int, int], None]
"""Called with (bytes done, files done, bytes in all, files in all)."""

_PERIOD_SECONDS = 1.0


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
