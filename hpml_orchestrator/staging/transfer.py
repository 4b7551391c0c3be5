"""Make what a plan holds beside files in a directory that is being filled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["make_directories", "make_links"]


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
