"""Not more than so many calls per second."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pace"]

_NAP_SECONDS = 0.2


class Pace:
    """Lets calls through at a rate; safe from several threads.

    Args:
        rate: calls per second.
        check_stop: called while waiting; may raise.
    """

    def __init__(self, rate: float, check_stop: Callable[[], None]) -> None:
        self._period_seconds = 1.0 / rate
        self._check_stop = check_stop
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def take(self) -> None:
        """Wait for the next turn."""
        with self._lock:
            now = time.monotonic()
            due = max(self._due, now - _NAP_SECONDS)
            self._due = due + self._period_seconds
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
            self._check_stop()
