"""Anonymous memory that several processes share: a fork has its parent's pages until one writes.

Their sizes added up would count such a page once for each of them: of a training with eight forked
loaders the memory nine times. /proc/PID/smaps_rollup divides it by those who share it (Pss_Anon,
since Linux 5.4), but has the kernel walk through all pages, some 25 ms per GiB. So no more of that
is done than a small share of a core allows; meanwhile a process keeps the share that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from hpml_exporters.jobs import raw

__all__ = ["LEAST", "SharedPages"]

LEAST = 8 << 20  # bytes; an interpreter that has loaded little is not worth the walk
_CORE = 0.005  # of one, in the long run
_BURST_SECONDS = 0.5  # of CPU time at first, and after a rest
_TOO_FEW = 2


class SharedPages:
    """Divides what processes share.

    Args:
        proc: mount point of procfs.
        clock: CPU seconds of the calling thread.
    """

    def __init__(self, proc: str, clock: Callable[[], float] = time.thread_time) -> None:
        self._proc = proc
        self._clock = clock
        self._left = _BURST_SECONDS
        self._filled: float | None = None
        self._known: dict[int, tuple[float, float]] = {}  # when its share was read, and the share

    def parts(self, sizes: Mapping[int, int], now: float) -> dict[int, int]:
        """Return what of their memory counts for each process of a job, in bytes.

        Args:
            sizes: anonymous bytes by process id.
            now: monotonic seconds.
        """
        self._left += _CORE * (now - (now if self._filled is None else self._filled))
        self._left, self._filled = min(self._left, _BURST_SECONDS), now
        large = [pid for pid, size in sizes.items() if size >= LEAST]
        if len(large) < _TOO_FEW:
            return dict(sizes)
        for pid in sorted(large, key=lambda one: self._known.get(one, (0.0, 1.0))[0]):
            if self._left <= 0:
                break
            began = self._clock()
            share = self._share(pid)
            self._known[pid] = (now, share)
            self._left -= self._clock() - began
        shares = {pid: self._known.get(pid, (0.0, 1.0))[1] for pid in large}
        return {pid: round(size * shares.get(pid, 1.0)) for pid, size in sizes.items()}

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all processes but these."""
        for pid in self._known.keys() - set(pids):
            del self._known[pid]

    def _share(self, pid: int) -> float:
        """Return the part of a process's anonymous memory that is its own; 1 where unknown."""
        try:
            data = raw.read_once(f"{self._proc}/{pid}/smaps_rollup") or b""
        except PermissionError:
            return 1.0
        own, whole = _kibibytes(data, b"\nPss_Anon:"), _kibibytes(data, b"\nAnonymous:")
        return min(1.0, own / whole) if own >= 0 and whole > 0 else 1.0


def _kibibytes(data: bytes, name: bytes) -> int:
    at = data.find(name)
    words = data[at + len(name) : at + len(name) + 40].split(None, 1) if at >= 0 else []
    return int(words[0]) if words and words[0].isdigit() else -1
