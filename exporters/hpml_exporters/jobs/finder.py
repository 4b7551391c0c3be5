"""Finds the jobs of this node and says whose they are: the source of the jobs' board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpml_exporters.jobs.board import Jobs, JobSeen
from hpml_exporters.jobs.cgroups import FoundJob, GroupJobs
from hpml_exporters.jobs.environments import EnvironmentJobs, own_variables
from hpml_exporters.jobs.identity import Identities
from hpml_exporters.options import NodeOptions

__all__ = ["JobFinder"]


class JobFinder:
    """Looks at control groups, and at environments until the first job in a control group is seen.

    After that, a process that only names a job in its environment, such as a prolog or what
    outlived its job, is no job.

    Args:
        options: where the file systems are, and the one job of an exporter inside of a job.
    """

    def __init__(self, options: NodeOptions) -> None:
        roots = options.roots
        only = options.job.jobid if options.job else ""
        own = own_variables()
        self._groups = GroupJobs(roots.proc, roots.cgroup, only)
        self._environments: EnvironmentJobs | None = EnvironmentJobs(roots.proc, only, own)
        self._identities = Identities(roots, options.job)

    def look(self, now: float) -> Jobs:
        """Return the jobs that are here.

        Args:
            now: monotonic seconds.
        """
        found = self._groups.look(now)
        if self._environments is not None:
            if found:
                # What was taken for jobs before, perhaps their prologs, says nothing of them.
                self._environments = None
                self._identities.keep(())
            else:
                found = self._environments.look(now)
        parts: dict[str, list[FoundJob]] = {}
        for job in found:
            parts.setdefault(job.jobid, []).append(job)
        self._identities.keep(parts)
        return Jobs({jobid: self._merged(jobs, now) for jobid, jobs in parts.items()})

    def _merged(self, parts: Sequence[FoundJob], now: float) -> JobSeen:
        """Join what several slurmd of this machine have of a job."""
        steps: dict[str, frozenset[int]] = {}
        for part in parts:
            for step, pids in part.steps.items():
                steps[step] = steps.get(step, frozenset()) | pids
        return JobSeen(
            self._identities.facts(replace(parts[0], steps=steps), now),
            tuple(part.groups for part in parts if part.groups),
            steps,
            frozenset[int]().union(*steps.values()),
        )
