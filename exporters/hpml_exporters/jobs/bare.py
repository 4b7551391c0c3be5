"""Jobs without control groups: by SLURM_JOB_ID in the environment of processes we may read.

That is proctrack/linuxproc, a laptop, and hpml's local backend. Anybody can write any job id into
an environment of his own, so a job has only the processes of the user who had it first, and there
are only so many jobs of a user.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hpml_exporters.jobs import process, raw

__all__ = ["MOST", "OWN", "BareJob", "BareJobs"]

OWN = (b"SLURM_CLUSTER_NAME", b"SLURMD_NODENAME")
"""Variables by which the exporter of one job knows its own from others of that number: local jobs
count from 1 in every directory of records, and a machine may be several nodes of one job."""

MOST = max(64, os.cpu_count() or 1)
"""Jobs of one user that are looked at, those that began first; four times as many of all users."""

_MOST_OF_ALL = 4 * MOST
_JOBID = re.compile(rb"[1-9][0-9]{0,9}")
_STEP = re.compile(rb"[0-9]{1,10}")
# Processes of a prolog or an epilog, and what it leaves behind, are the site's, not the job's.
_SITES = (b"prolog_slurmd", b"epilog_slurmd", b"prolog_slurmctld", b"epilog_slurmctld")
_TOLD_AGAIN_SECONDS = 3600.0
_CLUSTER = 256  # characters of its name
_YOUNG_SECONDS = 30.0  # a process may still start its program, and that brings the environment
_CHECK_EVERY = 12  # looks after which an id is checked for being another process by now


@dataclass
class BareJob:
    """A job as its processes show it.

    Attributes:
        jobid: its number.
        uid: whose processes it has.
        cluster: SLURM_CLUSTER_NAME, for local jobs another one in every directory of records; empty
            where no process says it.
        steps: process ids by step.
    """

    jobid: str
    uid: int
    cluster: str = ""
    steps: dict[str, set[int]] = field(default_factory=dict)


@dataclass
class _Known:
    start: int
    seen: float
    jobid: str = ""
    step: str = ""
    uid: int = -1
    cluster: str = ""


class BareJobs:
    """Remembers what each process said, so that only new ones are read.

    Args:
        proc: mount point of procfs.
        own: variables that have to have these values where a process has them; see `OWN`.
    """

    def __init__(self, proc: str, own: Mapping[bytes, bytes] = MappingProxyType({})) -> None:
        self._proc = proc
        self._own = own
        self._known: dict[int, _Known] = {}
        self._looks = 0
        self._told: float | None = None

    def forget(self) -> None:
        """Drop everything: the jobs have control groups after all."""
        self._known.clear()

    def jobs(self, now: float, only: str = "") -> list[BareJob]:
        """Return the jobs that have a process.

        Args:
            now: monotonic seconds.
            only: the one job id that is wanted; empty: all.
        """
        self._looks += 1
        try:
            pids = [int(name) for name in os.listdir(self._proc) if name.isdigit()]
        except OSError:
            return []
        known = self._known
        for pid in known.keys() - set(pids):
            del known[pid]
        for pid in pids:
            one = known.get(pid)
            if one is None or self._to_read(pid, one, now):
                self._look(pid, now)
        return self._found(now, only)

    def _found(self, now: float, only: str) -> list[BareJob]:
        known = self._known
        found: dict[str, BareJob] = {}
        beyond: set[str] = set()
        of_user = Counter[int]()
        theirs = [item for item in known.items() if item[1].jobid and only in {"", item[1].jobid}]
        for pid, one in sorted(theirs, key=lambda item: item[1].start):
            if one.jobid not in found:
                if of_user[one.uid] >= MOST or len(found) >= _MOST_OF_ALL:
                    beyond.add(one.jobid)
                if one.jobid in beyond:
                    continue
                found[one.jobid] = BareJob(one.jobid, one.uid)
                of_user[one.uid] += 1
            job = found[one.jobid]
            if job.uid == one.uid:
                job.cluster = job.cluster or one.cluster
                job.steps.setdefault(one.step, set()).add(pid)
        if beyond:
            self._tell(len(beyond), now)
        return list(found.values())

    def _tell(self, beyond: int, now: float) -> None:
        """Say that some jobs are not shown, once an hour."""
        if self._told is not None and now - self._told < _TOLD_AGAIN_SECONDS:
            return
        self._told = now
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens
            sys.stderr.write(
                f"hpml: collector jobs: {beyond} jobs are not shown: without control groups at most"
                f" {MOST} of a user and {_MOST_OF_ALL} in all are\n"
            )
            sys.stderr.flush()

    def _to_read(self, pid: int, one: _Known, now: float) -> bool:
        young = not one.jobid and now - one.seen < _YOUNG_SECONDS
        return young or (pid + self._looks) % _CHECK_EVERY == 0

    def _look(self, pid: int, now: float) -> None:
        stat = process.stat(self._proc, pid)
        if stat is None:
            self._known.pop(pid, None)
            return
        one = self._known.get(pid)
        if one is None or one.start != stat.start:
            one = self._known[pid] = _Known(stat.start, now)
        elif one.jobid or now - one.seen >= _YOUNG_SECONDS:
            return
        values = process.environment(self._proc, pid)
        if not values:
            # A program that may not be read (setuid) is its parent's work.
            parent = self._known.get(stat.parent)
            if parent is not None and values is None:
                one.jobid, one.step, one.uid = parent.jobid, parent.step, parent.uid
                one.cluster = parent.cluster
            return
        jobid = values.get(b"SLURM_JOB_ID", b"")
        strange = any(values.get(name, value) != value for name, value in self._own.items())
        strange = strange or values.get(b"SLURM_SCRIPT_CONTEXT") in _SITES
        if not _JOBID.fullmatch(jobid) or strange:
            return
        uid = process.uid(self._proc, pid)
        if uid is not None:
            one.jobid = jobid.decode("ascii")
            one.step = step_of(values)
            one.uid = uid
            cluster = values.get(b"SLURM_CLUSTER_NAME", b"")
            one.cluster = cluster[:_CLUSTER].decode("utf-8", "replace")


def step_of(values: dict[bytes, bytes]) -> str:
    """Return the step that an environment names; a batch script has none, and is `batch`."""
    step = values.get(b"SLURM_STEP_ID", values.get(b"SLURM_STEPID", b""))
    return step.decode("ascii") if _STEP.fullmatch(step) else "batch"


def stepds(proc: str) -> list[int]:
    """Return the process ids of all slurmstepd, by their short names."""
    try:
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return []
    found = []
    for pid in pids:
        try:
            if raw.read(f"{proc}/{pid}/comm") == b"slurmstepd\n":
                found.append(int(pid))
        except PermissionError:
            continue
    return found
