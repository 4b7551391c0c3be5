"""Totals out of readings: integrals of rates, counters that wrap, and how often to read what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Cost", "Integral", "Wrapping", "periods"]

_NARROW = 32
_NARROW_HALF = 1 << 31


class Integral:
    """A total that grows by rate times time.

    Attributes:
        total: what has come together so far.
        most: seconds that one reading can stand for; of a longer gap the rest is not known and
            adds nothing.
    """

    def __init__(self, most: float) -> None:
        """Begin at zero."""
        self.total = 0.0
        self.most = most
        self._last: float | None = None

    def add(self, rate: float, now: float) -> float:
        """Add what the time since the last reading brought, and return the total.

        Args:
            rate: per second; the mean over the time since the last reading, as near as is known.
            now: seconds, monotonic.
        """
        if self._last is not None and now > self._last:
            self.total += rate * min(now - self._last, self.most)
        if self._last is None or now > self._last:
            self._last = now
        return self.total

    def grow(self, amount: float) -> float:
        """Add an amount that is known, however long it took, and return the total."""
        self.total += amount
        return self.total

    def pause(self) -> None:
        """Let the time until the next reading add nothing."""
        self._last = None


class Wrapping:
    """A counter that begins again at its modulus or after a reset; it adds to a total.

    Attributes:
        into: the total; what measures the same in another way adds to it as well, at other times.
    """

    def __init__(self, into: Integral | None = None) -> None:
        """Begin with the first reading, which adds nothing."""
        self.into = into or Integral(0.0)
        self._last: int | None = None

    def add(self, value: int, bits: int) -> float:
        """Add what was counted since the last reading, and return the total.

        A counter of 32 bits that went down has wrapped, also where the driver hands it out as a
        number of 64 bits; another was reset, and counts from zero.
        """
        if self._last is not None:
            if value >= self._last:
                self.into.grow(value - self._last)
            elif bits == _NARROW or _NARROW_HALF <= self._last - value < 2 * _NARROW_HALF:
                self.into.grow(value - self._last + 2 * _NARROW_HALF)
            else:
                self.into.grow(value)
        self._last = value
        return self.into.total

    def pause(self) -> None:
        """Begin again with the next reading, which adds nothing."""
        self._last = None


class Cost(NamedTuple):
    """What a reading costs, and how rare it may become.

    Attributes:
        seconds: CPU time of one.
        period: seconds between two as wanted.
        most: seconds between two at most.
    """

    seconds: float
    period: float
    most: float


def periods(costs: Sequence[Cost], budget: float) -> list[float]:
    """Return the seconds between two readings of each kind that keep all within a budget.

    Drivers differ by a factor of a hundred in what one call costs. The reading that costs most
    per second is made rarer first, by a factor of five at a time, until the sum fits or nothing
    may become rarer.

    Args:
        costs: one per kind of reading.
        budget: seconds of CPU time per second.
    """
    chosen = [cost.period for cost in costs]
    while sum(cost.seconds / period for cost, period in zip(costs, chosen, strict=True)) > budget:
        left = [index for index, cost in enumerate(costs) if chosen[index] < cost.most]
        if not left:
            break
        worst = max(left, key=lambda index: costs[index].seconds / chosen[index])
        chosen[worst] = min(chosen[worst] * 5, costs[worst].most)
    return chosen
