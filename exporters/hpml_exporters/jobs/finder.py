"""Finds the jobs of this node: in control groups, by processes' environments, and by maps.

`SLURM_JOB_ID` in an environment identifies a job if Slurm uses no control groups
(proctrack/linuxproc), and always for a run of hpml's local backend, whose SLURM_CLUSTER_NAME is
`local-` and six digits. Users can write anything into an environment, so a job has only the
processes of the user who used its id first, and the number of jobs per user is limited.

The prolog's map of a job (`identity.read_map`) says that the job lives, with processes or without.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hpml_exporters.core import procfs
from hpml_exporters.jobs.board import (
    LOCAL_CLUSTER,
    FoundJob,
    GroupJobs,
    JobFacts,
    Jobs,
    JobSeen,
    facts_of,
)
from hpml_exporters.options import NodeOptions, Roots
from hpml_orchestrator.records.files import names_in

# Whose a job is: the prolog's map, the user of its processes, and their environment.

LARGEST_MAP = 16384  # bytes; templates/prolog writes less than 4 KiB
# In place of a map there may be a link to another file, or a FIFO that would block.
_MAP_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAP_NAME = re.compile(r"[1-9][0-9]{0,9}\.json", re.ASCII)
_MOST_MAPS = 4096
_OVERTIME_SECONDS = 86400.0
_SCHEMA = 1
_VARIABLES = {
    "account": "SLURM_JOB_ACCOUNT",
    "partition": "SLURM_JOB_PARTITION",
    "qos": "SLURM_JOB_QOS",
    "name": "SLURM_JOB_NAME",
    "array_job": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "sweep": "HPML_SWEEP",
    "point": "HPML_POINT",
}
_NUMBERS = {"start": "SLURM_JOB_START_TIME", "end": "SLURM_JOB_END_TIME", "ranks": "WORLD_SIZE"}
_NAME_WAIT_SECONDS = 0.2
_NAME_RETRY_SECONDS = 600.0


@dataclass
class _Known:
    """State of a job between two searches.

    Attributes:
        whose: its user when it was found: without control groups the next job with this number
            may be another user's.
        uid: of its user as its processes show it; -1 unknown.
        looks: since this user was known.
        told: the facts in the environment of its processes.
        pids: its processes at the last look that found any.
    """

    whose: int
    uid: int = -1
    looks: int = 0
    told: JobFacts | None = None
    pids: frozenset[int] = frozenset()


class Identities:
    """Finds out and remembers each job's user, account, run and GPUs.

    Args:
        roots: where procfs and the prolog's maps are.
        own: the node agent's facts about the only job to export; None: all jobs.
        names: names of users; by default the system's.
    """

    def __init__(
        self, roots: Roots, own: JobFacts | None = None, names: UserNames | None = None
    ) -> None:
        self._roots, self._own = roots, own
        self._names = names or UserNames()
        self._known: dict[str, _Known] = {}

    def keep(self, keys: Collection[str]) -> None:
        """Forget all jobs but these, by their `FoundJob.key`."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def facts(self, job: FoundJob, now: float) -> JobFacts:
        """Return the facts about a job.

        The environment, which users can change, only completes the map's or the agent's facts.

        Args:
            job: as found, merged from all slurmd of this machine.
            now: monotonic seconds.
        """
        known = self._known.get(job.key)
        if known is None or known.whose != job.uid:
            known = self._known[job.key] = _Known(job.uid, job.uid)
        is_certain = job.uid >= 0
        if not is_certain and known.uid <= 0:
            self._find_user(job, known)
        pids = frozenset(pid for step in job.steps.values() for pid in step)
        if pids and known.pids.isdisjoint(pids):
            # New or requeued: its start, its end and its GPUs have changed.
            known.looks, known.told = 0, None
        known.pids = pids or known.pids
        known.looks += 1
        # A rank may begin long after its job: try again after 1, 2, 4, 8, … searches.
        if known.uid >= 0 and known.looks & (known.looks - 1) == 0:
            self._ask(job, known)
        facts = self._own
        if facts is None and not job.cluster:
            facts = read_map(self._roots.run, job.jobid)
        is_settled = is_certain or known.uid > 0
        if facts is not None and is_settled and facts.uid not in {-1, known.uid}:
            facts = None  # a leftover of another job with this number
        facts = facts or JobFacts(job.jobid)
        uid = known.uid if is_settled or facts.uid < 0 else facts.uid
        facts = _completed(facts, known.told)
        return replace(facts, uid=uid, user=facts.user or self._names.name(uid, now))

    def _find_user(self, job: FoundJob, known: _Known) -> None:
        """Take the user from the job's processes.

        A task is root's until slurmstepd's child becomes its user, and Slurm's own process in the
        extern step always is: so root counts only as long as nobody else is seen.
        """
        users = [(step, procfs.uid(self._roots.proc, pid)) for step, pid in _first(job)]
        root = 0 if any(uid == 0 and step != "extern" for step, uid in users) else -1
        uid = next((uid for _, uid in users if uid > 0), root)
        if uid != known.uid:
            known.uid, known.looks, known.told = uid, 0, None

    def _ask(self, job: FoundJob, known: _Known) -> None:
        for step, pid in _first(job):
            if procfs.uid(self._roots.proc, pid) == known.uid:
                values = procfs.environment(self._roots.proc, pid)
                if values.get("SLURM_JOB_ID") == job.jobid:
                    told = _told(job.jobid, values)
                    # Prefer the agent's list: it has read the devices.
                    if self._own is None:
                        told = replace(told, gpus=_gpus(step, values))
                    known.told = _completed(known.told or told, told)


class UserNames:
    """Names of users; their directory service may be slow or down.

    A separate thread looks them up; callers wait only briefly.

    Args:
        lookup: returns a name by number; raises KeyError for an unknown user, OSError on failure.
    """

    def __init__(self, lookup: Callable[[int], str] | None = None) -> None:
        self._lookup = lookup or _system_name
        self._known: dict[int, str] = {}
        self._retry_at: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def name(self, uid: int, now: float) -> str:
        """Return the name of a user; empty as long as it is unknown.

        Args:
            uid: of the user; negative: unknown.
            now: monotonic seconds.
        """
        if uid < 0 or uid in self._known or now < self._retry_at.get(uid, now):
            return self._known.get(uid, "")
        # One lookup at a time: a directory service that hangs must not collect threads.
        if self._thread is None or not self._thread.is_alive():
            self._retry_at[uid] = now + _NAME_RETRY_SECONDS
            self._thread = threading.Thread(target=self._ask, args=(uid,), daemon=True)
            self._thread.start()
            self._thread.join(_NAME_WAIT_SECONDS)
        return self._known.get(uid, "")

    def _ask(self, uid: int) -> None:
        try:
            self._known[uid] = self._lookup(uid)
        except KeyError:
            self._known[uid] = str(uid)
        except OSError:
            pass  # asked again after `_NAME_RETRY_SECONDS`


def _system_name(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def read_map(run: str, jobid: str) -> JobFacts | None:
    """Return the facts in the prolog's map `{run}/jobs/<jobid>.json`; None if it is not trusted.

    It is trusted if it and its directory belong to root or this process's user, nobody else may
    write to them, and it is a small regular file about that job, written since boot.
    """
    directory = f"{run}/jobs"
    try:
        descriptor = os.open(f"{directory}/{jobid}.json", _MAP_FLAGS)
    except OSError:
        return None
    with open(descriptor, "rb") as stream:
        # Check the open file: its name could point to another one by now.
        about = os.fstat(descriptor)
        is_trusted = stat.S_ISREG(about.st_mode) and all(
            one.st_uid in {0, os.geteuid()} and not one.st_mode & _OTHERS_WRITE
            for one in (about, os.stat(directory))
        )
        # Job ids may start over, and where /run is on a disk it survives a reboot.
        is_old = about.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 1
        if not is_trusted or is_old or about.st_size > LARGEST_MAP:
            return None
        # A name that was cut may end within a character.
        text = stream.read(LARGEST_MAP).decode("utf-8", "replace")
    try:
        values = json.loads(text)
        facts = facts_of(values) if values["schema_version"] == _SCHEMA else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return facts if facts and facts.jobid == jobid else None


def mapped_jobs(run: str, seen: Collection[str]) -> list[str]:
    """Return the ids of further jobs that the prolog's maps in `{run}/jobs` name.

    The epilog removes a job's map. A leftover map counts until the next job on its GPUs, or until a
    day after its time limit, which may have been extended.

    Args:
        run: directory of the node's maps.
        seen: ids of the jobs that were found by their processes.
    """
    names = sorted(names_in(f"{run}/jobs"))[:_MOST_MAPS]
    jobids = [name.removesuffix(".json") for name in names if _MAP_NAME.fullmatch(name)]
    maps = [facts for jobid in jobids if (facts := read_map(run, jobid)) is not None]
    newest: dict[str, JobFacts] = {}
    for facts in sorted(maps, key=lambda one: (one.jobid in seen, one.start, int(one.jobid))):
        newest.update(dict.fromkeys(facts.gpus or (), facts))
    now = time.time()
    return [
        facts.jobid
        for facts in maps
        if facts.jobid not in seen
        and (not facts.end or now < facts.end + _OVERTIME_SECONDS)
        and all(newest[gpu] is facts for gpu in facts.gpus or ())
    ]


def _first(job: FoundJob) -> Iterable[tuple[str, int]]:
    """Yield two processes of each step, with its name; the extern step, which is Slurm's, last."""
    for step, pids in sorted(job.steps.items(), key=lambda one: one[0] == "extern"):
        yield from ((step, pid) for pid in sorted(pids)[:2])


def _told(jobid: str, values: Mapping[str, str]) -> JobFacts:
    known: dict[str, object] = {
        field: values[name] for field, name in _VARIABLES.items() if name in values
    }
    known["run"] = os.path.basename(values.get("HPML_RUN_DIR", "").rstrip("/"))
    for field, name in _NUMBERS.items():
        if re.fullmatch(r"[0-9]{1,10}", values.get(name, "")):
            known[field] = int(values[name])
    return facts_of({"jobid": jobid, **known})


def _gpus(step: str, values: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of this node's GPUs in the environment of a process; None: unknown.

    A step inherits the batch script's variables, which name the GPUs of the job's first node.
    Numbers are positions in Slurm's list, which `/etc/hpml/gpus` translates, as in the prolog.
    """
    names = tuple(values.get("SLURM_JOB_GPUS", "").split(","))
    nodes = values.get("SLURM_JOB_NUM_NODES") or values.get("SLURM_NNODES")
    if step != "batch" and nodes != "1":
        return None
    if all(name.startswith(("GPU-", "MIG-")) for name in names):
        return names
    if not all(re.fullmatch(r"[0-9]{1,4}", name) for name in names):
        return None
    lines = procfs.text(os.environ.get("HPML_GPUS", "/etc/hpml/gpus")).splitlines()
    table = [line.split()[0] for line in lines if line.strip() and line.lstrip()[0] != "#"]
    places = tuple(map(int, names))
    if not table:
        return tuple(map(str, places))
    return tuple(table[place] for place in places) if max(places) < len(table) else None


def _completed(facts: JobFacts, more: JobFacts | None) -> JobFacts:
    unknown = [one.name for one in fields(facts) if getattr(facts, one.name) == one.default]
    return replace(facts, **{name: getattr(more, name) for name in unknown}) if more else facts


_LOG = logging.getLogger(__name__)

MOST_PER_USER = max(64, os.cpu_count() or 1)
"""Jobs of one user that are shown, those that began first; four times as many of all users."""

_MOST = 4 * MOST_PER_USER
_JOBID = re.compile(r"[1-9][0-9]{0,9}")
_STEP = re.compile(r"[0-9]{1,10}")
# The site's programs, and their remaining processes, do not belong to the job.
_SITES = ("prolog_slurmd", "epilog_slurmd", "prolog_slurmctld", "epilog_slurmctld")
# Those of one machine's jobs that may have the same number: local jobs count from 1 in every
# directory of records, and a machine may be several nodes of a job.
_DISTINCT = ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
_YOUNG_SECONDS = 30.0  # a process that was forked may still start its program


class JobFinder:
    """Finds jobs in control groups and in environments.

    Once a job in a control group was seen, other processes that name a job in their environment,
    such as what outlived it, belong to no job; runs of the local backend still count.

    Args:
        options: mount points, and the only job of an exporter inside a job.
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
        """Return the jobs on this node.

        Args:
            now: monotonic seconds.
        """
        found = [] if self._groups is None else self._groups.look(now)
        if found and not self._has_groups:
            self._has_groups = True
            # Earlier finds may be processes of the jobs' prologs: forget them.
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
