"""Jobs without control groups, by SLURM_JOB_ID in the environment of their processes.

That is proctrack/linuxproc, a workstation, and hpml's local backend. Users can write any job id
into an environment: so a job has only the processes of the user who used its id first, and the jobs
of a user have a limit.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpml_exporters.core.sampler import tell
from hpml_exporters.jobs import procfs
from hpml_exporters.jobs.cgroups import FoundJob

__all__ = ["MOST_PER_USER", "EnvironmentJobs", "own_variables"]

MOST_PER_USER = max(64, os.cpu_count() or 1)
"""Jobs of one user that are shown, those that began first; four times as many of all users."""

_MOST = 4 * MOST_PER_USER
_JOBID = re.compile(r"[1-9][0-9]{0,9}")
_STEP = re.compile(r"[0-9]{1,10}")
# The site's own programs, and what they leave running, are not the job's.
_SITES = ("prolog_slurmd", "epilog_slurmd", "prolog_slurmctld", "epilog_slurmctld")
_YOUNG_SECONDS = 30.0  # a process that was forked may still start its program
_LONGEST_NAME = 256


def own_variables() -> dict[str, str]:
    """Return the variables that tell this process's job from others of the same number.

    Local jobs count from 1 in every directory of records, and a machine may be several nodes of
    a job.
    """
    names = ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
    return {name: os.environ[name] for name in names if name in os.environ}


@dataclass(frozen=True)
class _Process:
    """What is known of a process; the job id is empty if it has none."""

    start: int
    seen: float
    jobid: str = ""
    step: str = ""
    uid: int = -1
    cluster: str = ""


class EnvironmentJobs:
    """Finds jobs by the environments of processes, and reads each process only once.

    Args:
        proc: mount point of procfs.
        only: the one job id that is wanted; empty: all.
        own: variables whose values must be these where a process has them, see `own_variables`.
    """

    def __init__(self, proc: str, only: str = "", own: Mapping[str, str] | None = None) -> None:
        self._proc, self._only, self._own = proc, only, own or {}
        self._known: dict[int, _Process] = {}
        self._told = False

    def look(self, now: float) -> list[FoundJob]:
        """Return the jobs that have a process.

        Args:
            now: monotonic seconds.
        """
        before, self._known = self._known, {}
        for pid in procfs.process_ids(self._proc):
            stat = procfs.stat(self._proc, pid)
            if stat is None:
                continue
            known = before.get(pid)
            if known is None or known.start != stat.start:
                known = self._read(pid, stat.start, now)
            elif not known.jobid and now - known.seen < _YOUNG_SECONDS:
                known = self._read(pid, stat.start, known.seen)
            self._known[pid] = known
        return self._jobs()

    def _jobs(self) -> list[FoundJob]:
        found: dict[str, FoundJob] = {}
        steps: dict[str, dict[str, set[int]]] = {}
        of_user = Counter[int]()
        refused = set()
        for pid, process in sorted(self._known.items(), key=lambda item: item[1].start):
            jobid, uid = process.jobid, process.uid
            if not jobid or self._only not in {"", jobid}:
                continue
            job = found.get(jobid)
            if job is None:
                if of_user[uid] >= MOST_PER_USER or len(found) >= _MOST:
                    refused.add(jobid)
                    continue
                steps[jobid] = {}
                job = found[jobid] = FoundJob(jobid, uid, steps=steps[jobid])
                of_user[uid] += 1
            if job.uid == uid:
                job.cluster = job.cluster or process.cluster
                steps[jobid].setdefault(process.step, set()).add(pid)
        if refused and not self._told:
            self._told = True
            tell(
                f"collector jobs: {len(refused)} jobs are not shown: the limit for jobs without"
                f" control groups is {MOST_PER_USER} per user, {_MOST} in all"
            )
        return list(found.values())

    def _read(self, pid: int, start: int, seen: float) -> _Process:
        values = procfs.environment(self._proc, pid)
        jobid = values.get("SLURM_JOB_ID", "")
        is_others = any(values.get(name, value) != value for name, value in self._own.items())
        is_sites = values.get("SLURM_SCRIPT_CONTEXT") in _SITES
        if is_others or is_sites or not _JOBID.fullmatch(jobid):
            return _Process(start, seen)
        # A batch script has no step id.
        step = values.get("SLURM_STEP_ID", values.get("SLURM_STEPID", ""))
        return _Process(
            start,
            seen,
            jobid,
            step if _STEP.fullmatch(step) else "batch",
            procfs.uid(self._proc, pid),
            values.get("SLURM_CLUSTER_NAME", "")[:_LONGEST_NAME],
        )
