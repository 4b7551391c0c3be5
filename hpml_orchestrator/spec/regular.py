"""Open files that end: pipes and devices, which may never do, are refused unread."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from hpml_orchestrator.errors import InputError

__all__ = ["open_regular"]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for anybody.

    Raises:
        InputError: it is something else.
        OSError: it cannot be opened.
    """
    info = os.stat(path)
    if stat.S_ISREG(info.st_mode):
        # Should it have become a pipe in between, opening does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return os.fdopen(descriptor, "rb")
    raise InputError(
        f"{path} is {_KINDS.get(stat.S_IFMT(info.st_mode), 'something else')}, not a regular file",
        hint="name a file: what stands in it is relative to its directory",
    )
