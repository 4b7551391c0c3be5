"""Count the nodes that meet all requests of a job at once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, error, warning
from hpml_orchestrator.check.request import JobRequest, Placement, cpus_field, memory_field
from hpml_orchestrator.errors import counted, did_you_mean
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import size_text
from hpml_orchestrator.scheduler.cluster import Cluster, Node

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.site.model import Site

_FEATURES = re.compile(r"[^\[\]()&|*,]+(?:[&,][^\[\]()&|*,]+)*")


@dataclass(frozen=True)
class _Need:
    """One thing that a node must have.

    Attributes:
        code: of the finding, up to its dot.
        field: of the job's `resources`.
        text: for messages.
        has: how much of it a node has.
        least: how much of it a node must have.
        show: how a message shows an amount.
    """

    code: str
    field: str
    text: str
    has: Callable[[Node], int]
    least: int
    show: Callable[[int], str] = str

    def met(self, node: Node) -> bool:
        return self.has(node) >= self.least


def fit(placement: Placement) -> tuple[list[Node], list[CheckFinding]]:
    """Return the nodes that meet all requests of a job, and findings about unmet requests.

    The state of a node does not matter; one that is only planned (FUTURE) does not count.
    """
    request, partition = placement.request, placement.partition
    members = placement.cluster.nodes_of(partition)
    # A node that is down counts: the job may wait for it. One that is FUTURE exists in the
    # configuration only.
    nodes = [node for node in members if "FUTURE" not in node.states]
    needs = list(_needs(placement))
    fitting = [node for node in nodes if all(need.met(node) for need in needs)]
    if len(fitting) >= request.nodes:
        return fitting, []
    # Name a single need that too few nodes meet. Only if each alone is met often enough is the
    # combination at fault, and the message must say so.
    short = [need for need in needs if sum(map(need.met, nodes)) < request.nodes]
    if short:
        findings = [_short(placement, need, nodes) for need in short]
    else:
        texts = [need.text for need in needs if need.least > 1 or need.code == "features"]
        message = f"{_only(len(fitting))} of partition {partition.name} with "
        message += f"{first_few(texts)} at once; "
        message += f"{request.nodes} needed"
        findings = [request.fault("nodes.together", "nodes", message, len(fitting))]
    return fitting, findings


def unknown_to_cluster(request: JobRequest, cluster: Cluster) -> Iterator[CheckFinding]:
    """Yield requests that no node of the cluster meets: GPUs, their types, features."""
    if not cluster.nodes:
        return
    yield from _unknown_gpus(request, cluster)
    features = sorted({feature for node in cluster.nodes for feature in node.features})
    for name in plain_features(request):
        if name not in features:
            message = f"no node has the feature {name}; there are {first_few(features)}"
            hint = did_you_mean(name, features)
            yield request.fault("features.unknown", "constraint", message, features, hint)


def plain_features(request: JobRequest) -> list[str]:
    """Return the features of `a` or `a&b`; empty with other operators, which only Slurm reads."""
    constraint = request.job.resources.constraint or ""
    return re.split("[&,]", constraint) if _FEATURES.fullmatch(constraint) else []


def _needs(placement: Placement) -> Iterator[_Need]:
    request, resources = placement.request, placement.request.job.resources
    cpus, most_cpus = placement.cpus, placement.partition.max_cpus_per_node

    def cpus_of(node: Node) -> int:
        if most_cpus is None or most_cpus >= node.cpus:
            return node.cpus
        return 0 if placement.whole_nodes else most_cpus  # such a node is never given whole

    if cpus > request.cpus:
        text = f"{cpus} CPUs per node, because of its memory (MaxMemPerCPU)"
        yield _Need("cpus", memory_field(request.job), text, cpus_of, cpus)
    else:
        ranks = f" ({resources.ranks} ranks of {resources.cpus_per_rank})"
        text = f"{counted(cpus, 'CPU')} per node{ranks * (resources.ranks > 1)}"
        yield _Need("cpus", cpus_field(request.job), text, cpus_of, cpus)
    memory, disk = placement.memory_mib, request.disk_mib
    if memory:
        text = placement.memory_text
        field = memory_field(request.job)
        yield _Need("memory", field, text, lambda node: node.memory_mib, memory, size_text)
    if disk:
        text = f"{size_text(disk)} of local disk for staging"
        # 0: the site does not say
        yield _Need("disk", "stage", text, lambda node: node.tmp_disk_mib or disk, disk, size_text)
    for kind, count in request.gpus:
        text = f"{counted(count, 'GPU')}{f' of type {kind}' if kind else ''} per node"
        yield _Need("gpus", "gpus", text, functools.partial(Node.gpus, kind=kind), count)
    features = frozenset(plain_features(request))
    if features:
        text = f"the features {resources.constraint}"
        yield _Need("features", "constraint", text, lambda node: features <= node.features, 1)


def _short(placement: Placement, need: _Need, nodes: Sequence[Node]) -> CheckFinding:
    request, partition = placement.request, placement.partition
    having = sum(map(need.met, nodes))
    # The n-th largest amount is the most that a job of n nodes can ask for.
    amounts = sorted(map(need.has, nodes), reverse=True)
    most = amounts[request.nodes - 1] if len(amounts) >= request.nodes else 0
    message = f"this job asks for {need.text}; "
    if having:
        message += f"{_only(having)} of partition {partition.name} with that"
        message += f"; {request.nodes} needed"
    elif most:
        message += f"nodes of partition {partition.name} have at most {need.show(most)}"
    elif need.code == "cpus":
        message += f"partition {partition.name} gives no whole node: "
        message += f"at most {partition.max_cpus_per_node} CPUs of each"
    else:
        message += f"no node of partition {partition.name} has any"
    if need.code == "features":
        return request.fault("features.nodes", need.field, message, having)
    if need.code == "disk":
        value = size_text(request.disk_mib)
        return error("disk.most", "stage", value, message, need.show(most))
    return request.fault(f"{need.code}.most", need.field, message, need.show(most))


def _only(count: int) -> str:
    return f"only {counted(count, 'node')}" if count else "no node"


def _unknown_gpus(request: JobRequest, cluster: Cluster) -> Iterator[CheckFinding]:
    types: dict[str, int] = {}
    for gres in (gres for node in cluster.nodes for gres in node.gres if gres.name == "gpu"):
        types[gres.kind] = max(types.get(gres.kind, 0), gres.count)
    if request.gpus and not types:
        yield request.fault("gpus.none", "gpus", "this cluster has no GPUs that Slurm knows of", 0)
        return
    there = [f"{name}:{count}" for name, count in sorted(types.items()) if name]
    for kind, _ in request.gpus:
        if kind and kind not in types:
            noun = "MIG profile" if "g." in kind else "type of GPU"
            message = f"no node has the {noun} {kind}; nodes have up to "
            message += first_few(there, none="GPUs without a type")
            hint = did_you_mean(kind, [name for name in types if name and "g." not in kind])
            yield request.fault("gpus.type", "gpus", message, sorted(types), hint)


def check_room(job: Job, site: Site | None, *, disk_mib: int) -> Iterator[CheckFinding]:
    """Yield a finding if the data, as far as known, exceed the local disks in the site profile."""
    kinds = site.kinds_of(job.resources.partition) if site else {}
    disks = {name: kind.local_disk for name, kind in kinds.items() if kind.local_disk}
    small = sorted(name for name, size in disks.items() if size < disk_mib)
    if small:
        level = error if len(small) == len(kinds) else warning
        need, limit = size_text(disk_mib), size_text(max(disks[name] for name in small))
        message = f"the job stages {need} to the local disk; nodes of type {first_few(small)} have "
        message += f"at most {limit}, by the site profile"
        yield level("stage.local_disk", "stage", need, message, limit)
