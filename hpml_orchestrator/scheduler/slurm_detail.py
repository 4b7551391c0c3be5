"""`scontrol show job -d`: what a job asked for, and which CPUs and GPUs it has on each node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.model import JobStatus
from hpml_orchestrator.scheduler.slurm_json import job_id_of
from hpml_orchestrator.scheduler.slurm_parse import make_status, parse_exit, parse_time
from hpml_orchestrator.scheduler.slurm_records import expand_known
from hpml_orchestrator.scheduler.slurm_scontrol import parse_records
from hpml_orchestrator.scheduler.slurm_values import (
    nothing,
    parse_count,
    parse_duration,
    parse_gres,
    parse_memory,
    parse_tres,
    plain,
    split_outside,
)

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.slurm_scontrol import Record

__all__ = ["DetailedJob", "GresAllocation", "NodeAllocation", "indices", "parse_detailed"]

_MAX_INDEX = 65_536
_INDICES = re.compile(r"\(IDX:([\d,\-]+)\)", re.ASCII)
_USER = re.compile(r"^(.*)\((\d+)\)$", re.ASCII)


@dataclass(frozen=True)
class GresAllocation:
    """Generic resources that a job has on one node.

    Attributes:
        name, kind, count: as in `cluster.model.Gres`.
        indices: which of the node's, such as `(0, 1)`; empty where Slurm does not tell.
    """

    name: str
    kind: str
    count: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeAllocation:
    """What a job has on one node; `cpu_ids` count as Slurm counts, not as the kernel does."""

    node: str
    cpu_ids: tuple[int, ...] = ()
    memory_mib: int = 0
    gres: tuple[GresAllocation, ...] = ()


@dataclass(frozen=True)
class DetailedJob:
    """One job, or one task of an array, as the controller knows it.

    Attributes:
        status: state, times, nodes; under the id that users see (`3_1`, `3_[2-3%2]`, `28+1`).
        raw_id: the controller's own number of it.
        array_job_id, array_tasks: of an array; tasks are one number or, while they wait, many.
        het_job_id, het_offset: of a component of a heterogeneous job.
        user, account, partition, qos: whose it is and where it goes.
        time_limit_seconds: None for none.
        dependency: what it waits for, such as `afterok:7(unfulfilled)`.
        command, submit_line, comment: texts of its user; submit_line from 25.11 on.
        node_count, cpus, tasks, cpus_per_task: what it asks for or has.
        requested_tres, allocated_tres: memory (`mem`) in MiB.
        allocations: per node, in the controller's order; empty while it waits.
        fields: all else that scontrol says, unread.
    """

    status: JobStatus
    raw_id: str
    array_job_id: str = ""
    array_tasks: str = ""
    het_job_id: str = ""
    het_offset: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    time_limit_seconds: float | None = None
    dependency: str = ""
    command: str = ""
    submit_line: str = ""
    comment: str = ""
    node_count: int | None = None
    cpus: int | None = None
    tasks: int | None = None
    cpus_per_task: int | None = None
    requested_tres: Mapping[str, int] = field(default_factory=dict)
    allocated_tres: Mapping[str, int] = field(default_factory=dict)
    allocations: tuple[NodeAllocation, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def job_id(self) -> str:
        """The id that users see."""
        return self.status.job_id


def parse_detailed(text: str) -> tuple[DetailedJob, ...]:
    """Return the jobs of `scontrol show job --details`; what is no job is left out."""
    records = parse_records(text)
    return tuple(_job(one) for one in records if parse_count(one["JobId"]) is not None)


def indices(text: str) -> tuple[int, ...]:
    """Return the numbers of a list of ranges.

    >>> indices("0-2,7")
    (0, 1, 2, 7)
    """
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        if span and int(span[2] or span[1]) < _MAX_INDEX:
            found.extend(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(found)


def _job(record: Record) -> DetailedJob:
    array, tasks = plain(record["ArrayJobId"]), plain(record["ArrayTaskId"])
    het, offset = plain(record["HetJobId"]), parse_count(record["HetJobOffset"])
    one = parse_count(tasks)
    shown = job_id_of(
        parse_count(record["JobId"]),
        parse_count(array),
        one,
        tasks if one is None else "",
        parse_count(het),
        offset,
    )
    nodes = plain(record["NodeList"])
    user = _USER.match(record["UserId"])
    # Until 23.02 there is one list, of what is asked for while the job waits.
    tres = parse_tres(record["TRES"])
    return DetailedJob(
        status=make_status(
            shown,
            record["JobState"],
            reason=record["Reason"],
            code=parse_exit(record["ExitCode"]),
            nodes=nodes,
            submitted=parse_time(record["SubmitTime"]),
            started=parse_time(record["StartTime"]),
            ended=parse_time(record["EndTime"]),
            restarts=parse_count(record["Restarts"]) or 0,
            name=record["JobName"],
            directory=record["WorkDir"],
        ),
        raw_id=record["JobId"],
        array_job_id=array,
        array_tasks=tasks,
        het_job_id=het,
        het_offset=offset if het else None,
        user=user[1] if user else plain(record["UserId"]),
        account=plain(record["Account"]),
        partition=plain(record["Partition"]),
        qos=plain(record["QOS"]),
        time_limit_seconds=parse_duration(record["TimeLimit"]),
        dependency=plain(record["Dependency"]),
        command=plain(record["Command"]),
        submit_line=plain(record["SubmitLine"]),
        comment=plain(record["Comment"]),
        node_count=parse_count(record["NumNodes"].partition("-")[0]),
        cpus=parse_count(record["NumCPUs"].partition("-")[0]),
        tasks=parse_count(record["NumTasks"]),
        cpus_per_task=parse_count(record["CPUs/Task"]),
        requested_tres=parse_tres(record["ReqTRES"]) or tres,
        allocated_tres=parse_tres(record["AllocTRES"]) or (tres if nodes else {}),
        allocations=tuple(_allocations(record)),
        fields=record.fields,
    )


def _allocations(record: Record) -> list[NodeAllocation]:
    found = []
    for detail in record.details:
        gres = tuple(_gres(detail.get("GRES", "")))
        for node in expand_known(detail.get("Nodes", "")):
            found.append(  # noqa: PERF401 - a line with several nodes stands for each of them
                NodeAllocation(
                    node=node,
                    cpu_ids=indices(detail.get("CPU_IDs", "")),
                    memory_mib=parse_memory(detail.get("Mem", "")) or 0,
                    gres=gres,
                )
            )
    return found


def _gres(text: str) -> list[GresAllocation]:
    found = []
    for part in split_outside(text):
        if nothing(part):
            continue
        where = _INDICES.search(part)
        found += [
            GresAllocation(one.name, one.kind, one.count, indices(where[1]) if where else ())
            for one in parse_gres(part)
        ]
    return found
