"""Curves of time for simulated GPUs: values, integrals and their text in a state file.

Written from the definitions in README.md and apart from the C library, so that a test which
computes a truth from them does not repeat what it tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

__all__ = ["Curve", "Number", "Ramp", "Sine", "Square", "integral", "later", "value"]


@dataclass(frozen=True)
class Square:
    """High for the first `duty` of every period, then low; `phase` seconds ahead of the epoch."""

    period: float
    low: float
    high: float
    phase: float = 0.0
    duty: float = 0.5

    def value(self, t: float) -> float:
        """The value `t` seconds after the epoch."""
        into = math.fmod(t + self.phase, self.period)
        return self.high if into < self.duty * self.period else self.low

    def integral(self, t: float) -> float:
        """The integral from the epoch to `t`."""
        high = self._high_seconds(t + self.phase) - self._high_seconds(self.phase)
        return self.low * t + (self.high - self.low) * high

    def later(self, t: float) -> Square:
        """The same curve for an epoch that is `t` seconds later."""
        return replace(self, phase=math.fmod(self.phase + t, self.period))

    def _high_seconds(self, end: float) -> float:
        """Seconds in which a square without phase is high in [0, end)."""
        whole, rest = divmod(end, self.period)
        return self.duty * self.period * whole + min(rest, self.duty * self.period)

    def __str__(self) -> str:
        return f"square:{self.period},{self.low},{self.high},{self.phase},{self.duty}"


@dataclass(frozen=True)
class Sine:
    """Swings between low and high, half way up at the epoch when `phase` is 0."""

    period: float
    low: float
    high: float
    phase: float = 0.0

    def value(self, t: float) -> float:
        """The value `t` seconds after the epoch."""
        swing = math.sin(math.tau * (t + self.phase) / self.period)
        return (self.low + self.high + (self.high - self.low) * swing) / 2

    def integral(self, t: float) -> float:
        """The integral from the epoch to `t`."""
        start, end = (math.tau * (at + self.phase) / self.period for at in (0, t))
        waves = self.period / math.tau * (math.cos(start) - math.cos(end))
        return ((self.low + self.high) * t + (self.high - self.low) * waves) / 2

    def later(self, t: float) -> Sine:
        """The same curve for an epoch that is `t` seconds later."""
        return replace(self, phase=math.fmod(self.phase + t, self.period))

    def __str__(self) -> str:
        return f"sine:{self.period},{self.low},{self.high},{self.phase}"


@dataclass(frozen=True)
class Ramp:
    """Goes from `start` by `rate` per second, until it reaches `limit` if there is one."""

    start: float
    rate: float
    limit: float | None = None

    def value(self, t: float) -> float:
        """The value `t` seconds after the epoch."""
        return self.start + self.rate * self._rising(t)

    def integral(self, t: float) -> float:
        """The integral from the epoch to `t`."""
        rising = self._rising(t)
        return self.start * rising + self.rate * rising**2 / 2 + self.value(t) * (t - rising)

    def later(self, t: float) -> Ramp:
        """The same curve for an epoch that is `t` seconds later."""
        return replace(self, start=self.value(t))

    def _rising(self, t: float) -> float:
        """Seconds until `t` or the limit."""
        if self.limit is None or self.rate == 0:
            return t
        return min(t, max(0.0, (self.limit - self.start) / self.rate))

    def __str__(self) -> str:
        return f"ramp:{self.start},{self.rate}" + ("" if self.limit is None else f",{self.limit}")


Curve: TypeAlias = Square | Sine | Ramp
Number: TypeAlias = float | Curve


def value(of: Number, t: float) -> float:
    """The value of a number or curve `t` seconds after the epoch."""
    return of if isinstance(of, int | float) else of.value(t)


def integral(of: Number, t: float) -> float:
    """The integral of a number or curve from the epoch to `t`."""
    return of * t if isinstance(of, int | float) else of.integral(t)


def later(of: Number, t: float) -> Number:
    """The same number or curve for an epoch that is `t` seconds later."""
    return of if isinstance(of, int | float) else of.later(t)
