"""Files of a pack appear whole, durable and under their names, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from hpml_orchestrator.records.files import fsync_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TEMPORARY", "new_file", "publish", "write_all"]

TEMPORARY = ".writing"
"""How the name of a file ends that is being written."""


@contextlib.contextmanager
def new_file(directory: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield a new file's descriptor and path; it is removed behind the block if it is still there.

    Raises:
        OSError: it cannot be made.
    """
    temporary = os.path.join(directory, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd, temporary
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@contextlib.contextmanager
def publish(directory: str, name: str, *, durable: bool = True) -> Iterator[int]:
    """Yield a new file's descriptor; the file gets its name when the block ends without an error.

    Args:
        directory: where it is to be.
        name: of the file.
        durable: whether it outlives a power failure, whole; else it may be gone or damaged then.

    Raises:
        OSError: it cannot be written.
    """
    with new_file(directory, name) as (fd, temporary):
        yield fd
        if durable:
            os.fsync(fd)
        os.rename(temporary, os.path.join(directory, name))
    if durable:
        fsync_dir(directory)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of the data, in as many calls as it takes.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
