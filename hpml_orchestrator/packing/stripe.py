"""Spread the archives of a pack over the servers of a Lustre file system."""

from __future__ import annotations

import shutil
import subprocess

from hpml_orchestrator.staging.capacity import file_system_type

__all__ = ["stripe", "stripe_count"]

_PER_STRIPE_BYTES = 256 << 20
_MOST_STRIPES = 8
_LIMIT_SECONDS = 30


def stripe_count(shard_bytes: int) -> int:
    """Return over how many servers an archive is spread: one for each 256 MiB, 8 at most.

    >>> stripe_count(100 << 20), stripe_count(1 << 30), stripe_count(1 << 40)
    (1, 4, 8)
    """
    return max(1, min(_MOST_STRIPES, -(-shard_bytes // _PER_STRIPE_BYTES)))


def stripe(directory: str, shard_bytes: int, *, proc_root: str = "/proc") -> str:
    """Set the striping that new files in a directory get, where it is Lustre's and `lfs` is there.

    Args:
        directory: the pack, still without archives.
        shard_bytes: size of an archive.
        proc_root: where the kernel tells the mounts.

    Returns:
        What was done or went wrong, in one line; empty where there is no Lustre.
    """
    if file_system_type(directory, proc_root=proc_root) != "lustre":
        return ""
    lfs = shutil.which("lfs")
    if lfs is None:
        return "on Lustre, but there is no lfs command: the archives get the default striping"
    count = stripe_count(shard_bytes)
    try:
        done = subprocess.run(
            [lfs, "setstripe", "-c", str(count), directory],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"lfs setstripe failed: {error}"
    if done.returncode:
        told = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
        return f"lfs setstripe failed: {told}"
    return f"on Lustre: each archive is spread over {count} servers"
