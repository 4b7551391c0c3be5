"""Write a file that somebody asked for, and leave the one before alone where that fails."""

from __future__ import annotations

import contextlib
import os
import stat

__all__ = ["write_output"]


def write_output(path: str, text: str) -> None:
    """Write a text file whole or not at all; a pipe or a device is written to as it is.

    Args:
        path: of the file; a symbolic link is followed, and stays.
        text: what it shall hold.

    Raises:
        OSError: it cannot be written; what was there before is still there, and nothing new is.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    # The real path of a pipe that is given as /dev/fd/3 is no path.
    regular = there is None or stat.S_ISREG(there.st_mode)
    target = os.path.realpath(path) if path and regular else path
    scratch = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}")
    if there is not None and not (
        regular and os.access(target, os.W_OK) and os.access(os.path.dirname(target), os.W_OK)
    ):
        _write(target, text)  # in place, or it says why not
        return
    try:
        _write(scratch, text, there)
        os.replace(scratch, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _write(path: str, text: str, like: os.stat_result | None = None) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        if like is not None:
            os.fchmod(stream.fileno(), stat.S_IMODE(like.st_mode))
