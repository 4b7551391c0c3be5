"""What accounting keeps of a job: its times, its resources, and what each step of it used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hpml_orchestrator.scheduler.model import JobState, JobStatus

__all__ = ["AccountedJob", "AccountedStep", "count_restarts", "with_ended_start"]


@dataclass(frozen=True)
class AccountedStep:
    """One step of a job.

    Attributes:
        step_id: `batch`, `extern`, `interactive`, or a number such as `0`; `0+1` in a
            heterogeneous step.
        name: mostly its command.
        state: how it stands; `raw_state` is Slurm's own word.
        exit_code, signal: as in `JobStatus`.
        nodes: node list in Slurm's compact form.
        started, ended: seconds since the epoch.
        elapsed_seconds: wall-clock time.
        tasks: how many processes Slurm started.
        cpu_seconds: user and system time of all its tasks; None where nobody measured.
        user_seconds, system_seconds: its two parts.
        max_rss_bytes: largest resident memory of one task; None where nobody measured, as in
            steps shorter than one sampling interval.
        max_rss_node: node of that task.
        average_rss_bytes: over the tasks.
        allocated_tres: memory (`mem`) in MiB.
        usage_max: most that one task used of `mem`, `vmem`, `fs/disk` (read; bytes), `pages`,
            `energy`, `gres/gpumem` and what else the site measures.
        usage_total: the same over all tasks.
        output_total: what all tasks wrote, `fs/disk` in bytes.
    """

    step_id: str
    name: str = ""
    state: JobState = JobState.UNKNOWN
    raw_state: str = ""
    exit_code: int | None = None
    signal: int = 0
    nodes: str = ""
    started: float | None = None
    ended: float | None = None
    elapsed_seconds: float | None = None
    tasks: int | None = None
    cpu_seconds: float | None = None
    user_seconds: float | None = None
    system_seconds: float | None = None
    max_rss_bytes: int | None = None
    max_rss_node: str = ""
    average_rss_bytes: int | None = None
    allocated_tres: Mapping[str, int] = field(default_factory=dict)
    usage_max: Mapping[str, int] = field(default_factory=dict)
    usage_total: Mapping[str, int] = field(default_factory=dict)
    output_total: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AccountedJob:
    """One start of a job, or of one task of an array, as accounting has it.

    Attributes:
        status: state, exit code, times, nodes, name; under the id that users see (`3_1`, `28+1`).
            `restarts` tells the starts of a requeued job apart.
        raw_id: the controller's own number of it; the id again where nobody was asked for it.
        array_job_id, array_task: of a task of an array.
        het_job_id, het_offset: of a component of a heterogeneous job.
        user, account, partition, qos, cluster: whose it is and where it ran.
        elapsed_seconds: wall-clock time of this start.
        time_limit_seconds: None for none.
        cpu_seconds: user and system time of all steps.
        requested_tres, allocated_tres: memory (`mem`) in MiB.
        steps: in accounting's order.
    """

    status: JobStatus
    raw_id: str
    array_job_id: str = ""
    array_task: int | None = None
    het_job_id: str = ""
    het_offset: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    cluster: str = ""
    elapsed_seconds: float | None = None
    time_limit_seconds: float | None = None
    cpu_seconds: float | None = None
    requested_tres: Mapping[str, int] = field(default_factory=dict)
    allocated_tres: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[AccountedStep, ...] = ()

    @property
    def job_id(self) -> str:
        """The id that users see."""
        return self.status.job_id

    @property
    def over(self) -> bool:
        """Whether this start has ended; that of a requeued job has, though the job goes on."""
        return self.status.state.over or self.status.ended is not None

    def step(self, step_id: str) -> AccountedStep | None:
        """The step of that id."""
        return next((one for one in self.steps if one.step_id == step_id), None)


def count_restarts(jobs: Iterable[AccountedJob]) -> tuple[AccountedJob, ...]:
    """Number the starts of each requeued job, which accounting lists one after the other."""
    seen: dict[str, int] = {}
    counted = []
    for job in jobs:
        restarts = max(seen.get(job.job_id, -1) + 1, job.status.restarts)
        seen[job.job_id] = restarts
        counted.append(replace(job, status=replace(job.status, restarts=restarts)))
    return tuple(counted)


def with_ended_start(status: JobStatus, started: float | None, ended: float | None) -> JobStatus:
    """Return the status with the times of a start that was requeued.

    For the queue such a job waits, and its times are predictions; for accounting that start is
    over, and its times have come true.
    """
    if status.state is JobState.REQUEUED and ended is not None:
        return replace(status, started=started, ended=ended)
    return status
