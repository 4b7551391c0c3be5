"""Probe one idle node of each kind with a short srun."""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.scheduler.cluster import takes_jobs
from hpml_orchestrator.site import node_probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.scheduler.cluster import Cluster, Node
    from hpml_orchestrator.scheduler.command import Runner
    from hpml_orchestrator.site.nodes import NodeGroup

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
    """Probe one idle node of each kind: kind -> the result, or why there is none.

    All of `env` travels to the node, which should see the directory of the records.
    """
    token = records / f"hpml-probe-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        records.mkdir(parents=True, exist_ok=True)
        token.touch()
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(partial(_probe, cluster, run=run, env=env, token=token), groups))
    except BaseException:
        _cancel(token.name, run, env)  # after Ctrl-C no probe may stay in the queue
        raise
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
    return {group.name: seen for group, seen in zip(groups, found, strict=True)}


def _probe(
    cluster: Cluster, group: NodeGroup, *, run: Runner, env: Mapping[str, str], token: Path
) -> node_probe.NodeProbe | str:
    # srun would wait in the queue for any other node, and a user waits for srun.
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
        # The step ran and failed on the node: other partitions or a GPU would not help.
        if "Unable to allocate" not in done.stderr and "error" not in done.stderr:
            break
    return reason


def _attempts(cluster: Cluster, group: NodeGroup, node: Node) -> list[list[str]]:
    """Return options to try in turn: the node's partitions, then with a GPU, as some sites want."""
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
    with contextlib.suppress(HpmlError):  # its time limit of one minute ends it all the same
        run.run(["scancel", "--quiet", f"--name={name}"], env=env, timeout=_TIMEOUT_SECONDS)


def _short(text: str) -> str:
    return " ".join(text.split())[:_REASON_CHARS]
