"""Where the kernel's file systems are; injected, so that tests bring trees of their own."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Roots"]


@dataclass(frozen=True)
class Roots:
    """Mount points of what is read.

    Attributes:
        proc: procfs.
        sys: sysfs.
        cgroup: of the control groups: the unified hierarchy, or the directory that holds one
            directory per controller of version 1.
        run: where the prolog leaves its map (`{run}/jobs/<jobid>.json`).
        shm: the RAM file system that jobs stage to.
    """

    proc: str = "/proc"
    sys: str = "/sys"
    cgroup: str = "/sys/fs/cgroup"
    run: str = "/run/hpml"
    shm: str = "/dev/shm"  # noqa: S108 - the mount point itself
