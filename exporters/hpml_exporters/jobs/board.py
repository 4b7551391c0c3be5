"""The jobs of this node as one immutable view, and the board that collectors read it from."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from types import MappingProxyType
from typing import Any

from hpml_exporters.core import procfs

_LONGEST_TEXT = 256
LOCAL_CLUSTER = re.compile(r"local-[0-9a-f]{6}")  # what hpml's local backend calls itself


@dataclass(frozen=True)
class JobFacts:
    """A job as the prolog's map, its environment or its node agent describes it.

    An unknown text is empty and an unknown number is 0, unless the field's line differs.

    Attributes:
        jobid: Slurm's number of the job (of an array task: its own, not the array's).
        uid: numeric user, -1 unknown.
        user: name of the user.
        account: Slurm's account.
        partition: Slurm's partition.
        qos: quality of service.
        name: name of the job.
        array_job: job id of the array, empty for other jobs.
        array_task: index in the array, empty for other jobs.
        start: when the job started, seconds since the epoch.
        end: when its time limit ends it, seconds since the epoch.
        ranks: world size.
        gpus: allocated GPUs as they were named: minor numbers ("0"), UUIDs ("GPU-…", "MIG-…") or
            PCI addresses; None: unknown, an empty tuple: the job has none.
        run: hpml's run identifier, empty for others' jobs.
        sweep: name of the sweep the run belongs to, empty for none.
        point: the sweep's point, empty for none.
        cluster: the records of a run of hpml's local backend, as local-3fa9c1; empty for others.
    """

    jobid: str
    uid: int = -1
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    name: str = ""
    array_job: str = ""
    array_task: str = ""
    start: int = 0
    end: int = 0
    ranks: int = 0
    gpus: tuple[str, ...] | None = None
    run: str = ""
    sweep: str = ""
    point: str = ""
    cluster: str = ""

    @property
    def key(self) -> str:
        """Its key in `Jobs`, and its label `jobid`.

        Runs of the local backend are counted separately: their ids are like local-3fa9c1-7.
        """
        return job_key(self.jobid, self.cluster)


@dataclass(frozen=True)
class JobSeen:
    """A job that is on this node now.

    Attributes:
        facts: who and what, as far as known.
        groups: its control groups, a mapping per slurmd of this machine that has the job: one
            directory per controller in version 1 (`{"memory": …, "cpuacct": …}`), one under `""`
            in version 2; empty without control groups.
        steps: process ids by step: "batch", "extern", "0", …
        pids: process ids of all steps.
    """

    facts: JobFacts
    groups: tuple[Mapping[str, str], ...] = ()
    steps: Mapping[str, frozenset[int]] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()


class Jobs:
    """All jobs of the node at one moment.

    Attributes:
        by_id: the jobs by `JobFacts.key`.
    """

    def __init__(self, by_id: Mapping[str, JobSeen]) -> None:
        self.by_id: Mapping[str, JobSeen] = MappingProxyType(dict(by_id))
        self._of_pid = {pid: jobid for jobid, job in self.by_id.items() for pid in job.pids}

    def job_of(self, pid: int) -> str | None:
        """Return the key in `by_id` of the job that a process belongs to."""
        return self._of_pid.get(pid)


class JobsBoard:
    """The latest view of the jobs. One collector posts it, all others read it.

    A view is never changed, only replaced, so reading takes no lock.
    """

    def __init__(self) -> None:
        self._now = Jobs({})
        self._posted = threading.Event()

    @property
    def now(self) -> Jobs:
        """The latest view; empty before the first was posted."""
        return self._now

    def post(self, jobs: Jobs) -> None:
        """Replace the view."""
        self._now = jobs
        self._posted.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the first view; returns whether it is there."""
        return self._posted.wait(seconds)


def job_key(jobid: str, cluster: str) -> str:
    """Return the `JobFacts.key` of a job id; `cluster` is empty unless it is a local run."""
    return f"{cluster}-{jobid}" if cluster else jobid


def facts_of(data: Mapping[str, object]) -> JobFacts:
    """Return the facts in a parsed JSON object; fields with a wrong type count as unknown.

    Raises:
        ValueError: it names no job.
    """
    jobid = str(data.get("jobid", ""))
    if not jobid.isascii() or not jobid.isdigit():
        raise ValueError("jobid: must be a number")
    known: dict[str, Any] = {}
    for one in fields(JobFacts):
        value = data.get(one.name)
        if one.name == "gpus" and isinstance(value, list):
            known["gpus"] = tuple(map(str, value))
        elif isinstance(one.default, str) and isinstance(value, str):
            known[one.name] = value[:_LONGEST_TEXT]
        # Not isinstance: in Python `true` is an int, but neither a time nor a number of ranks.
        elif type(value) is type(one.default):
            known[one.name] = value
    return JobFacts(jobid, **known)


# Jobs in Slurm's control groups, in every layout.
#
# Version 1: `<controller>/slurm[_<node>]/uid_<uid>/<job>`; CgroupPrepend may give the first
# directory another name. Version 2: `system.slice/[<node>_]slurmstepd.scope/<job>`, in the slice
# that CgroupSlice names, or below the group of a container.
#
# A job is recognised by structure, a directory with a child `step_…`: since Slurm 26.05 its own
# name may be a SLUID, without the job id.

_CONTROLLERS = ("freezer", "memory", "cpuacct", "cpuset", "devices", "cpu", "pids", "blkio")
"""Of version 1, in the order in which jobs are looked for: proctrack/cgroup uses the freezer."""

_SCOPE = "slurmstepd.scope"
_SEARCH_SECONDS = 30.0  # between two searches for the directories that hold jobs
_STEPD = b"slurmstepd: ["
_JOB = re.compile(r"job_([0-9]+)")  # a group is named so, or by SLUID
_STEPDS = 32  # processes of slurmstepd that are asked for theirs
_MOST_GROUPS = 2000  # of one step: a job may create further groups
_RELIST_LOOKS = 6  # after which the groups of a job are listed again in any case
_EMPTY_LOOKS = 3  # between two steps a job may have no process; later its groups are left-overs


@dataclass
class FoundJob:
    """A job as found in one slurmd's control groups, or in the environments of processes.

    Attributes:
        jobid: Slurm's number of it.
        uid: its user; -1 unknown.
        cluster: the records of a run of hpml's local backend; empty for others.
        groups: its directories by controller, one under `""` in version 2; empty without.
        steps: process ids by step, without Slurm's own.
    """

    jobid: str
    uid: int = -1
    cluster: str = ""
    groups: dict[str, str] = field(default_factory=dict)
    steps: dict[str, set[int]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its key on this node, as `JobFacts.key`."""
        return job_key(self.jobid, self.cluster)


@dataclass(frozen=True)
class _Root:
    """A directory whose children are jobs (version 2), or users with jobs (version 1).

    Attributes:
        mount: mount point of its hierarchy.
        below: path below that, the same for all controllers.
        controller: of version 1; empty: version 2.
    """

    mount: str
    below: str
    controller: str = ""

    @property
    def path(self) -> str:
        return self.mount + self.below


@dataclass
class _Known:
    """State of a job's directory between two searches.

    Attributes:
        jobid: empty as long as it is unknown.
        links: link count of the directory when its groups were listed; -1: list them again.
        groups: those that may have processes, each with its step; slurmstepd's have the step "".
        relist_at: search that lists them again in any case.
        alive_at: last search that found a process.
    """

    jobid: str
    links: int = -1
    groups: list[tuple[str, str]] = field(default_factory=list)
    relist_at: int = 0
    alive_at: int = -_EMPTY_LOOKS


class GroupJobs:
    """Finds the jobs in control groups of all slurmd on this machine.

    Args:
        proc: mount point of procfs.
        cgroup: of version 2, or the directory with a directory per controller of version 1.
        only: the only job id to find; empty: all.
    """

    def __init__(self, proc: str, cgroup: str, only: str = "") -> None:
        self._proc, self._cgroup, self._only = proc, cgroup, only
        self._mounts: dict[str, str] = {}
        self._roots: list[_Root] = []
        self._search_at = 0.0
        self._links: tuple[int, ...] = ()
        self._known: dict[str, _Known] = {}
        self._looks = 0

    def look(self, now: float) -> list[FoundJob]:
        """Return the jobs with control groups, one per slurmd that has the job.

        Args:
            now: monotonic seconds.
        """
        self._search(now)
        self._looks += 1
        before, self._known = self._known, {}
        for controller in ("", *_CONTROLLERS):
            found = [
                job
                for root in self._roots
                if root.controller == controller
                for path, uid in _candidates(root)
                if (job := self._job(root, path, uid, before)) is not None
            ]
            if found:
                return found  # the other controllers have the same jobs
        return []

    def _search(self, now: float) -> None:
        """Search for directories of jobs, at intervals or if one may be new."""
        tops = (self._cgroup, f"{self._cgroup}/system.slice", *self._mounts.values())
        links = tuple(map(_links, tops))
        # A directory's link count changes with its subdirectories: a cheap sign of a new slurmd or
        # slice between two full searches.
        if links == self._links and now < self._search_at:
            return
        self._links, self._search_at = links, now + _SEARCH_SECONDS
        self._mounts = _controllers(self._cgroup)
        roots = list(_named_roots(self._cgroup, self._mounts))
        # Site-specific names and the groups of containers are found through a process inside them.
        pids = [os.getpid()] if self._only else islice(self._stepds(), _STEPDS)
        roots += [root for pid in pids for root in self._roots_of(pid)]
        self._roots = list(dict.fromkeys(roots))

    def _stepds(self) -> Iterator[int]:
        for pid in sorted(procfs.process_ids(self._proc)):
            if procfs.text(f"{self._proc}/{pid}/comm") == "slurmstepd":
                yield pid

    def _roots_of(self, pid: int) -> Iterator[_Root]:
        for line in procfs.text(f"{self._proc}/{pid}/cgroup").split("\n"):
            number, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            parts = path.split("/")
            steps = [place for place, part in enumerate(parts) if part.startswith("step_")]
            users = [place for place, part in enumerate(parts) if _is_user(part)]
            if number == "0" and steps:
                for mount in _unified(self._cgroup):
                    yield _Root(mount, "/".join(parts[: steps[0] - 1]))
            elif users:
                for name in set(names.split(",")) & self._mounts.keys():
                    yield _Root(self._mounts[name], "/".join(parts[: users[0]]), name)

    def _job(self, root: _Root, path: str, uid: int, before: dict[str, _Known]) -> FoundJob | None:
        numbered = _JOB.fullmatch(path.rpartition("/")[2])
        known = before.get(path) or _Known(numbered[1] if numbered else "")
        if self._only and known.jobid not in {"", self._only}:
            return None
        self._known[path] = known
        members = self._members(root, path, known)
        # A process outside our process-id namespace reads as 0: a sign of life, but nothing to look
        # up in /proc, so it is left out below.
        if any(pids for _, pids in members):
            known.alive_at = self._looks
        steps: dict[str, set[int]] = {}
        for step, pids in members:
            steps.setdefault(step, set()).update(set(pids) - {0})
        daemons = steps.pop("", set())
        # Slurm sometimes leaves the groups of an ended job behind. That job would stay for ever,
        # and the files of its user's running jobs in /dev/shm would count for it.
        if not steps or self._looks - known.alive_at >= _EMPTY_LOOKS:
            return None
        if not known.jobid:
            # Keep the id: slurmstepd may end before the last processes of its job.
            names = (self._stepd_job(pid) for pid in sorted(daemons))
            known.jobid = next(filter(None, names), "")
        if not known.jobid or self._only not in {"", known.jobid}:
            return None
        below = path[len(root.mount) :]
        mounts = self._mounts if root.controller else {"": root.mount}
        groups = {
            # Slurm creates a job's groups one controller after the other: skip what is not there
            # yet.
            name: mount + below
            for name, mount in mounts.items()
            if mount == root.mount or os.path.isdir(mount + below)
        }
        return FoundJob(known.jobid, uid, groups=groups, steps=steps)

    def _stepd_job(self, pid: int) -> str:
        """Return the job id in the title of a slurmstepd; empty for any other process.

        The title is `slurmstepd: [<jobid>.<step>]`, with the job's number also where its control
        group is named by SLUID (Slurm 26.05 and later).
        """
        title = procfs.read_or_empty(f"{self._proc}/{pid}/cmdline")
        jobid = title[len(_STEPD) :].partition(b".")[0]
        return jobid.decode() if title.startswith(_STEPD) and jobid.isdigit() else ""

    def _members(self, root: _Root, path: str, known: _Known) -> list[tuple[str, list[int]]]:
        for _ in range(2):  # again if a group was removed since they were listed
            links = _links(path)
            # The link count of the job's directory changes with its steps, which saves walking
            # through all groups at each look. It misses groups further down, so list again
            # regularly. Some file systems report 1 for every directory: there, list each time.
            if not 1 < links == known.links or self._looks >= known.relist_at:
                groups = list(_groups(root, path))
                # A new job gets its groups one by one: look again soon until they stay the same.
                settled = groups == known.groups
                known.groups, known.links = groups, links
                known.relist_at = self._looks + (_RELIST_LOOKS if settled else 1)
            members = [(step, procfs.processes_in(group)) for step, group in known.groups]
            if all(pids is not None for _, pids in members):
                break
            known.links = -1
        return [(step, pids or []) for step, pids in members]


def _groups(root: _Root, job: str) -> Iterator[tuple[str, str]]:
    if root.controller:
        yield "", job  # version 1 leaves slurmstepd here
    for name in procfs.subdirectories(job):
        if name.startswith("step_"):
            of_step = _groups_of_step(f"{job}/{name}", version_1=bool(root.controller))
            for path, is_stepds in islice(of_step, _MOST_GROUPS):
                yield "" if is_stepds else name[5:], path


def _groups_of_step(step: str, *, version_1: bool) -> Iterator[tuple[str, bool]]:
    left = [step]
    while left:
        path = left.pop()
        children = procfs.subdirectories(path)
        left += [f"{path}/{name}" for name in children]
        # In version 2 only the leaves have processes, except in groups that a task made itself.
        if version_1 or not children or "/user/task_" in path[len(step) :]:
            yield path, path == f"{step}/slurm" and not version_1


def _candidates(root: _Root) -> Iterator[tuple[str, int]]:
    """Yield the directories that may be jobs, each with its user; -1 where the path has none."""
    for name in procfs.subdirectories(root.path):
        path = f"{root.path}/{name}"
        if not root.controller:
            yield path, -1
        elif _is_user(name):
            yield from ((f"{path}/{job}", int(name[4:])) for job in procfs.subdirectories(path))


def _controllers(cgroup: str) -> dict[str, str]:
    """Return the mount points of the controllers of version 1 by name; several may share one."""
    found = {}
    try:
        names = sorted(os.listdir(cgroup))  # with links, as distributions have for joined ones
    except OSError:
        return {}
    for name in names:
        for controller in name.split(","):
            path = f"{cgroup}/{name}"
            if controller in _CONTROLLERS and os.path.exists(f"{path}/cgroup.procs"):
                found[controller] = path
    return found


def _unified(cgroup: str) -> list[str]:
    """Return the mount points of version 2: the whole tree, or the part of a hybrid."""
    found = (cgroup, f"{cgroup}/unified")
    return [path for path in found if os.path.exists(f"{path}/cgroup.controllers")]


def _named_roots(cgroup: str, mounts: Mapping[str, str]) -> Iterator[_Root]:
    """Yield the directories that hold jobs, if they have Slurm's usual names."""
    for mount in _unified(cgroup):
        for top in procfs.subdirectories(mount):
            if top.endswith(".slice"):
                for name in procfs.subdirectories(f"{mount}/{top}"):
                    if name.endswith(_SCOPE):
                        yield _Root(mount, f"/{top}/{name}")
    for controller, mount in mounts.items():
        for name in procfs.subdirectories(mount):
            if name == "slurm" or name.startswith("slurm_"):
                yield _Root(mount, f"/{name}", controller)


def _is_user(name: str) -> bool:
    """Return whether a directory of version 1 belongs to a user."""
    return name.startswith("uid_") and name[4:].isdigit()


def _links(path: str) -> int:
    """Return the link count of a directory, which grows with each directory in it; 0 if gone."""
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0
