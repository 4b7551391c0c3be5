"""Probe a cluster's nodes: one idle node of each kind."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.records import units
from hpml_orchestrator.scheduler import model
from hpml_orchestrator.scheduler.cluster import takes_jobs
from hpml_orchestrator.site import node_probe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpml_orchestrator.scheduler.cluster import Cluster, Gres, Node
    from hpml_orchestrator.scheduler.command import Runner

# Group a cluster's nodes by equal hardware, and name each kind.

_MAX_KINDS = 64
"""With more kinds than this, ignore features, then disks and memory."""

_DIFFERING: dict[str, Callable[[Node], Hashable]] = {
    "features": lambda node: node.features,
    "memory": lambda node: node.memory_mib,
    "local disk": lambda node: node.tmp_disk_mib,
    "CPUs": lambda node: node.cpus,
    "GPUs": lambda node: frozenset(_gpus(node)),
}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind."""

    name: str  # such as `a100x4`, `cpu`, `a100x4-2`
    nodes: tuple[Node, ...]  # in the cluster's order
    sample: Node  # what all have: least memory and disk, common features
    uneven: tuple[str, ...] = ()  # what still differs within the group, such as `memory`

    @property
    def gpus(self) -> tuple[Gres, ...]:
        """GPUs of each node, by type."""
        return _gpus(self.sample)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions that any of the nodes is in."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.partitions))


def group_nodes(cluster: Cluster) -> tuple[NodeGroup, ...]:
    """Return the kinds of nodes, starting with those with GPUs and the largest.

    Nodes are of one kind if sockets, cores, threads, CPUs, GPUs, memory, local disk and features
    are
    equal; some of these are ignored if there would be more than 64 kinds.
    """
    comparisons: tuple[Callable[[Node], Hashable], ...] = (
        lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib, node.features),
        lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib),
        _hardware,
        _gpus,
    )
    # Features may name each rack or switch, so ignore them first: 1,000 nodes must not become
    # 1,000 kinds.
    for same in comparisons:
        kinds: dict[Hashable, list[Node]] = {}
        for node in cluster.nodes:
            kinds.setdefault(same(node), []).append(node)
        if len(kinds) <= _MAX_KINDS:
            break
    ordered = sorted(kinds.values(), key=lambda nodes: (not _gpus(nodes[0]), -len(nodes)))
    taken: set[str] = set()
    return tuple(_group(nodes, taken) for nodes in ordered)


def fold(names: Iterable[str]) -> str:
    """Return node names in Slurm's compact form.

    >>> fold(["gpu02", "gpu01", "login"])
    'gpu[01-02],login'
    """
    listed = sorted(names)
    try:
        return model.fold(listed)
    except InputError:  # not valid as host names
        return ",".join(listed)


def gpu_text(gpus: Sequence[Gres]) -> str:
    """Return GPUs as in a job file, or only their number if a job file cannot name their types."""
    typed = ",".join(f"{gres.kind}:{gres.count}" if gres.kind else f"{gres.count}" for gres in gpus)
    try:
        return str(units.parse_gpus(typed))
    except ValueError:
        return str(sum(gres.count for gres in gpus))


def _gpus(node: Node) -> tuple[Gres, ...]:
    return tuple(sorted(gres for gres in node.gres if gres.name == "gpu" and gres.count))


def _hardware(node: Node) -> tuple[Hashable, ...]:
    return (node.sockets, node.cores_per_socket, node.threads_per_core, node.cpus, _gpus(node))


def _group(nodes: list[Node], taken: set[str]) -> NodeGroup:
    uneven = [name for name, value in _DIFFERING.items() if len(set(map(value, nodes))) > 1]
    sample = min(nodes, key=lambda node: (node.gpus(), node.cpus, node.memory_mib))
    # A profile states what every node of a kind has, so take the minimum.
    sample = replace(
        sample,
        memory_mib=min(node.memory_mib for node in nodes),
        tmp_disk_mib=min(node.tmp_disk_mib for node in nodes),
        cpus=min(node.cpus for node in nodes),
        features=frozenset.intersection(*(node.features for node in nodes)),
    )
    counts = Counter({gres.kind or "gpu": gres.count for gres in _gpus(nodes[0])})
    parts = [
        f"{re.sub(r'[^A-Za-z0-9_]', '', kind) or 'gpu'}x{number}"
        for kind, number in sorted(counts.items())
    ]
    base = "-".join(parts)[:64] or "cpu"
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return NodeGroup(name, tuple(nodes), sample, tuple(uneven))


_IMMEDIATE_SECONDS = 30  # in the queue
_TIMEOUT_SECONDS = 90.0
_AT_ONCE = 8
_MEMORY_MIB = 256
_PARTITIONS_TRIED = 2
_REASON_CHARS = 200


def probe(
    cluster: Cluster,
    groups: Sequence[NodeGroup],
    run: Runner,
    env: Mapping[str, str],
    records: Path,
) -> dict[str, node_probe.NodeProbe | str]:
    """Probe one idle node of each kind; return the result, or why there is none, by kind.

    All of `env` reaches the node, which should see the directory of the records.
    """
    token = records / f"hpml-probe-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        records.mkdir(parents=True, exist_ok=True)
        token.touch()
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(partial(_probe, cluster, run=run, env=env, token=token), groups))
    except BaseException:
        _cancel(token.name, run, env)  # leave no probe in the queue after Ctrl-C
        raise
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
    return {group.name: seen for group, seen in zip(groups, found, strict=True)}


def _probe(
    cluster: Cluster, group: NodeGroup, *, run: Runner, env: Mapping[str, str], token: Path
) -> node_probe.NodeProbe | str:
    # For any other node srun would wait in the queue, and the user would wait for srun.
    idle = (node for node in group.nodes if "IDLE" in node.states and takes_jobs(node.states))
    node = next(idle, None)
    if node is None:
        if any(node.up for node in group.nodes):
            return "no node of this kind was idle"
        return "all nodes of this kind are out of service"
    argv = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--time=1", "--quiet"]
    argv += [f"--immediate={_IMMEDIATE_SECONDS}", f"--job-name={token.name}"]
    # The current directory may not exist on the nodes.
    argv += [f"--nodelist={node.name}", "--chdir=/", "--mpi=none", "--cpu-bind=none"]
    if cluster.limits.memory_consumable:
        argv.append(f"--mem={_MEMORY_MIB}M")
    shown = str(token) if token.exists() else ""
    look = node_probe.command(cluster.limits.tmp_fs, topology=True, token=shown)
    reason = "it is in no usable partition"
    for options in _attempts(cluster, group, node):
        try:
            done = run.run([*argv, *options, *look], env=env, timeout=_TIMEOUT_SECONDS)
        except HpmlError as error:
            _cancel(token.name, run, env)
            return _short(str(error))
        seen = node_probe.parse(done.stdout)
        if seen is not None:
            return seen
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        lines = [line for line in lines if "error" in line.lower()] or lines
        reason = f"srun ended with status {done.returncode}"
        if lines:
            reason = _short(lines[-1].removeprefix("srun: ").removeprefix("error: "))
        # The step ran and failed on the node: another partition or a GPU would not help.
        if "Unable to allocate" not in done.stderr and "error" not in done.stderr:
            break
    return reason


def _attempts(cluster: Cluster, group: NodeGroup, node: Node) -> list[list[str]]:
    """Return options to try in turn: the node's partitions, then with a GPU (some sites)."""
    partitions = [
        f"--partition={partition.name}"
        for partition in sorted(cluster.partitions, key=lambda partition: not partition.default)
        if node.name in partition.nodes
        and partition.state == "UP"
        and not (partition.root_only or partition.reservation_only)
    ][:_PARTITIONS_TRIED]
    gpus = [f"--gres=gpu:{gpu.kind}:1" if gpu.kind else "--gres=gpu:1" for gpu in group.gpus[:1]]
    return [[name] for name in partitions] + [[name, gpu] for name in partitions for gpu in gpus]


def _cancel(name: str, run: Runner, env: Mapping[str, str]) -> None:
    with contextlib.suppress(HpmlError):  # its time limit of one minute ends it anyway
        run.run(["scancel", "--quiet", f"--name={name}"], env=env, timeout=_TIMEOUT_SECONDS)


def _short(text: str) -> str:
    return " ".join(text.split())[:_REASON_CHARS]
