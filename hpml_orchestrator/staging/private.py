"""Whether a base directory is one job's own: then nothing in it outlives the job.

Slurm's job_container/tmpfs (manual page job_container.conf; seen with 22.05.8) gives each job
directories of its own: `{BasePath}/{node}/{job id}/.{job id}` is bound over /tmp, and /dev/shm
becomes a new tmpfs, which names no job. Other sites make `/scratch/{job id}` in a prolog.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.records.mounts import read_mounts

if TYPE_CHECKING:
    from hpml_orchestrator.records.mounts import Mount

__all__ = ["private_reason", "reason_from"]


def private_reason(base: str, job_id: str, *, proc_root: str = "/proc") -> str:
    """Return why later jobs cannot find what lies in a base; "" when they can, or outside a job.

    Args:
        base: an existing directory on this node.
        job_id: as Slurm counts; "" outside a job.
        proc_root: where to look for mounts: this process's and those of process 1.
    """
    if not job_id:
        return ""
    mine = read_mounts(f"{proc_root}/self/mountinfo")
    return reason_from(
        os.path.realpath(base), job_id, mine, read_mounts(f"{proc_root}/1/mountinfo")
    )


def reason_from(base: str, job_id: str, mine: list[Mount], everyones: list[Mount]) -> str:
    """Return the reason from the mounts of this process and of process 1 (none: not known).

    >>> from hpml_orchestrator.records.mounts import Mount
    >>> line = Mount("8:1", "/var/slurm/4711/.4711", "/tmp", "ext4")
    >>> reason_from("/tmp/x", "4711", [line], [])
    '/tmp belongs to job 4711 alone (/var/slurm/4711/.4711 is mounted there) and ends with it'
    >>> reason_from("/scratch/4711", "4711", [], [])
    '/scratch/4711 is named after job 4711 and ends with it'
    """
    over = _mount_over(base, mine)
    alone = f"belongs to job {job_id} alone"
    if over is not None:
        if _is_named_after(job_id, over.root):
            return f"{over.point} {alone} ({over.root} is mounted there) and {_END}"
        known = {(mount.device, mount.root) for mount in everyones}
        contained = any(f"/{job_id}/.{job_id}/" in f"{mount.root}/" for mount in mine)
        if contained and known and (over.device, over.root) not in known:
            return f"{over.point} {alone} (a new {over.kind}) and {_END}"
    if _is_named_after(job_id, base):
        return f"{base} is named after job {job_id} and {_END}"
    return ""


_END = "ends with it"


def _mount_over(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount that a path lies on.

    The last one that holds it: mounts come after what they lie on and what they hide.
    """
    holding = [
        mount
        for mount in mounts
        if f"{path.rstrip('/')}/".startswith(f"{mount.point.rstrip('/')}/")
    ]
    return holding[-1] if holding else None


def _is_named_after(job_id: str, path: str) -> bool:
    """Say whether a component of a path is the job's id, or that with a word for a job in front."""
    number = re.escape(job_id)
    pattern = rf"\.?(?:(?:slurm|job|slurmjob|slurm[._-]job|jobid|tmp|scratch)[._-]?)?{number}"
    return any(re.fullmatch(pattern, part, re.IGNORECASE) for part in path.split("/"))
