"""Make what a plan holds beside files, and new files, in a directory that is being filled."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.faults import SourceChangedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["CHUNK_BYTES", "SourceChangedError", "make_directories", "make_links", "new_file"]

CHUNK_BYTES = 1 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def new_file(entry: Entry, dir_fd: int, name: str = "") -> Iterator[int]:
    """Create a file with the entry's mode (& ~umask, owner rw) and time; gone after an error."""
    path = name or entry.path
    fd = os.open(path, _CREATE, (entry.mode & 0o777) | 0o600, dir_fd=dir_fd)
    try:
        try:
            yield fd
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
    except BaseException:
        os.unlink(path, dir_fd=dir_fd)
        raise


def make_directories(plan: Plan, dir_fd: int, retry: Retry) -> None:
    """Create the directories of a plan with their modes (& ~umask, owner rwx)."""
    for entry in plan.directories:
        retry.check_stop()
        os.mkdir(entry.path, (entry.mode & 0o777) | 0o700, dir_fd=dir_fd)


def make_links(plan: Plan, dir_fd: int, retry: Retry) -> None:
    """Create hard and symbolic links, then set the times of directories, children first."""
    for hard in plan.hard_links:
        retry.check_stop()
        os.link(hard.first, hard.path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    for link in plan.symlinks:
        retry.check_stop()
        os.symlink(link.target, link.path, dir_fd=dir_fd)
        times = (link.mtime_ns, link.mtime_ns)
        os.utime(link.path, ns=times, dir_fd=dir_fd, follow_symlinks=False)
    for entry in reversed([plan.top, *plan.directories]):
        retry.check_stop()
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(entry.path or ".", ns=times, dir_fd=dir_fd, follow_symlinks=False)
