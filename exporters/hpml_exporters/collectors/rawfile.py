"""Small files of the kernel, read whole in one go."""

from __future__ import annotations

import os

__all__ = ["MAX_BYTES", "read"]

MAX_BYTES = 4 * 1024**2
_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def read(path: str, most: int = MAX_BYTES) -> bytes:
    """Return what a file holds, at most so many bytes of it.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, _FLAGS)
    try:
        data = os.read(fd, min(most, 65536))
        if not data:
            return data
        parts = [data]
        size = len(data)
        # procfs gives a page or so at a time: only an empty answer is the end.
        while size < most and (data := os.read(fd, min(most - size, 65536))):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(fd)
