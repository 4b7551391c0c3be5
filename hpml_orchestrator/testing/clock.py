"""A clock whose sleep just advances it."""

from __future__ import annotations


class FakeClock:
    """A `Clock` for tests: no time passes but by `sleep`.

    Attributes:
        now: seconds since the epoch.
        sleeps: every sleep so far, in seconds.

    >>> clock = FakeClock(1000.0)
    >>> clock.sleep(30)
    >>> clock.time(), clock.sleeps
    (1030.0, [30])
    """

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now
        self.sleeps: list[float] = []

    def time(self) -> float:
        """Return seconds since the epoch."""
        return self.now

    def monotonic(self) -> float:
        """Return the same; this clock never goes back by itself."""
        return self.now

    def sleep(self, seconds: float, /) -> None:
        """Advance."""
        self.sleeps.append(seconds)
        self.now += seconds
