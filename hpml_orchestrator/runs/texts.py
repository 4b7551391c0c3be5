"""Times as people read them."""

from __future__ import annotations

from datetime import datetime

__all__ = ["clock_text", "seconds_text"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def seconds_text(seconds: float) -> str:
    """Return a duration as people read it.

    >>> seconds_text(3725), seconds_text(4)
    ('1:02:05', '4 s')
    """
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    days, rest = divmod(whole, _DAY)
    hours, rest = divmod(rest, _HOUR)
    minutes, rest = divmod(rest, _MINUTE)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days} d {clock}" if days else clock


def clock_text(seconds: float) -> str:
    """Return a moment, in seconds since the epoch, as a local clock shows it."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
