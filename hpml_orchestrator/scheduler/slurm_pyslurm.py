"""Slurm through the `pyslurm` module in place of its commands: the same records, for those who ask.

pyslurm is GPL-2.0, is built from source against exactly one release of Slurm, and so is never
installed with hpml nor chosen by itself. The readers here turn what its `to_dict()` gives into
hpml's records; they are tested on what pyslurm 25.11.2 returned from a real 25.11.7, against what
the command line said at the same moment. No machine of this project can run the module itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.cluster.model import Node, Partition
from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.slurm_json import at, job_id_of, text, time_of, whole, words
from hpml_orchestrator.scheduler.slurm_parse import Row, make_status
from hpml_orchestrator.scheduler.slurm_records import expand_known
from hpml_orchestrator.scheduler.slurm_values import node_states, parse_gres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "PyslurmReader",
    "accounted_row_from",
    "job_row_from",
    "node_from",
    "partition_from",
]

_MINUTE = 60


class PyslurmReader:
    """Reads jobs, nodes and partitions with the real module.

    Args:
        module: pyslurm itself; imported when none is given.

    Raises:
        InputError: it is not installed, or not for this Slurm.
    """

    def __init__(self, module: Any = None) -> None:
        try:
            self._module = module or importlib.import_module("pyslurm")
        except (ImportError, RuntimeError) as error:
            raise InputError(
                f"pyslurm cannot be used here: {error}",
                hint="leave it out (the commands do the same), or build the pyslurm of exactly "
                "your Slurm's version, such as pip install 'pyslurm==25.11.*'",
            ) from error

    def jobs(self) -> list[Row]:
        """Return what squeue would say of all jobs.

        Raises:
            SchedulerUnavailable: the controller gave no usable answer.
        """
        return self._all(self._module.Jobs.load, job_row_from)

    def accounted(self, job_ids: Iterable[int]) -> list[Row]:
        """Return what sacct would say of some jobs.

        Raises:
            SchedulerUnavailable: accounting gave no usable answer.
        """
        database, wanted = self._module.db, list(job_ids)
        return self._all(
            lambda: database.Jobs.load(database.JobFilter(ids=wanted)), accounted_row_from
        )

    def nodes(self) -> list[Node]:
        """Return all nodes.

        Raises:
            SchedulerUnavailable: the controller gave no usable answer.
        """
        return self._all(self._module.Nodes.load, node_from)

    def partitions(self) -> list[Partition]:
        """Return all partitions.

        Raises:
            SchedulerUnavailable: the controller gave no usable answer.
        """
        return self._all(self._module.Partitions.load, partition_from)

    def _all(self, load: Callable[[], Any], read: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        fault = getattr(getattr(self._module, "error", None), "PyslurmError", RuntimeError)
        try:
            return [read(one.to_dict()) for one in load().values()]
        except fault as error:
            raise SchedulerUnavailable(f"pyslurm: {error}") from error


def job_row_from(job: Mapping[str, Any]) -> Row:
    """Return one job of `pyslurm.Jobs`, as squeue would show it."""
    return _row(job, nodes="allocated_nodes")


def accounted_row_from(job: Mapping[str, Any]) -> Row:
    """Return one job of `pyslurm.db.Jobs`, as sacct would show it."""
    return _row(job, nodes="nodelist")


def node_from(node: Mapping[str, Any]) -> Node:
    """Return one node of `pyslurm.Nodes`."""
    gres = at(dict(node), "configured_gres")
    configured = gres.items() if isinstance(gres, dict) else ()
    memory = (whole(node.get("real_memory")) or 1) - (
        whole(node.get("memory_reserved_for_system")) or 0
    )
    return Node(
        name=text(node.get("name")),
        states=node_states(text(node.get("state"))),
        partitions=words(node.get("partitions")),
        sockets=whole(node.get("sockets")) or 1,
        cores_per_socket=whole(node.get("cores_per_socket")) or 1,
        threads_per_core=whole(node.get("threads_per_core")) or 1,
        cpus=whole(node.get("effective_cpus")) or whole(node.get("total_cpus")) or 1,
        memory_mib=max(memory, 1),
        tmp_disk_mib=whole(node.get("temporary_disk")) or 0,
        gres=parse_gres(",".join(f"{name}:{count}" for name, count in configured)),
        features=frozenset(words(node.get("available_features"))),
        reason=text(node.get("reason")),
    )


def partition_from(partition: Mapping[str, Any]) -> Partition:
    """Return one partition of `pyslurm.Partitions`."""

    def limit(name: str) -> int | None:
        return whole(partition.get(name))

    def span(name: str) -> int | None:
        minutes = limit(name)
        return None if minutes is None else minutes * _MINUTE

    def allowed(name: str) -> tuple[str, ...] | None:
        found = words(partition.get(name))
        return None if not found or found == ("ALL",) else found

    return Partition(
        name=text(partition.get("name")),
        state=text(partition.get("state")).upper() or "UP",
        default=partition.get("is_default") is True,
        nodes=expand_known(text(partition.get("nodes"))),
        total_nodes=limit("total_nodes") or 0,
        total_cpus=limit("total_cpus") or 0,
        max_seconds=span("max_time"),
        default_seconds=span("default_time"),
        min_nodes=limit("min_nodes") or 0,
        max_nodes=limit("max_nodes"),
        max_cpus_per_node=limit("max_cpus_per_node"),
        max_memory_per_node_mib=limit("max_memory_per_node") or None,
        max_memory_per_cpu_mib=limit("max_memory_per_cpu") or None,
        default_memory_per_node_mib=limit("default_memory_per_node") or None,
        default_memory_per_cpu_mib=limit("default_memory_per_cpu") or None,
        allow_accounts=allowed("allowed_accounts"),
        # "ALL" stands there for an empty list, of those who are denied too.
        deny_accounts=allowed("denied_accounts") or (),
        allow_qos=allowed("allowed_qos"),
        deny_qos=allowed("denied_qos") or (),
        allow_groups=allowed("allowed_groups"),
        exclusive=text(partition.get("oversubscribe")).upper() == "EXCLUSIVE",
        qos=text(partition.get("qos")),
        root_only=partition.get("is_root_only") is True,
        reservation_only=partition.get("requires_reservation") is True,
    )


def _row(job: Mapping[str, Any], *, nodes: str) -> Row:
    raw, array = whole(job.get("id")), whole(job.get("array_id"))
    task, tasks = whole(job.get("array_task_id")), text(job.get("array_tasks_waiting"))
    if array and task is None and not tasks:
        task = 0  # pyslurm makes None of 0
    parallel = whole(job.get("array_tasks_parallel"))
    if tasks and parallel:
        tasks = f"{tasks}%{parallel}"
    shown = job_id_of(
        raw,
        array,
        task,
        tasks,
        whole(job.get("heterogeneous_id")),
        whole(job.get("heterogeneous_offset")),
    )
    code, signal = whole(job.get("exit_code")), whole(job.get("exit_code_signal"))
    status = make_status(
        shown,
        text(job.get("state")),
        reason=text(job.get("state_reason")),
        code=None if code is None else (code, signal or 0),
        nodes=text(job.get(nodes)),
        submitted=time_of(job.get("submit_time")),
        started=time_of(job.get("start_time")),
        ended=time_of(job.get("end_time")),
        restarts=whole(job.get("requeue_count")) or 0,
        name=str(job.get("name") or ""),
        directory=str(job.get("working_directory") or ""),
    )
    return Row("" if raw is None else str(raw), shown, status)
