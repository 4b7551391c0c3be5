"""The job of `hpml bench`: the program that nodes run, and the resources it requests."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.assets import own_interpreter
from hpml_orchestrator.errors import InputError, did_you_mean
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.local.processes import (
    cpu_ids,
    gpu_ids,
    memory_mb,
    short_hostname,
)
from hpml_orchestrator.scheduler.model import MAX_NODES, expand, fold

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition

SECONDS = 110.0
"""Time limit of the measuring program; including its start, that makes two minutes."""

_PACKAGE = Path(__file__).resolve().parent.parent
_MODULES = (
    *("__init__", "errors", "version", "bench/__init__"),
    *("diagnosis/__init__", "diagnosis/model", "diagnosis/models"),
    *("topology/__init__", "topology/cpulist"),
)
_MAIN = """\
import sys

from hpml_orchestrator.bench.measure import main

sys.exit(main())
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MEMORY_MIB = 4096  # for the node, plus the same for each GPU
_TIME = "00:10:00"  # measuring takes at most two minutes; the rest is for slow starts


@dataclass(frozen=True)
class Nodes:
    """The nodes that the user requests: a number, or names."""

    count: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchSize:
    """What the job requests on each node."""

    cpus: int = 1
    gpus: int = 0
    memory_mib: int | None = None
    partition: str = ""  # empty: the default
    exclude: tuple[str, ...] = ()  # nodes of the partition that have another size


def place_program(directory: Path) -> Path:
    """Write the measuring program for the nodes, a zip archive, and return its path.

    Its name contains a digest, so that a job runs the program with which it was submitted, however
    long it waits in the queue.

    Raises:
        RecordError: it cannot be written.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _MAIN)
        for name in (*_MODULES, "bench/measure"):
            data = (_PACKAGE / f"{name}.py").read_bytes()
            archive.writestr(zipfile.ZipInfo(f"{_PACKAGE.name}/{name}.py", _EPOCH), data)
    content = buffer.getvalue()
    path = directory / f"bench-{hashlib.sha256(content).hexdigest()[:16]}.pyz"
    if not path.is_file() or path.read_bytes() != content:
        write_text(path, content)
    return path


def parse_nodes(text: str) -> Nodes:
    """Parse `--nodes`: a number of nodes, or a list such as `node[1-3],node7`.

    Raises:
        InputError: it is neither.
    """
    if text.strip().isdecimal():
        count = int(text)
        if not 1 <= count <= MAX_NODES:
            raise InputError(f"must be from 1 to {MAX_NODES}", field="--nodes", value=text)
        return Nodes(count)
    try:
        names = expand(text)
    except InputError as error:
        raise InputError(error.message, field="--nodes", value=text, hint=error.hint) from error
    if not names:
        raise InputError(
            "must be a number of nodes or their names",
            field="--nodes",
            value=text,
            hint="--nodes 4, or --nodes node[1-3],node7",
        )
    return Nodes(len(names), names)


def size_of(nodes: Nodes, partition: str | None, cluster: Cluster | None) -> BenchSize:
    """Return what to request on each node so that the job gets the whole node.

    In a partition with several kinds of nodes the most frequent kind is measured, unless the user
    names nodes; then the job requests what the smallest of them has.

    Args:
        nodes: nodes that the user requests.
        partition: the job's partition, perhaps several.
        cluster: None for this machine.

    Raises:
        InputError: a node does not exist, or no partition contains all of them.
    """
    if cluster is None:
        here = short_hostname()
        others = [name for name in nodes.names if name != here]
        if others or nodes.count > 1:
            raise InputError(
                f"with the local backend it measures this machine alone, {here}",
                field="--nodes",
                value=",".join(nodes.names) or nodes.count,
                hint="leave --nodes out, or submit to a Slurm cluster",
            )
        return BenchSize(len(cpu_ids()), len(gpu_ids()), _memory(len(gpu_ids()), memory_mb()))
    if not cluster.nodes or not cluster.partitions:  # PrivateData: the user sets the sizes
        return BenchSize()
    chosen = _partition(nodes, partition, cluster)
    if chosen is None:
        return BenchSize()  # the check reports that the partition does not exist
    members = cluster.nodes_of(chosen)
    exclude: tuple[str, ...] = ()
    if nodes.names:
        members = tuple(node for node in cluster.nodes if node.name in nodes.names)
    else:
        usable = [node for node in members if node.up] or list(members)
        # Only nodes of one kind can be compared. Slurm would mix the kinds of a partition, so
        # exclude the nodes of all others.
        kinds = Counter(map(_kind, usable))
        kind = max(kinds, key=lambda one: (kinds[one] >= nodes.count, kinds[one]), default=None)
        exclude = tuple(node.name for node in members if _kind(node) != kind)
        members = tuple(node for node in members if _kind(node) == kind)
    if not members:
        return BenchSize()
    gpus = min(node.gpus() for node in members)
    least = min(node.memory_mib for node in members)
    return BenchSize(
        cpus=min(chosen.max_cpus_per_node or MAX_NODES, *(node.cpus for node in members)),
        gpus=gpus,
        memory_mib=_memory(gpus, least) if cluster.limits.memory_consumable else None,
        partition="" if partition or chosen.default else chosen.name,
        exclude=exclude,
    )


def _kind(node: Node) -> tuple[object, ...]:
    return (node.cpus, *sorted((one.name, one.kind, one.count) for one in node.gres))


def _memory(gpus: int, least: int) -> int:
    """Return the memory to request: what measuring needs, at most 90 % of the node's."""
    wanted = _MEMORY_MIB * (1 + gpus)
    return min(wanted, least * 9 // 10) if least else wanted


def _partition(nodes: Nodes, wanted: str | None, cluster: Cluster) -> Partition | None:
    """Return the job's partition; else the default one, or one with all the nodes."""
    known = {node.name for node in cluster.nodes}
    for name in nodes.names:
        if name not in known:
            raise InputError(
                "does not exist in this cluster",
                field="--nodes",
                value=name,
                hint=did_you_mean(name, known) or "`sinfo --Node` lists them",
            )
    if wanted:
        found = map(cluster.partition, wanted.split(","))
        return next((one for one in found if one is not None), None)
    default = cluster.default_partition
    usable = [one for one in cluster.partitions if one.state == "UP" and not one.root_only]
    candidates = [*([default] if default else []), *usable]
    for one in candidates:
        if set(nodes.names) <= set(one.nodes):
            return one
    raise InputError(
        "none of the partitions has all of these nodes"
        if nodes.names
        else "must be given: this cluster has no default partition",
        field="--nodes" if nodes.names else "resources.partition",
        value=fold(nodes.names) if nodes.names else None,
        hint=f"--set resources.partition=NAME; there are {first_few([p.name for p in usable])}",
    )


def job_fields(
    size: BenchSize, nodes: Nodes, program: Path, args: Sequence[str]
) -> dict[str, object]:
    """Return the fields of the job file; command line and site profile may add others.

    Args:
        size: what to request on each node.
        nodes: nodes that the user requests.
        program: the measuring program.
        args: its arguments.
    """
    resources: dict[str, object] = {
        "nodes": nodes.count,
        "ranks_per_node": 1,
        "cpus_per_rank": size.cpus,
        "time": _TIME,
        "exclusive": True,
    }
    if size.gpus:
        resources["gpus"] = str(size.gpus)
    if size.memory_mib:
        resources["memory"] = f"{size.memory_mib}M"
    if size.partition:
        resources["partition"] = size.partition
    extra = [f"--nodelist={fold(nodes.names)}"] if nodes.names else []
    extra += [f"--exclude={fold(size.exclude)}"] if size.exclude else []
    if extra:
        resources["extra"] = extra
    return {
        "name": "bench",
        "launcher": "srun",
        "script": str(program),
        "args": list(args),
        # The parts bind themselves, one of them to a remote domain on purpose.
        "binding": "none",
        "monitor": False,
        "checkpoint": False,
        "resources": resources,
    }


def own_python(job: Job) -> str:
    """Return the Python for measuring if the job sets no software; else an empty string."""
    software = job.environment
    named = software.modules or software.conda or software.venv or software.container
    return "" if named or software.python != "python" else own_interpreter()


def arguments(job: Job, shared: str, seconds: float) -> list[str]:
    """Return the arguments of the measuring program.

    Args:
        job: the job, for its number of GPUs.
        shared: the directory on the shared file system to measure; empty for that of the records.
        seconds: its time limit.
    """
    options: Mapping[str, str] = {
        "--out": "{run.dir}/bench",
        "--run": "{run.id}",
        "--local": "{local.dir}",
        "--shm": "{shm.dir}",
        "--shared": shared,
        "--gpus": str(job.resources.gpu_count),
        "--seconds": f"{seconds:g}",
    }
    return [word for option, value in options.items() if value for word in (option, value)]
