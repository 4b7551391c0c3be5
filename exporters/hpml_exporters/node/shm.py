"""The RAM file system /dev/shm: its size and use, and what of it is which job's.

A job's are the directories that hpml staged for it (`hpml-{uid}/{cluster}-{job id}`, by the sizes
in their manifests, so that a million files cost one read; a cached dataset counts with each job
that uses it), and all other files of its user, where that user has no other job here. The exporter
of a single job cannot know of others, and only counts what hpml staged. The kernel's own word on a
job is `hpml_job_memory_bytes{kind="shmem"}`, of its control group, which also knows files that are
deleted but open; it does not know whose a dataset is that another job brought. Where Slurm gives
each job a /dev/shm of its own (job_container/tmpfs), the exporter of the node sees none of them.

/dev/shm may hold millions of files: at each sample some entries are looked at, and the
next one goes on there. Shown is the last walk that came to its end: see `Walk`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node import metrics as node
from hpml_exporters.node.shm_walk import Found, Walk
from hpml_exporters.options import Context

__all__ = ["Shm", "make"]

ENTRIES = 1000
"""Entries that are looked at in a sample, about 9 ms."""


def make(context: Context) -> Shm:
    """Return the collector of /dev/shm."""
    return Shm(context)


class Shm:
    """The collector `shm`."""

    name = "shm"
    specs: Sequence[MetricSpec] = (node.SHM_SIZE, node.SHM_USED, node.JOB_SHM)

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = context.options.roots.shm
        self._jobs = context.jobs
        self._own = context.options.job is not None
        self._walk: Walk | None = None
        self._found: Found | None = None

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            told = os.statvfs(self._root)
        except OSError as error:
            raise NotHereError(f"no {self._root}") from error
        size = told.f_blocks * told.f_frsize
        used = (told.f_blocks - told.f_bfree) * told.f_frsize
        if self._walk is None:
            self._walk = Walk(self._root, size, staged_only=self._own)
        try:
            over = self._walk.go_on(ENTRIES)
        except OSError:  # no descriptor is left: a walk that broke off has found nothing
            self.close()
            raise
        if over:
            self._found = self._walk.found
            self.close()
        return families(
            {
                node.SHM_SIZE: [((), size)],
                node.SHM_USED: [((), used)],
                node.JOB_SHM: self._of_jobs(),
            }
        )

    def close(self) -> None:
        """Give up a walk that is under way."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _of_jobs(self) -> Iterator[Row]:
        """Yield what is known of each job that is here, once a walk came to its end."""
        jobs = self._jobs.now.by_id
        if self._found is None:
            return
        of_user: dict[int, int] = {}
        for job in jobs.values():
            of_user[job.facts.uid] = of_user.get(job.facts.uid, 0) + 1
        for jobid, job in jobs.items():
            uid = job.facts.uid if job.facts.uid >= 0 or not self._own else os.getuid()
            if uid < 0:
                continue  # not known whose it is: no figure, which is not 0
            total = self._found.of_job.get((uid, jobid), 0)
            if of_user[job.facts.uid] == 1 and not self._own:
                total += self._found.of_user.get(uid, 0)
            yield ((jobid,), total)
