"""The jobs of this node as one immutable view, and the holder that all collectors look at."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["JobFacts", "JobSeen", "Jobs", "JobsBoard", "facts_of"]


@dataclass(frozen=True)
class JobFacts:
    """What the prolog's map, or the node agent for its own job, says of a job.

    Attributes:
        jobid: Slurm's number of the job (of an array task: its own, not the array's).
        uid: numeric user, -1 unknown.
        user: name of the user, empty unknown; so are the next three.
        gpus: allocated GPUs as they were named: minor numbers ("0"), UUIDs ("GPU-…", "MIG-…") or
            PCI addresses; None: not known, an empty tuple: the job has none.
        run: hpml's run identifier, empty for others' jobs.
        sweep: name of the sweep the run belongs to, empty for none.
        point: the sweep's point, empty for none.
    """

    jobid: str
    uid: int = -1
    user: str = ""
    account: str = ""
    partition: str = ""
    name: str = ""
    gpus: tuple[str, ...] | None = None
    run: str = ""
    sweep: str = ""
    point: str = ""


@dataclass(frozen=True)
class JobSeen:
    """A job that is on this node now.

    Attributes:
        facts: who and what, as far as known.
        groups: directories of its control groups, one per controller in version 1
            (`{"memory": …, "cpuacct": …}`), one under `""` in version 2; empty without.
        steps: process ids by step: "batch", "extern", "0", …
        pids: process ids of all steps.
        whose: tells apart jobs of one number that follow each other, as local ones of two
            directories of records; empty in control groups, where a number is Slurm's.
    """

    facts: JobFacts
    groups: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, frozenset[int]] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()
    whose: str = ""


class Jobs:
    """All jobs of the node at one moment.

    Attributes:
        by_id: the jobs by their job id.
    """

    def __init__(self, by_id: Mapping[str, JobSeen]) -> None:
        self.by_id: Mapping[str, JobSeen] = MappingProxyType(dict(by_id))
        self._of_pid = {pid: jobid for jobid, job in self.by_id.items() for pid in job.pids}

    def job_of(self, pid: int) -> str | None:
        """Return the id of the job that a process belongs to."""
        return self._of_pid.get(pid)


class JobsBoard:
    """The latest view; one collector posts, all others look.

    A view is never changed, only replaced, so that looking takes no lock.
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


def facts_of(data: Mapping[str, Any]) -> JobFacts:
    """Return the facts in a parsed JSON object, with what is wrong or unknown left out.

    Raises:
        ValueError: it names no job.
    """
    jobid = str(data.get("jobid", ""))
    if not jobid.isascii() or not jobid.isdigit():
        raise ValueError("jobid: a number is wanted")
    texts = {
        name: str(data[name])[:256]
        for name in ("user", "account", "partition", "name", "run", "sweep", "point")
        if isinstance(data.get(name), str)
    }
    uid = data.get("uid", -1)
    gpus = data.get("gpus")
    return JobFacts(
        jobid=jobid,
        uid=uid if isinstance(uid, int) and not isinstance(uid, bool) else -1,
        gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else None,
        **texts,
    )
