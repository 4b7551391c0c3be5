"""Finds the jobs of this node: in control groups, by processes' environments, and by maps.

`SLURM_JOB_ID` in an environment identifies a job if Slurm uses no control groups
(proctrack/linuxproc), and always for a run of hpml's local backend, whose SLURM_CLUSTER_NAME is
`local-` and six digits. Users can write anything into an environment: so a job has only the
processes of the user who used its id first, and the jobs of a user have a limit.

The prolog's map of a job (`identity.read_map`) says that the job lives, with processes or without.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from hpml_exporters.core import procfs
from hpml_exporters.jobs.board import LOCAL_CLUSTER, Jobs, JobSeen
from hpml_exporters.jobs.cgroups import FoundJob, GroupJobs
from hpml_exporters.jobs.identity import Identities, mapped_jobs
from hpml_exporters.options import NodeOptions

_LOG = logging.getLogger(__name__)

MOST_PER_USER = max(64, os.cpu_count() or 1)
"""Jobs of one user that are shown, those that began first; four times as many of all users."""

_MOST = 4 * MOST_PER_USER
_JOBID = re.compile(r"[1-9][0-9]{0,9}")
_STEP = re.compile(r"[0-9]{1,10}")
# The site's own programs, and what they leave running, are not the job's.
_SITES = ("prolog_slurmd", "epilog_slurmd", "prolog_slurmctld", "epilog_slurmctld")
# Those of one machine's jobs that may have the same number: local jobs count from 1 in every
# directory of records, and a machine may be several nodes of a job.
_DISTINCT = ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
_YOUNG_SECONDS = 30.0  # a process that was forked may still start its program


class JobFinder:
    """Looks at control groups and at environments.

    Once a job in a control group was seen, other processes that name a job in their environment,
    such as what outlived it, belong to no job; runs of the local backend still count.

    Args:
        options: where the file systems are, and the one job of an exporter inside of a job.
    """

    def __init__(self, options: NodeOptions) -> None:
        roots = options.roots
        self._is_own = options.job is not None
        self._only = options.job.key if options.job else ""
        self._run = roots.run
        # A Slurm job may have the same number as a local run.
        is_local = options.job is not None and options.job.cluster
        self._groups = None if is_local else GroupJobs(roots.proc, roots.cgroup, self._only)
        self._environments = _Environments(roots.proc, is_own=self._is_own)
        self._identities = Identities(roots, options.job)
        self._has_groups = False
        self._left_out: set[str] = set()
        self._refused: set[str] = set()
        self._warned: set[str] = set()

    def look(self, now: float) -> Jobs:
        """Return the jobs that are here.

        Args:
            now: monotonic seconds.
        """
        found = [] if self._groups is None else self._groups.look(now)
        if found and not self._has_groups:
            self._has_groups = True
            # What was found before may stem from the jobs' prologs: forget it.
            self._identities.keep(())
        if not (self._is_own and self._has_groups):
            found += self._in_environments(found, now)
        if not self._is_own:
            # The prolog's map says that a job lives which has no process here: `salloc` before its
            # first step, and a job between two steps.
            found += map(
                FoundJob, mapped_jobs(self._run, {job.key for job in found} | self._refused)
            )
        parts: dict[str, list[FoundJob]] = {}
        for job in found:
            parts.setdefault(job.key, []).append(job)
        self._identities.keep(parts)
        return Jobs({key: self._merged(jobs, now) for key, jobs in parts.items()})

    def _in_environments(self, in_groups: Sequence[FoundJob], now: float) -> list[FoundJob]:
        covered = {pid for job in in_groups for pids in job.steps.values() for pid in pids}
        processes = self._environments.look(covered, now)
        if self._has_groups:
            before = self._left_out
            self._left_out = {one.jobid for one in processes.values() if not one.cluster}
            self._left_out -= {job.jobid for job in in_groups}
            for jobid in sorted(before & self._left_out)[:1]:  # not one that is just beginning
                self._warn_once(
                    "groups",
                    f"processes of job {jobid} are in no control group, unlike those of other jobs"
                    " of this node: they are not counted",
                )
            processes = {pid: one for pid, one in processes.items() if one.cluster}
        jobs: dict[str, FoundJob] = {}
        of_user = Counter[int]()
        self._refused = set()
        # Oldest first: a job id belongs to the user whose process had it first, so nobody can join
        # another user's job by setting a variable.
        for pid, one in sorted(processes.items(), key=lambda item: item[1].start):
            job = FoundJob(one.jobid, one.uid, one.cluster)
            if self._only not in {"", job.key}:
                continue
            if job.key not in jobs:
                if of_user[one.uid] >= MOST_PER_USER or len(jobs) >= _MOST:
                    self._refused.add(job.key)
                    continue
                of_user[one.uid] += 1
            job = jobs.setdefault(job.key, job)
            if job.uid == one.uid:
                job.steps.setdefault(one.step, set()).add(pid)
        if self._refused:
            self._warn_once(
                "limit",
                f"{len(self._refused)} jobs are not shown: the limit for jobs without control"
                f" groups is {MOST_PER_USER} per user, {_MOST} in all",
            )
        return list(jobs.values())

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _LOG.warning("collector jobs: %s", message)

    def _merged(self, parts: Sequence[FoundJob], now: float) -> JobSeen:
        """Merge the parts of a job that several slurmd of this machine have."""
        steps: dict[str, set[int]] = {}
        for part in parts:
            for step, pids in part.steps.items():
                steps.setdefault(step, set()).update(pids)
        facts = self._identities.facts(replace(parts[0], steps=steps), now)
        return JobSeen(
            replace(facts, cluster=parts[0].cluster),
            tuple(part.groups for part in parts if part.groups),
            {step: frozenset(pids) for step, pids in steps.items()},
            frozenset[int]().union(*steps.values()),
        )


@dataclass(frozen=True)
class _Process:
    """The job named in a process's environment; `cluster` is empty unless it is a local run."""

    start: int
    jobid: str
    step: str
    uid: int
    cluster: str


class _Environments:
    """Reads the environment of each process once.

    Args:
        proc: mount point of procfs.
        is_own: leave out processes of other jobs that may have our own job's number.
    """

    def __init__(self, proc: str, *, is_own: bool) -> None:
        self._proc = proc
        # If one machine is several nodes, an exporter's options name its node.
        names = _DISTINCT if is_own else ("SLURMD_NODENAME",)
        self._own = {name: os.environ[name] for name in names if name in os.environ}
        self._known: dict[int, _Process] = {}
        self._jobless: dict[int, float] = {}  # when they were first seen

    def look(self, covered: Container[int], now: float) -> dict[int, _Process]:
        """Return the processes that name a job.

        Args:
            covered: processes that are left out.
            now: monotonic seconds.
        """
        pids = procfs.process_ids(self._proc)
        self._known = {pid: self._known[pid] for pid in self._known.keys() & pids}
        self._jobless = {pid: self._jobless[pid] for pid in self._jobless.keys() & pids}
        for pid in pids:
            known = self._known.get(pid)
            if pid in covered or now - self._jobless.get(pid, now) >= _YOUNG_SECONDS:
                self._known.pop(pid, None)
            # Process ids are reused: only the start time tells a new process from the known one.
            elif known is None or not self._is_same(pid, known):
                self._read(pid, now)
        return self._known

    def _is_same(self, pid: int, known: _Process) -> bool:
        stat = procfs.stat(self._proc, pid)
        return stat is not None and stat.start == known.start

    def _read(self, pid: int, now: float) -> None:
        self._known.pop(pid, None)
        values = procfs.environment(self._proc, pid)
        jobid = values.get("SLURM_JOB_ID", "")
        is_others = any(values.get(name, value) != value for name, value in self._own.items())
        is_sites = values.get("SLURM_SCRIPT_CONTEXT") in _SITES
        stat = procfs.stat(self._proc, pid) if _JOBID.fullmatch(jobid) else None
        if stat is None or is_others or is_sites:
            self._jobless.setdefault(pid, now)
            return
        self._jobless.pop(pid, None)
        cluster = values.get("SLURM_CLUSTER_NAME", "")
        # A batch script has no step id.
        step = values.get("SLURM_STEP_ID", values.get("SLURM_STEPID", ""))
        self._known[pid] = _Process(
            stat.start,
            jobid,
            step if _STEP.fullmatch(step) else "batch",
            procfs.uid(self._proc, pid),
            cluster if LOCAL_CLUSTER.fullmatch(cluster) else "",
        )
