"""Read a file that grows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Tail", "start_of_last"]

_BLOCK_BYTES = 1 << 20


class Tail:
    """Reads what was added to a file since the last time; the file need not be there yet."""

    def __init__(self, path: Path, *, position: int = 0) -> None:
        self._path = path
        self._position = position

    def read(self) -> bytes:
        """Return what is new, at most 1 MiB; empty when there is nothing."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read(_BLOCK_BYTES)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return data

    def read_to_end(
        self, *, settle_seconds: float = 0.3, sleep: Callable[[float], None] = time.sleep
    ) -> bytes:
        """Return all that is new, and what comes within a moment: the last writes may be late."""
        parts = [self.read()]
        while parts[-1]:
            parts.append(self.read())
        sleep(settle_seconds)
        parts.append(self.read())
        return b"".join(parts)


def start_of_last(path: Path, count: int) -> int:
    """Return the offset at which the last lines of a file begin, without reading all of it.

    Args:
        path: the file.
        count: how many lines, 1 or more.
    """
    with path.open("rb") as stream:
        size = end = stream.seek(0, 2)
        data = b""
        while end > 0 and data.count(b"\n") <= count:
            begin = max(0, end - (1 << 16))
            stream.seek(begin)
            data = stream.read(end - begin) + data
            end = begin
    lines = data.split(b"\n")  # not splitlines(): progress bars end theirs in \r
    whole = [line + b"\n" for line in lines[:-1]] + [lines[-1]] * bool(lines[-1])
    return size - sum(len(line) for line in whole[-count:])
