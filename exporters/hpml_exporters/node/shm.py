"""The RAM file system /dev/shm: its size and use, and what of it is which job's.

A job's are the directories that hpml staged for it (a cached dataset counts with each job that uses
it), and all other files of its user, where that user has no other job here. The exporter of a
single job cannot know of others, and only counts what hpml staged. The kernel's own figure is
`hpml_job_memory_bytes{kind="shmem"}`, of the job's control group: it includes files that are
deleted but open, and leaves out a dataset that another job brought. Where Slurm gives each job a
/dev/shm of its own (job_container/tmpfs), the exporter of the node sees none of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node.shm_walk import Walk
from hpml_exporters.options import Context

__all__ = ["ENTRIES", "SPECS", "Shm", "make"]

_STATVFS = "statvfs(2) of /dev/shm"
_SIZE = MetricSpec("hpml_shm_size_bytes", "gauge", "Size of /dev/shm.", (), "bytes", _STATVFS)
_USED = MetricSpec(
    "hpml_shm_used_bytes", "gauge", "Memory that files in /dev/shm take.", (), "bytes", _STATVFS
)
_OF_JOB = MetricSpec(
    "hpml_job_shm_bytes",
    "gauge",
    "Memory of files in /dev/shm that are a job's: what hpml staged for it,"
    " and files of its user where that user has no other job here.",
    ("cluster", "jobid"),
    "bytes",
    "a bounded walk of /dev/shm, manifests of hpml's staged data",
)
SPECS = (_SIZE, _USED, _OF_JOB)

ENTRIES = 500
"""Entries that a sample looks at, about 10 ms: there may be millions, the next one goes on there.

Shown is the last walk that came to its end.
"""


class Shm:
    """The collector `shm`."""

    name = "shm"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = context.options.roots.shm
        self._jobs, self._cluster = context.jobs, context.options.cluster
        self._own = context.options.job is not None
        self._walk: Walk | None = None
        self._found: Mapping[tuple[int, str], int] | None = None

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            space = os.statvfs(self._root)
        except OSError as error:
            raise NotHereError(f"no {self._root}") from error
        size = space.f_blocks * space.f_frsize
        walk, self._walk = self._walk or Walk(self._root, size), None  # one that fails is given up
        if walk.go_on(ENTRIES):
            self._found = walk.bytes
        else:
            self._walk = walk
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        return families({_SIZE: [((), size)], _USED: [((), used)], _OF_JOB: self._of_jobs()})

    def close(self) -> None:
        """Give up a walk that is under way."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _of_jobs(self) -> Iterator[Row]:
        """Yield what each job has, of those whose user is known."""
        if self._found is None:
            return
        jobs = {jobid: job.facts.uid for jobid, job in self._jobs.now.by_id.items()}
        if self._own:
            jobs = {jobid: os.getuid() if uid < 0 else uid for jobid, uid in jobs.items()}
        jobs_of = Counter(jobs.values())
        for jobid, uid in jobs.items():
            if uid >= 0:
                alone = jobs_of[uid] == 1 and not self._own
                others = self._found.get((uid, ""), 0) if alone else 0
                yield (self._cluster, jobid), self._found.get((uid, jobid), 0) + others


make = Shm
