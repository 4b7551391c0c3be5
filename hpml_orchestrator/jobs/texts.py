"""Sizes and times as people read them."""

from __future__ import annotations

__all__ = ["bytes_text", "seconds_text"]

_KIBI = 1024
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def bytes_text(size: float) -> str:
    """Return a size in binary units.

    >>> bytes_text(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < _KIBI or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIBI
    raise AssertionError


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
