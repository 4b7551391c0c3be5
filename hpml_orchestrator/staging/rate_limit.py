"""Limits of the load on the shared file system: opens per second, and delays of array tasks.

Metadata servers are shared by all jobs of a cluster; one job that opens a million files as fast as
it can makes everybody's `ls` wait.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS_PER_TASK = 0.5
"""What each task of an array adds to the time that their starts are spread over."""

_NAP_SECONDS = 0.2
_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2


class TokenBucket:
    """Limits calls to a rate; safe from several threads of one process.

    It is the generic cell rate algorithm (ITU-T I.371): one number, the time at which the next
    call would be on schedule. Forked workers have a bucket each, with their share of the rate.

    Args:
        rate: calls per second; 0 lets everything through at once.
        check_stop: called while waiting, several times a second; may raise to end the wait.
        clock: seconds that never go back.
        sleep: how to wait.
    """

    def __init__(
        self,
        rate: float,
        *,
        check_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = max(0.0, rate)
        self._check_stop = check_stop
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = clock()

    def take(self, count: float = 1) -> None:
        """Wait until `count` more calls are on schedule; a pause saves up 0.2 s worth of calls."""
        if not self.rate or count <= 0:
            return
        with self._lock:
            now = self._clock()
            due = max(self._due, now - _NAP_SECONDS)
            self._due = due + count / self.rate
        # Wait without the lock: other threads reserve their turns meanwhile, and each sees a stop.
        while (left := due - self._clock()) > 0:
            self._sleep(min(left, _NAP_SECONDS))
            self._check_stop()


def open_rate(per_node: float, per_job: float, nodes: int) -> float:
    """Return how many files per second one node may open; 0 for no limit.

    Args:
        per_node: the site's limit for one node, opens/s; 0 for none.
        per_job: the site's limit for a whole job, opens/s; 0 for none.
        nodes: how many nodes of the job read the source at once.

    >>> open_rate(2000, 6000, 4), open_rate(2000, 0, 4), open_rate(0, 6000, 4)
    (1500.0, 2000.0, 1500.0)
    """
    shares = [float(per_node), per_job / max(1, nodes)]
    return min((share for share in shares if share > 0), default=0.0)


def array_delay(most: float, tasks: int, index: int, salt: str = "") -> float:
    """Return how long a task of an array waits before it reads, in seconds.

    Tasks of an array start at the same moment. Multiples of the golden ratio spread their delays
    over the window min(most, tasks * SECONDS_PER_TASK) without large gaps, however many tasks
    there are. The delay of a task is always the same.

    Args:
        most: the site's longest delay, seconds; 0 for none.
        tasks: how many tasks the array has; a single job, 1 or 0, never waits.
        index: the task's index.
        salt: such as the array's id: other arrays wait other times.
    """
    if tasks <= 1 or most <= 0:
        return 0.0
    window = min(float(most), tasks * SECONDS_PER_TASK)
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    offset = int.from_bytes(digest, "big") / 2**64
    return window * ((offset + index * _GOLDEN) % 1.0)
