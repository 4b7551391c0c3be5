"""Opening files that an administrator named, whatever lies there by now."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

__all__ = ["open_regular"]


def open_regular(path: str) -> BufferedReader:
    """Open a regular file, or a link to one, for reading; a pipe would wait for a writer.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return open(fd, "rb")
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", path)
