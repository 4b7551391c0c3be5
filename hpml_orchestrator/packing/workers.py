"""Forked workers for the archives of a pack, each at one of its own; they tell how far they are."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.crew import run_crew

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

__all__ = ["Tell", "default_workers", "in_parallel"]

_TOLD_EVERY_SECONDS = 0.2


class Tell:
    """How far a worker is."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._bytes = self._files = 0
        self._next = time.monotonic() + _TOLD_EVERY_SECONDS

    def add(self, done_bytes: int, done_files: int) -> None:
        """Count what was done, and tell it a few times a second."""
        self._bytes += done_bytes
        self._files += done_files
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Tell what was not yet told."""
        self._say("progress", self._bytes, self._files)
        self._bytes = self._files = 0
        self._next = time.monotonic() + _TOLD_EVERY_SECONDS


def default_workers() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def in_parallel(
    numbers: Sequence[int],
    work: Callable[[int, Tell], Sequence[Any]],
    *,
    workers: int,
    progress: Callable[[int, int], None],
    done: Callable[..., None],
    died: str = "was memory short?",
) -> None:
    """Let forked workers work on numbers, and hear what came of each; the order is not fixed.

    Args:
        numbers: what to work on.
        work: called in a worker with a number; returns plain values: numbers, text, lists of them.
        workers: processes at most.
        progress: called with (bytes, files) done since the last call, and with zeros when nothing
            was told for a moment; may raise.
        done: called with the values that the work returned; may raise. Then, as after any other
            error, the workers are killed, and what they were writing is for the caller to remove.
        died: the hint where a worker was killed.

    Raises:
        StagingError: a worker died, or what the work raised.
        OSError: likewise.
    """

    def serve(_worker: int, take: Callable[[], int | None], say: Callable[..., None]) -> None:
        tell = Tell(say)
        for number in iter(take, None):
            values = work(number, tell)
            tell.flush()
            say("done", *values)

    def told(word: str, *values: Any) -> None:
        if word == "progress":
            progress(*values)
        else:
            done(*values)

    run_crew(
        min(workers, len(numbers)),
        serve,
        numbers,
        told=told,
        heartbeat=lambda: progress(0, 0),
        died=died,
    )
