"""Finds the jobs of this node and says whose they are: the source of the jobs' board."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpml_exporters.jobs import bare, hierarchy, process, raw
from hpml_exporters.jobs.bare import BareJobs
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen
from hpml_exporters.jobs.hierarchy import JobsRoot
from hpml_exporters.jobs.maps import JobMaps
from hpml_exporters.jobs.people import People
from hpml_exporters.jobs.tree import GroupJob, JobTree
from hpml_exporters.options import NodeOptions

__all__ = ["JobFinder"]

_SEARCH_SECONDS = 30.0  # between two searches for the directories that hold jobs
_ASKS = 6  # looks at which a job's own environment is asked for what nothing else says
_RECHECKS = 4  # looks at which a new job's other controllers are looked for
_TEXT = 256


@dataclass
class _Job:
    """What is kept of a job from one look to the next.

    Attributes:
        uid: of its user; -1: not known.
        certain: that is what the job's path says, or what made a job of processes.
        cluster: as in `BareJob`; it may be learned late.
        whose: as in `JobSeen`; it stays as it was at first.
        asked: looks at which the job's environment was read.
        said: what it said.
        looks: that saw the job in control groups.
        steps: of the last one.
        groups: directories by controller, for each directory where it was found.
    """

    uid: int = -1
    certain: bool = False
    cluster: str = ""
    whose: str = ""
    asked: int = 0
    said: JobFacts | None = None
    looks: int = 0
    steps: frozenset[str] = frozenset()
    groups: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether the user is known: a process that is root's may yet become its user's."""
        return self.uid > 0 or (self.uid == 0 and self.certain)


class JobFinder:
    """Looks at control groups, and at environments only until there was a job in a group.

    From then on what names a job in its environment alone, as a prolog does, or what outlived its
    job, is none.

    Args:
        options: where the file systems are, and the one job of an exporter inside of a job.
    """

    def __init__(self, options: NodeOptions) -> None:
        self._roots = options.roots
        self._facts = options.job
        self._only = options.job.jobid if options.job else ""
        self._tree = JobTree(self._identify)
        names = bare.OWN if options.job else ()
        own = {name: os.environb[name] for name in names if name in os.environb}
        self._bare = BareJobs(options.roots.proc, own)
        self._maps = JobMaps(options.roots.run, partial(booted, options.roots.proc))
        self._people = People()
        self._kept: dict[str, _Job] = {}
        self._grouped = False
        self._found: list[JobsRoot] = []
        self._search_at: float | None = None
        self._tops: tuple[int, ...] = ()
        self._mounts: dict[str, str] = {}

    def look(self, now: float) -> Jobs:
        """Return the jobs that are here.

        Args:
            now: monotonic seconds.
        """
        self._search(now)
        seen = self._in_groups()
        if not self._grouped:
            seen = self._without_groups(now)
        self._maps.keep(set(seen))
        for jobid in self._kept.keys() - seen.keys():
            del self._kept[jobid]
        return Jobs({jobid: self._describe(job, now) for jobid, job in seen.items()})

    def groups(self, jobid: str) -> tuple[Mapping[str, str], ...]:
        """Return all groups of a job: a mapping as `JobSeen.groups` per slurmd of this machine."""
        kept = self._kept.get(jobid)
        return tuple(kept.groups.values()) if kept else ()

    def _search(self, now: float) -> None:
        cgroup = self._roots.cgroup
        tops = tuple(_links(path) for path in (cgroup, *self._watched()))
        if self._search_at is not None and now < self._search_at and tops == self._tops:
            return
        self._mounts = hierarchy.controllers(cgroup)
        found = hierarchy.jobs_roots(cgroup)
        # What no search by name finds: the groups of our own job, and of a slurmstepd that runs.
        asked = [os.getpid()] if self._only else []
        if not found and not self._only:
            asked = bare.stepds(self._roots.proc)[:8]
        for pid in asked:
            text = raw.text(f"{self._roots.proc}/{pid}/cgroup")
            found += [one for one in hierarchy.roots_of_process(text, cgroup) if one not in found]
        self._found = found
        self._search_at = now + _SEARCH_SECONDS
        self._tops = tuple(_links(path) for path in (cgroup, *self._watched()))

    def _watched(self) -> Iterable[str]:
        """Directories in which a slurmd that starts makes its own."""
        yield f"{self._roots.cgroup}/system.slice"
        yield from self._mounts.values()

    def _in_groups(self) -> dict[str, JobSeen]:
        found: list[GroupJob] = []
        for controller in ("", *hierarchy.CONTROLLERS):
            roots = [root for root in self._found if root.controller == controller]
            jobs = self._tree.jobs(roots, self._only) if roots else []
            found += jobs
            if jobs:
                break  # the other controllers have the same jobs
        if found and not self._grouped:
            # What was taken for jobs by environments, perhaps their prologs, says nothing of them.
            self._grouped = True
            self._kept.clear()
            self._bare.forget()
        seen: dict[str, JobSeen] = {}
        for job in found:
            kept = self._kept.setdefault(job.jobid, _Job())
            if job.uid >= 0:
                kept.uid, kept.certain = job.uid, True
            steps = {step: frozenset(pids) for step, pids in job.steps.items()}
            before = seen.get(job.jobid)
            seen[job.jobid] = _merged(
                before,
                JobSeen(
                    JobFacts(job.jobid),
                    self._groups_of(job, kept),
                    steps,
                    frozenset().union(*steps.values()),
                ),
            )
        for jobid, one in seen.items():
            kept = self._kept[jobid]
            paths = {job.path for job in found if job.jobid == jobid}
            kept.groups = {path: kept.groups[path] for path in paths}
            kept.looks += 1
            kept.steps = frozenset(one.steps)
        return seen

    def _groups_of(self, job: GroupJob, kept: _Job) -> dict[str, str]:
        if not job.root.controller:
            return kept.groups.setdefault(job.path, {"": job.path})
        groups = kept.groups.get(job.path)
        # Slurm makes a job's groups one after the other.
        if groups is None or kept.looks < _RECHECKS or kept.steps != job.steps.keys():
            mount = job.root.path[: len(job.root.path) - len(job.root.below)]
            below = job.path[len(mount) :]
            groups = kept.groups[job.path] = {
                controller: other + below
                for controller, other in self._mounts.items()
                if other == mount or os.path.isdir(other + below)
            }
        return groups

    def _without_groups(self, now: float) -> dict[str, JobSeen]:
        seen = {}
        for job in self._bare.jobs(now, self._only):
            kept = self._kept.get(job.jobid)
            # One that names no cluster is of the same.
            cluster = job.cluster or (kept.cluster if kept else "")
            if kept is None or kept.uid != job.uid or kept.cluster not in {"", cluster}:
                kept = self._kept[job.jobid] = _Job(job.uid, certain=True)
                kept.whose = f"{job.uid} {cluster}"
            kept.cluster = cluster
            steps = {step: frozenset(pids) for step, pids in job.steps.items()}
            pids = frozenset().union(*steps.values())
            seen[job.jobid] = JobSeen(JobFacts(job.jobid), {}, steps, pids, kept.whose)
        return seen

    def _identify(self, pids: Iterable[int]) -> str | None:
        for pid in pids:
            found = process.stepd(self._roots.proc, pid)
            if found is not None:
                return found[0]
        return None

    def _describe(self, job: JobSeen, now: float) -> JobSeen:
        jobid = job.facts.jobid
        kept = self._kept[jobid]
        if not kept.settled:
            self._find_user(job, kept)
        # Slurm starts the batch shell without hpml's own variable: only its children have it.
        if kept.uid >= 0 and kept.asked < _ASKS and (kept.said is None or not kept.said.run):
            self._ask(job, kept)
        facts = self._facts or self._maps.facts(jobid)
        if facts is not None and kept.settled and facts.uid not in {-1, kept.uid}:
            facts = None  # left by another job of that number
        facts = _filled(facts or JobFacts(jobid), kept.said)
        uid = facts.uid if facts.uid >= 0 and not kept.settled else kept.uid
        user = facts.user or self._people.name(uid, now)
        return dataclasses.replace(job, facts=dataclasses.replace(facts, uid=uid, user=user))

    def _ask(self, job: JobSeen, kept: _Job) -> None:
        """Take from the environment of the job's processes what nothing else says.

        That a user can change; so it only fills in what the prolog's map does not say.
        """
        kept.asked += 1
        for _, pid in _first(job):
            if process.uid(self._roots.proc, pid) != kept.uid:
                continue
            values = process.environment(self._roots.proc, pid) or {}
            if values.get(b"SLURM_JOB_ID") == job.facts.jobid.encode():
                told = _facts_in(job.facts.jobid, values)
                kept.said = _filled(kept.said or JobFacts(job.facts.jobid), told)
                if kept.said.run:
                    return

    def _find_user(self, job: JobSeen, kept: _Job) -> None:
        """Take the user from the job's processes; root as long as it is nobody else.

        A task is root's until slurmstepd's child becomes its user; Slurm's own process in the
        extern step always is.
        """
        found = kept.uid
        for step, pid in _first(job):
            uid = process.uid(self._roots.proc, pid)
            if uid is None or (uid == 0 and step == "extern"):
                continue
            if uid and (step == "extern" or not self._made_by_root(job, pid)):
                found = uid
                break
            found = 0
        if found != kept.uid:
            kept.uid, kept.asked, kept.said = found, 0, None

    def _made_by_root(self, job: JobSeen, pid: int) -> bool:
        """Return whether a process is another user's work in a job of root's, as by su."""
        stat = process.stat(self._roots.proc, pid)
        parent = stat.parent if stat else 0
        return parent in job.pids and process.uid(self._roots.proc, parent) == 0


def _first(job: JobSeen) -> Iterable[tuple[str, int]]:
    """Return two processes of each step with its name; the extern one, which is Slurm's, last."""
    for step, pids in sorted(job.steps.items(), key=lambda one: one[0] == "extern"):
        yield from ((step, pid) for pid in sorted(pids)[:2])


def booted(proc: str) -> float:
    """Return when the machine started, seconds since the epoch; 0 where that is not to be seen."""
    for line in raw.text(f"{proc}/stat").splitlines():
        if line.startswith("btime "):
            return float(line[6:])
    return 0.0


def _links(path: str) -> int:
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0


def _merged(one: JobSeen | None, other: JobSeen) -> JobSeen:
    """Join what several slurmd of one machine have of a job."""
    if one is None:
        return other
    steps = dict(one.steps)
    for step, pids in other.steps.items():
        steps[step] = steps.get(step, frozenset()) | pids
    return dataclasses.replace(one, steps=steps, pids=one.pids | other.pids)


def _facts_in(jobid: str, values: Mapping[bytes, bytes]) -> JobFacts:
    def word(name: bytes) -> str:
        return values.get(name, b"").decode("utf-8", "replace")[:_TEXT]

    gpus = word(b"SLURM_JOB_GPUS")
    return JobFacts(
        jobid=jobid,
        account=word(b"SLURM_JOB_ACCOUNT"),
        partition=word(b"SLURM_JOB_PARTITION"),
        name=word(b"SLURM_JOB_NAME"),
        gpus=_named(gpus.split(",")) if gpus else None,
        run=os.path.basename(word(b"HPML_RUN_DIR").rstrip("/")),
    )


def _named(gpus: Sequence[str]) -> tuple[str, ...] | None:
    """Return the GPUs if they have names; numbers are places in Slurm's list, and tell of none."""
    return None if any(gpu.isdigit() for gpu in gpus) else tuple(gpus)


def _filled(facts: JobFacts, said: JobFacts | None) -> JobFacts:
    if said is None:
        return facts
    return dataclasses.replace(
        facts,
        account=facts.account or said.account,
        partition=facts.partition or said.partition,
        name=facts.name or said.name,
        gpus=said.gpus if facts.gpus is None else facts.gpus,
        run=facts.run or said.run,
    )
