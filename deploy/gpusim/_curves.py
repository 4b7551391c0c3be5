"""Curves of time for simulated GPUs: values, integrals and their text in a state file.

Written from the definitions in README.md and apart from the C library, so that a test which
computes a truth from them does not repeat what it tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Square:
    """High for the first `duty` of every period, then low; `phase` seconds ahead of the epoch."""

    period: float
    low: float
    high: float
    phase: float = 0.0
    duty: float = 0.5

    def value(self, t: float) -> float:
        """Return the value `t` seconds after the epoch."""
        into = math.fmod(t + self.phase, self.period)
        return self.high if into < self.duty * self.period else self.low

    def integral(self, t: float) -> float:
        """Return the integral from the epoch to `t`."""
        high = self._high_seconds(t + self.phase) - self._high_seconds(self.phase)
        return self.low * t + (self.high - self.low) * high

    def _high_seconds(self, end: float) -> float:
        """Return the seconds in which a square without phase is high in [0, end)."""
        whole, rest = divmod(end, self.period)
        return self.duty * self.period * whole + min(rest, self.duty * self.period)

    def __str__(self) -> str:
        return f"square:{self.period},{self.low},{self.high},{self.phase},{self.duty}"


@dataclass(frozen=True)
class Ramp:
    """Goes from `start` by `rate` per second."""

    start: float
    rate: float

    def value(self, t: float) -> float:
        """Return the value `t` seconds after the epoch."""
        return self.start + self.rate * t

    def integral(self, t: float) -> float:
        """Return the integral from the epoch to `t`."""
        return self.start * t + self.rate * t**2 / 2

    def __str__(self) -> str:
        return f"ramp:{self.start},{self.rate}"


Curve: TypeAlias = Square | Ramp
Number: TypeAlias = float | Curve


def parse(text: str) -> Number:
    """Return the number or curve of a text.

    Raises:
        ValueError: it is none.
    """
    kind, _, parameters = text.rpartition(":")
    try:
        numbers = [float(each) for each in parameters.split(",")]
        if not kind:
            (number,) = numbers
            return int(number) if number.is_integer() else number
        if kind in {"square", "ramp"}:
            return Square(*numbers) if kind == "square" else Ramp(*numbers)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"no number and no curve: {text}")


def value(of: Number, t: float) -> float:
    """Return the value of a number or curve `t` seconds after the epoch."""
    return of if isinstance(of, int | float) else of.value(t)


def integral(of: Number, t: float) -> float:
    """Return the integral of a number or curve from the epoch to `t`."""
    return of * t if isinstance(of, int | float) else of.integral(t)
