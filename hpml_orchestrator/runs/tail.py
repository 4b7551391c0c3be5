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
    """Reads what was added to a file since the last call; the file need not exist yet."""

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
        """Return all that is new, and what is written within a moment: the end may be late."""
        parts = [self.read()]
        while parts[-1]:
            parts.append(self.read())
        sleep(settle_seconds)
        return b"".join([*parts, self.read()])


def start_of_last(path: Path, count: int) -> int:
    """Return the offset at which the last lines of a file begin, reading only its end.

    Args:
        path: the file.
        count: number of lines, 1 or more.
    """
    with path.open("rb") as stream:
        size = begin = stream.seek(0, 2)
        data = b""
        while begin > 0 and data.count(b"\n") <= count:
            end, begin = begin, max(0, begin - (1 << 16))
            stream.seek(begin)
            data = stream.read(end - begin) + data
    # Not splitlines(): progress bars end theirs in \r. The last line may have no end yet.
    lines = data.removesuffix(b"\n").split(b"\n")[-count:]
    return size - len(b"\n".join(lines)) - data.endswith(b"\n")
