"""The jobs of this node as one immutable view, and the board where all collectors look it up."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

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
    """Return the facts in a parsed JSON object; fields of the wrong type count as unknown.

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
        # Not isinstance: to JSON's reader `true` is an int, but it is no time and no number of
        # ranks.
        elif type(value) is type(one.default):
            known[one.name] = value
    return JobFacts(jobid, **known)
