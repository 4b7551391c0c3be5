"""Copy batches until there are none; with more threads while it is waiting that takes time."""

from __future__ import annotations

import resource
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.copying import Copying

__all__ = ["Drain"]

_WAIT_SECONDS_PER_FILE = 0.0002  # less is a busy CPU rather than a slow source
_FIRST_THREADS = 8
_LOOK_EVERY_SECONDS = 0.1
_GROWTH = 1.1
"""Throughput that twice the threads must bring at least for them to be doubled again."""


class Drain:
    """Copies batches with one thread, and with several once the source turns out to be slow.

    A thread that waits gives its CPU away of its own accord, which the kernel counts; one that
    only lost its CPU to others needs no help.

    Args:
        copying: does a batch.
        board: counts.
        take: returns the next batch, None when there are no more; called by several threads.
        tally: makes the tally of one more thread.
        most_threads: of this process.
    """

    def __init__(
        self,
        copying: Copying,
        board: Board,
        take: Callable[[], Batch | None],
        tally: Callable[[], Tally],
        *,
        most_threads: int,
    ) -> None:
        self._copying = copying
        self._board = board
        self._take = take
        self._new_tally = tally
        self._most_threads = most_threads
        self._tallies: list[Tally] = []
        self._failed: list[BaseException] = []

    def run(self) -> int:
        """Copy until there are no more batches.

        Returns:
            How many threads did it.

        Raises:
            StagingError, StagingStopped, OSError: as the copying does; the first of them.
        """
        tally = self._tally()
        while not self._failed:
            batch = self._take()
            if batch is None:
                break
            if self._most_threads == 1:
                self._copying.do(batch, tally)
            elif self._waits(batch, tally):
                return self._widen()
        return 1

    def _tally(self) -> Tally:
        tally = self._new_tally()
        self._tallies.append(tally)
        return tally

    def _waits(self, batch: Batch, tally: Tally) -> bool:
        """Copy a batch, and say whether that was mostly waiting."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        wall, files = time.perf_counter(), tally.files
        self._copying.do(batch, tally)
        wall = time.perf_counter() - wall
        now = resource.getrusage(resource.RUSAGE_THREAD)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        done = max(1, tally.files - files)
        slow = wall - cpu > max(cpu, _WAIT_SECONDS_PER_FILE * done)
        return slow and now.ru_nvcsw - used.ru_nvcsw >= done

    def _widen(self) -> int:
        """Add threads as long as that brings more."""
        threads: list[threading.Thread] = []
        wanted = min(_FIRST_THREADS, self._most_threads)
        rate = 0.0
        try:
            while True:
                while len(threads) < wanted:
                    one = threading.Thread(target=self._work, args=(self._tally(),), daemon=True)
                    threads.append(one)
                    one.start()
                before, begin = self._files(), time.perf_counter()
                if not self._join(threads, _LOOK_EVERY_SECONDS):
                    break
                now = (self._files() - before) / (time.perf_counter() - begin)
                if wanted >= self._most_threads or now < rate * _GROWTH:
                    self._join(threads, None)
                    break
                rate = now
                wanted = min(wanted * 2, self._most_threads)
        finally:
            if self._failed or any(one.is_alive() for one in threads):
                self._failed.append(RuntimeError())
                for one in threads:
                    one.join()
                self._failed.pop()
        if self._failed:
            raise self._failed[0]
        return len(threads)

    def _files(self) -> int:
        return sum(tally.files for tally in self._tallies)

    def _join(self, threads: list[threading.Thread], seconds: float | None) -> bool:
        """Wait for all threads; say whether some still work when the time is over."""
        end = None if seconds is None else time.monotonic() + seconds
        for one in threads:
            one.join(None if end is None else max(0.0, end - time.monotonic()))
        return any(one.is_alive() for one in threads)

    def _work(self, tally: Tally) -> None:
        try:
            while not self._failed:
                batch = self._take()
                if batch is None:
                    return
                self._copying.do(batch, tally)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that joins
            self._failed.append(error)
            self._board.stop()
