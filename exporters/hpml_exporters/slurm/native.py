"""A cluster through pyslurm: no process per query. Needs a pyslurm built for the site's Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from hpml_exporters.slurm.commands import Commands, count_tasks, head_of_reason
from hpml_exporters.slurm.metrics import STATISTICS
from hpml_exporters.slurm.view import ClusterNode, QueueRow, View
from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.command import check_configuration
from hpml_orchestrator.scheduler.slurm.records import node_states

if TYPE_CHECKING:
    import pyslurm


class Native:
    """Reads jobs, nodes and statistics through pyslurm, and through commands what it lacks."""

    name = "pyslurm"

    def __init__(self, *, shares: bool = False) -> None:
        """Import pyslurm.

        Raises:
            SchedulerUnavailable: slurm.conf is missing, without which libslurm ends the process.
            ImportError: pyslurm is not installed, or was built for another Slurm.
        """
        check_configuration("squeue", os.environ)
        self._pyslurm = import_module("pyslurm")
        self._commands = Commands(shares=shares)

    def read(self) -> View:
        """Ask Slurm once; see `view.Source`."""
        try:
            jobs = [job_of(job) for job in self._pyslurm.Jobs.load().values()]
            nodes = [node_of(node) for node in self._pyslurm.Nodes.load().values()]
            statistics = self._pyslurm.slurmctld.Statistics.load()
        except Exception as error:
            raise SchedulerUnavailable(f"pyslurm: {error}") from error
        numbers = {name: float(getattr(statistics, name, None) or 0) for name in STATISTICS}
        return View(jobs, nodes, numbers, *self._commands.rare())


def job_of(job: pyslurm.Job) -> QueueRow:
    """Return a pyslurm.Job as the command line shows it."""
    waiting = job.array_tasks_waiting
    job_id = str(job.id)
    if waiting:
        job_id = f"{job.array_id}_[{waiting}]"
    elif job.array_id is not None and job.array_task_id is not None:
        job_id = f"{job.array_id}_{job.array_task_id}"
    pending = job.state == "PENDING"
    return QueueRow(
        id=job_id,
        state=str(job.state),
        reason=head_of_reason(job.state_reason or "") if pending else "",
        partitions=tuple((job.partition or "").split(",")),
        qos=job.qos or "",
        user=job.user_name or "",
        tasks=count_tasks(job_id) if waiting else 1,
        eligible=job.eligible_time or 0,
        start=0 if pending else job.start_time or 0,
        end=job.end_time or 0,
    )


def node_of(node: pyslurm.Node) -> ClusterNode:
    """Return a pyslurm.Node as the command line shows it."""
    return ClusterNode(
        name=node.name,
        address=node.address or node.name,
        states=node_states(node.state),
        reason=node.reason or "",
        partitions=tuple(node.partitions),
        cpus=node.total_cpus,
        cpus_allocated=node.allocated_cpus or 0,
        gpus=_gpus(node.configured_gres),
        gpus_allocated=_gpus(node.allocated_gres),
    )


def _gpus(resources: Mapping[str, int]) -> dict[str, int]:
    names = (name.partition(":") for name in resources if name.partition(":")[0] == "gpu")
    counts = {kind: resources[f"gpu{colon}{kind}"] for _, colon, kind in names}
    return {kind: count for kind, count in counts.items() if kind or len(counts) == 1}
