"""Options of the Slurm exporter, as JSON for its process, and the source for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpml_exporters.core.sampler import CollectorSource
from hpml_exporters.options import NodeOptions
from hpml_exporters.slurm.collector import INTERVAL_MIN, STATISTICS, SlurmCollector
from hpml_exporters.slurm.commands import (
    ClusterNode,
    Commands,
    QueueRow,
    View,
    count_tasks,
    head_of_reason,
)
from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import check_configuration
from hpml_orchestrator.scheduler.slurm.records import node_states

if TYPE_CHECKING:
    import pyslurm

    from hpml_exporters.slurm.commands import ViewSource

SOURCES = ("auto", "pyslurm", "commands")
_STUCK_SECONDS = 600.0  # several commands of up to a minute each


@dataclass(frozen=True)
class SlurmOptions:
    """How a cluster is exported.

    Attributes:
        listen, web_config, address_file: as of a node's exporter.
        source: one of SOURCES; auto is pyslurm if it can be imported, else commands.
        interval: seconds between two refreshes, 30 at least.
        users: show jobs and fairshare by user.
    """

    listen: str = "127.0.0.1:9446"
    web_config: str = ""
    address_file: str = ""
    source: str = "auto"
    interval: float = INTERVAL_MIN
    users: bool = False

    def __post_init__(self) -> None:
        """Raise an error for wrong values."""
        if self.source not in SOURCES:
            hint = f"one of {', '.join(SOURCES)}"
            if self.source == "openmetrics":
                hint += "; Prometheus scrapes Slurm's own metrics, see docs/slurm-exporter.md"
            raise InputError("no such source", field="source", value=self.source, hint=hint)
        if not INTERVAL_MIN <= self.interval <= 3600:  # noqa: PLR2004 - an hour
            raise InputError("must be 30 to 3600 seconds", field="interval", value=self.interval)

    def to_json(self) -> str:
        """Return the options as a JSON object."""
        return json.dumps(asdict(self))

    def server(self) -> NodeOptions:
        """Return the options of the web server and the watchdog."""
        return NodeOptions(
            listen=self.listen,
            web_config=self.web_config,
            address_file=self.address_file,
            stuck_seconds=_STUCK_SECONDS,
            exit_seconds=2 * _STUCK_SECONDS,
        )

    def sources(self) -> list[CollectorSource]:
        """Return the collector for the sampler.

        Raises:
            InputError: pyslurm was asked for and is not installed.
        """
        if self.source == "pyslurm" and find_spec("pyslurm") is None:
            hint = "build it for this Slurm, see docs/slurm-exporter.md; or use --source commands"
            raise InputError("pyslurm is not installed", field="source", value="pyslurm", hint=hint)
        return [CollectorSource("slurm", self.collector)]

    def collector(self) -> SlurmCollector:
        """Create the collector.

        Raises:
            ImportError: pyslurm was asked for and cannot be imported.
            SchedulerUnavailable: slurm.conf is missing.
        """
        return SlurmCollector(self._source(), interval=self.interval, users=self.users)

    def _source(self) -> ViewSource:
        # Only the chosen source is imported: the exporter stays small.
        from hpml_exporters.slurm.commands import Commands  # noqa: PLC0415 - one source is used

        if self.source != "commands":
            try:
                return Native(shares=self.users)
            except (ImportError, SchedulerUnavailable):
                if self.source == "pyslurm":
                    raise
        return Commands(shares=self.users)


# A cluster through pyslurm, without a process per query. It must be built for the site's Slurm.


class Native:
    """Reads jobs, nodes and statistics with pyslurm, and the rest with commands."""

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
        """Query Slurm once; see `ViewSource`."""
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
