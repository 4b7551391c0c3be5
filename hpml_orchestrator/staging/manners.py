"""Manners towards the shared file system: how fast it is asked, when, and what is kept of it.

Metadata servers are shared by all jobs of a cluster; one job that opens a million files as fast as
it can makes everybody's `ls` wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["TokenBucket", "array_delay", "drops_cache", "is_shared_type", "open_rate"]

SECONDS_PER_TASK = 0.5
"""What each task of an array adds to the time that their starts are spread over."""

_BURST_SECONDS = 0.1
_NAP_SECONDS = 0.2
_STATE = struct.Struct("d")
_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2
_SHARED_TYPES = frozenset(
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 "
    "smbfs virtiofs vast wekafs".split()
)
_CACHE_SHARE = 0.25


class TokenBucket:
    """Lets through so many calls per second, over all threads and forked processes together.

    It is the generic cell rate algorithm (ITU-T I.371): one number, the time at which the next
    call would be on schedule, kept in a nameless file in memory that forked workers share. The
    lock on it is the kernel's and ends with its holder.

    Args:
        rate: calls per second; 0 lets everything through at once.
        burst: calls that may come at once after a pause; a tenth of a second's when left out.
        should_stop: asked while waiting, several times a second; True ends the wait early.
    """

    def __init__(
        self,
        rate: float,
        *,
        burst: float | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = max(0.0, rate)
        self._ahead = (max(1.0, burst) if burst is not None else self.rate * _BURST_SECONDS) / (
            self.rate or 1.0
        )
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep
        self._mutex = threading.Lock()
        self._file = -1
        if self.rate:
            self._file = os.memfd_create("hpml-rate", os.MFD_CLOEXEC)
            os.pwrite(self._file, _STATE.pack(clock()), 0)
            _buckets.add(self)

    def take(self, count: float = 1) -> float:
        """Wait until `count` more calls are on schedule.

        Returns:
            Seconds that it waited.
        """
        if not self.rate or count <= 0:
            return 0.0
        with self._state():
            now = self._clock()
            due: float = _STATE.unpack(os.pread(self._file, _STATE.size, 0))[0]
            due = max(due, now - self._ahead)
            os.pwrite(self._file, _STATE.pack(due + count / self.rate), 0)
        wait = max(0.0, due - now)
        until = wait
        while until > 0 and not self._should_stop():
            self._sleep(min(until, _NAP_SECONDS))
            until = now + wait - self._clock()
        return wait

    def close(self) -> None:
        """Give back the memory that the processes share; nothing is held back afterwards."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self.rate = -1, 0.0

    @contextlib.contextmanager
    def _state(self) -> Iterator[None]:
        with self._mutex:  # lockf is between processes: threads of one have it together
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


_buckets: weakref.WeakSet[TokenBucket] = weakref.WeakSet()


def _renew_locks() -> None:
    for bucket in _buckets:  # a thread of the parent may have held it, and is not in the child
        bucket._mutex = threading.Lock()  # noqa: SLF001


os.register_at_fork(after_in_child=_renew_locks)


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

    Tasks of an array start in the same moment. Their delays are spread evenly over the window
    min(most, tasks * SECONDS_PER_TASK) by multiples of the golden ratio, which leave no large gap
    however many of the tasks there are; the same task always waits the same time.

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


def is_shared_type(file_system: str) -> bool:
    """Tell whether a file system of this type, as mountinfo names it, is served over a network.

    >>> is_shared_type("lustre"), is_shared_type("fuse.sshfs"), is_shared_type("ext4")
    (True, True, False)
    """
    return file_system in _SHARED_TYPES or file_system.startswith("fuse.")


def drops_cache(file_system: str, source_bytes: int, available_bytes: int) -> bool:
    """Tell whether what was read of the source shall leave the node's page cache at once.

    A node that has its own copy does not read a shared source again, and the pages would push out
    the copy's. On a file system of the node others may still read it: then only what is large.

    Args:
        file_system: type of the source's, as mountinfo names it.
        source_bytes: how much is read.
        available_bytes: memory that the node has left; 0 when unknown.
    """
    if is_shared_type(file_system):
        return True
    return bool(available_bytes) and source_bytes > _CACHE_SHARE * available_bytes
