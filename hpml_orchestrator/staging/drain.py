"""Copy batches until there are none; with more threads while it is waiting that takes time."""

from __future__ import annotations

import resource
import threading
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.batches import FILE_COST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch
    from hpml_orchestrator.staging.board import Board, Tally
    from hpml_orchestrator.staging.copying import Copying

__all__ = ["Drain"]

_WAIT_SECONDS_PER_FILE = 0.0002  # less is a busy CPU rather than a slow source
_WAITS_PER_CPU = 2.0
_FIRST_THREADS = 8
_LOOK_EVERY_SECONDS = 0.1
_REST_SECONDS = 1.0
"""How long threads that brought nothing are not tried again."""

_GROWTH = 1.2
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
        self._wanted = 1
        self._alone = 0.0  # throughput of one thread
        self._since = (0.0, 0.0, 0, 0, 0, 0.0)

    def run(self) -> int:
        """Copy until there are no more batches.

        Returns:
            How many threads did it.

        Raises:
            StagingError, StagingStopped, OSError: as the copying does; the first of them.
        """
        tally = self._tally()
        self._begin(tally)
        most = 1
        rest_until = 0.0
        while (batch := self._take()) is not None:
            if self._most_threads == 1 or time.monotonic() < rest_until:
                self._copying.do(batch, tally)
            elif self._waits(batch, tally):
                threads, useful = self._widen()
                most = max(most, threads)
                if useful:
                    return most
                self._begin(tally)
                rest_until = time.monotonic() + _REST_SECONDS
        return most

    def _tally(self) -> Tally:
        tally = self._new_tally()
        self._tallies.append(tally)
        return tally

    def _waits(self, batch: Batch, tally: Tally) -> bool:
        """Copy a batch, and say whether what was done since the last look was mostly waiting."""
        self._copying.do(batch, tally)
        wall, cpu, waits, files, some_bytes, read = self._look(tally)
        if wall < _LOOK_EVERY_SECONDS / 2:
            return False  # too short to tell
        self._begin(tally)
        self._alone = _cost(some_bytes, files) / wall
        # the target's locks make workers wait too, which more of them would only make worse
        waited = min(read, wall - cpu)
        slow = waited > max(cpu * _WAITS_PER_CPU, _WAIT_SECONDS_PER_FILE * files)
        return slow and waits >= max(1, files)

    def _begin(self, tally: Tally) -> None:
        """Begin to look how much of the time is waiting."""
        self._since = (0.0, 0.0, 0, 0, 0, 0.0)
        self._since = self._look(tally)

    def _look(self, tally: Tally) -> tuple[float, float, int, int, int, float]:
        used = resource.getrusage(resource.RUSAGE_THREAD)
        wall, cpu, waits, files, some_bytes, read = self._since
        return (
            time.perf_counter() - wall,
            used.ru_utime + used.ru_stime - cpu,
            used.ru_nvcsw - waits,
            tally.files - files,
            tally.bytes - some_bytes,
            tally.read_seconds - read,
        )

    def _widen(self) -> tuple[int, bool]:
        """Add threads as long as that brings more.

        Returns:
            How many there were, and whether they copied all that was left; else they brought
            nothing and are gone.
        """
        threads: list[threading.Thread] = []
        self._wanted = min(_FIRST_THREADS, self._most_threads)
        rate = self._alone
        try:
            while True:
                self._start(threads)
                if not threads:
                    return 1, False
                before, begin = self._done(), time.perf_counter()
                if not self._join(threads, _LOOK_EVERY_SECONDS):
                    break
                now = (self._done() - before) / (time.perf_counter() - begin)
                if now < rate * _GROWTH and len(threads) <= _FIRST_THREADS:
                    self._wanted = 0
                    self._join(threads, None)
                    self._raise_any()
                    return len(threads), False
                if self._wanted >= self._most_threads or now < rate * _GROWTH:
                    self._join(threads, None)
                    break
                rate = now
                self._wanted = min(self._wanted * 2, self._most_threads)
        finally:
            self._wanted = 0  # an interrupt must not leave threads that write
            self._join(threads, None)
        self._raise_any()
        return len(threads), True

    def _start(self, threads: list[threading.Thread]) -> None:
        """Start what is wanted; fewer where the job may have no more."""
        while len(threads) < self._wanted:
            number = len(threads)
            if len(self._tallies) <= number + 1:  # the first one is of the thread that asks
                self._tally()
            arguments = (number, self._tallies[number + 1])
            one = threading.Thread(target=self._work, args=arguments, daemon=True)
            try:
                one.start()
            except RuntimeError:
                self._most_threads = max(1, number)
                self._wanted = number
                return
            threads.append(one)

    def _raise_any(self) -> None:
        if self._failed:
            raise self._failed[0]

    def _done(self) -> float:
        return sum(_cost(tally.bytes, tally.files) for tally in self._tallies)

    def _join(self, threads: list[threading.Thread], seconds: float | None) -> bool:
        """Wait for all threads; say whether some still work when the time is over."""
        end = None if seconds is None else time.monotonic() + seconds
        for one in threads:
            one.join(None if end is None else max(0.0, end - time.monotonic()))
        return any(one.is_alive() for one in threads)

    def _work(self, number: int, tally: Tally) -> None:
        try:
            while number < self._wanted and not self._failed:
                batch = self._take()
                if batch is None:
                    return
                self._copying.do(batch, tally)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that joins
            self._failed.append(error)
            self._board.stop()


def _cost(some_bytes: int, files: int) -> float:
    return some_bytes + files * FILE_COST_BYTES
