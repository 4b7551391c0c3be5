"""The job directories below Slurm's control groups, listed again only where they changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpml_exporters.jobs import raw
from hpml_exporters.jobs.hierarchy import JobsRoot, is_uid

__all__ = ["GroupJob", "JobTree"]

_DIRECTORIES = 2000  # of one job: a job can make groups of its own in version 2
_LEAF_LOOKS = 4  # after which a group with processes is looked at for having got groups in it
_EMPTY_LOOKS = 3  # between two steps a job may have no process; after that it is a ruin
_HAS_LINKS = 2  # a directory's link count says how many it holds, but not on every file system


@dataclass
class GroupJob:
    """A job as one hierarchy of control groups shows it.

    Attributes:
        path: its directory.
        root: where it was found.
        jobid: Slurm's number of it.
        uid: of the user, -1 where the path does not say.
        steps: process ids by step, without Slurm's own.
        daemons: process ids of its slurmstepd.
        alive: whether any process is in its groups, be it one that has no id for us.
    """

    path: str
    root: JobsRoot
    jobid: str
    uid: int = -1
    steps: dict[str, set[int]] = field(default_factory=dict)
    daemons: set[int] = field(default_factory=set)
    alive: bool = False


class JobTree:
    """Finds jobs by structure: a directory with a child `step_…`, whatever its own name is.

    A directory is listed again when its link count changed, or when one of the groups that were
    in it is gone; so that nothing that comes or goes is missed. All groups with processes are
    read each time.

    Args:
        identify: job id by the process ids of its slurmstepd, for names without a number.
    """

    def __init__(self, identify: Callable[[Iterable[int]], str | None]) -> None:
        self._identify = identify
        self._listed: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._seen: set[str] = set()
        self._names: dict[str, str] = {}
        self._busy: set[str] = set()
        self._alive: dict[str, int] = {}  # the last look at which a job had a process
        self._looks = 0
        self._gone = False

    def jobs(self, roots: Iterable[JobsRoot], only: str = "") -> list[GroupJob]:
        """Return the jobs below some roots.

        Args:
            roots: where to look.
            only: the one job id that is wanted; empty: all.
        """
        self._seen = set()
        self._looks += 1
        found = []
        for root in roots:
            for _ in range(2):
                self._gone = False
                jobs = [self._job(root, path, uid, only) for path, uid in self._candidates(root)]
                # Where one went, another may have come: the link count is the same then.
                if not self._gone:
                    break
            found += [job for job in jobs if job is not None]
        for path in self._listed.keys() - self._seen:
            del self._listed[path]
        for path in self._names.keys() - self._seen:
            del self._names[path]
        for path in self._alive.keys() - self._seen:
            del self._alive[path]
        self._busy &= self._seen
        return found

    def _candidates(self, root: JobsRoot) -> Iterable[tuple[str, int]]:
        if not root.controller:
            yield from ((f"{root.path}/{name}", -1) for name in self._children(root.path))
            return
        for user in self._children(root.path):
            if is_uid(user):
                path = f"{root.path}/{user}"
                yield from ((f"{path}/{name}", int(user[4:])) for name in self._children(path))

    def _job(self, root: JobsRoot, path: str, uid: int, only: str) -> GroupJob | None:
        name = path.rpartition("/")[2]
        number = name[4:] if name.startswith("job_") and name[4:].isdigit() else ""
        if only and number and number != only:
            return None
        for _ in range(2):
            job = GroupJob(path, root, number or self._names.get(path, ""), uid)
            if self._fill(job):
                break
            self._forget(path)
        if job.alive:
            self._alive[path] = self._looks
        # Slurm sometimes leaves the groups of a job behind, which has ended long ago.
        if not job.steps or self._looks - self._alive.get(path, -_EMPTY_LOOKS) >= _EMPTY_LOOKS:
            return None
        if not job.jobid:
            job.jobid = self._identify(sorted(job.daemons)) or ""
            if job.jobid:
                self._names[path] = job.jobid
        return job if job.jobid and only in {"", job.jobid} else None

    def _fill(self, job: GroupJob) -> bool:
        """Read the groups of a job; return False where what was listed is no longer so."""
        steps = [name for name in self._children(job.path) if name.startswith("step_")]
        if not steps:
            return True
        whole = True
        if job.root.controller:
            # Version 1 leaves slurmstepd in the job's own group.
            whole = self._read(job, job.path, job.daemons)
        for step in steps:
            whole = self._walk(job, f"{job.path}/{step}", step[5:]) and whole
        return whole

    def _walk(self, job: GroupJob, path: str, step: str) -> bool:
        pids = job.steps.setdefault(step, set())
        whole = True
        left, count = [path], 0
        while left and count < _DIRECTORIES:
            here = left.pop()
            count += 1
            children = self._children(here)
            left += [f"{here}/{name}" for name in children]
            # In version 2 Slurm leaves none between the step and its tasks.
            if job.root.controller or not children or "/user/task_" in here[len(path) :]:
                keeper = here == f"{path}/slurm" and not job.root.controller
                whole = self._read(job, here, job.daemons if keeper else pids) and whole
        return whole

    def _read(self, job: GroupJob, path: str, into: set[int]) -> bool:
        found = raw.numbers(f"{path}/cgroup.procs")
        if found is None:
            self._busy.discard(path)
            there = os.path.isdir(path)  # and not for us: looking again would not help
            job.alive = job.alive or there
            return there
        if found:
            job.alive = True
            self._busy.add(path)
            into.update(found)
            into.discard(0)  # a process outside of our process-id namespace
        else:
            self._busy.discard(path)
        return True

    def _children(self, path: str) -> tuple[str, ...]:
        known = self._listed.get(path)
        if known and not known[1] and path in self._busy and self._looks % _LEAF_LOOKS:
            self._seen.add(path)
            return ()
        try:
            links = os.stat(path).st_nlink
        except OSError:
            self._listed.pop(path, None)
            self._listed.pop(path.rpartition("/")[0], None)
            self._gone = True
            return ()
        self._seen.add(path)
        if known is not None and known[0] == links >= _HAS_LINKS:
            return known[1]
        names = tuple(sorted(raw.subdirectories(path) or ()))
        self._listed[path] = (links, names)
        return names

    def _forget(self, path: str) -> None:
        for one in [one for one in self._listed if one == path or one.startswith(f"{path}/")]:
            del self._listed[one]
