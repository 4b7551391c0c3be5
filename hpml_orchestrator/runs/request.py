"""What a submission asked for: the job in its record, with the types that hpml wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, RecordError
from hpml_orchestrator.spec.values import MIB, parse_gpus, parse_mebibytes, parse_time

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import JobFields
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.spec.job import Job


@dataclass(frozen=True)
class RecordedCheckpoint:
    """The field `checkpoint` of a recorded job."""

    enabled: bool = False
    directory: str = ""
    requeue: tuple[str, ...] = ()  # the ends after which the run continues by itself
    attempts: int = 0  # at most
    avoid_failed_nodes: bool = False
    hang_seconds: float = 0.0  # without a report of any rank, after which it is ended; 0 for never


@dataclass(frozen=True)
class RecordedJob:
    """The part of a recorded job that commands about runs need; sizes are per node."""

    limit: str  # as it was written
    limit_seconds: float
    nodes: int
    gpus: int
    ranks: int
    cores: int
    memory: str  # as it was written; empty without a request
    memory_bytes: float | None  # None: as the cluster gives it
    checkpoint: RecordedCheckpoint
    is_monitored: bool
    monitor_targets: str  # directory of Prometheus targets; empty for the default
    binding: object  # a policy, or a mapping with `policy` and `verify`
    collected: tuple[str, ...]  # sources of `collect`
    has_submitit: bool  # whether submitit started it
    after: tuple[tuple[str, str], ...]  # the runs that it waits for, and for which end of each

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks


def job_fields(job: Job) -> JobFields:
    """Return a complete job as its record has it."""
    fields: Any = job.model_dump(mode="json")
    checked: JobFields = fields
    return checked


def recorded_job(submission: Submission) -> RecordedJob:
    """Return the job of a submission.

    Raises:
        NotFoundError: it has no record.
        RecordError: its record cannot be read, or is damaged.
    """
    record = submission.record()
    try:
        job = record["job"]
        asked, saving, monitor = job["resources"], job.get("checkpoint") or {}, job["monitor"]
        gpus = parse_gpus(asked["gpus"]).count
        ranks = int(asked["ranks_per_node"] or gpus * int(asked["ranks_per_gpu"]) or 1)
        memory = asked["memory"]
        checkpoint = RecordedCheckpoint()
        if saving.get("enabled"):
            hang = saving.get("hang", "off")
            checkpoint = RecordedCheckpoint(
                enabled=True,
                directory=str(saving["directory"]),
                requeue=tuple(map(str, saving["requeue"])),
                attempts=int(saving["attempts"]),
                avoid_failed_nodes=bool(saving.get("avoid_failed_nodes")),
                hang_seconds=0.0 if hang == "off" else float(parse_time(hang)),
            )
        return RecordedJob(
            limit=str(asked["time"]),
            limit_seconds=float(parse_time(asked["time"])),
            nodes=int(asked["nodes"]),
            gpus=gpus,
            ranks=ranks,
            cores=ranks * int(asked["cpus_per_rank"]),
            memory=str(memory or ""),
            memory_bytes=float(parse_mebibytes(str(memory)) * MIB) if memory else None,
            checkpoint=checkpoint,
            is_monitored=bool(monitor["enabled"]),
            monitor_targets=str(monitor["targets"] or ""),
            binding=job["binding"],
            collected=tuple(str(entry["source"]) for entry in job["collect"]),
            has_submitit="SUBMITIT_EXECUTOR" in job["environment"]["variables"],
            after=tuple((str(run["run"]), str(run["end"])) for run in record.get("after", ())),
        )
    except (HpmlError, AttributeError, LookupError, TypeError, ValueError) as error:
        path = submission.directory / "submit.json"
        raise RecordError(f"{path} is damaged: its job cannot be read ({error})") from error
