"""Look at one idle node of each kind with a short srun, and never wait long for it."""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.site import look

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition
    from hpml_orchestrator.scheduler.command import Runner
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["here", "probe"]

IMMEDIATE_SECONDS = 30
"""How long a probe may wait in the queue."""

_TIMEOUT_SECONDS = 90.0
_AT_ONCE = 8
_MEMORY_MIB = 256
_PARTITIONS_TRIED = 2
_WORDS_CHARS = 200


def here(run: Runner, env: Mapping[str, str], *, tmp_fs: str) -> look.Look | None:
    """Look at this machine; None where that fails."""
    try:
        done = run.run(look.command(tmp_fs, topology=False), env=env, timeout=_TIMEOUT_SECONDS)
    except HpmlError:
        return None
    return look.parse(done.stdout)


def probe(
    cluster: Cluster, groups: Sequence[NodeGroup], run: Runner, env: Mapping[str, str]
) -> dict[str, look.Look | str]:
    """Look at one idle node of each kind: kind -> what was found, or why nothing was.

    Args:
        cluster: the cluster.
        groups: its kinds of nodes.
        run: starts commands.
        env: environment of srun; all of it travels to the node.
    """
    name = f"hpml-probe-{secrets.token_hex(4)}"
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda group: _one(cluster, group, run, env, name), groups))
    except BaseException:
        _cancel(name, run, env)  # Ctrl-C: no probe stays in the queue
        raise
    return {group.name: answer for group, answer in zip(groups, found, strict=True)}


def _one(
    cluster: Cluster, group: NodeGroup, run: Runner, env: Mapping[str, str], name: str
) -> look.Look | str:
    node = next((one for one in group.nodes if one.up and "IDLE" in one.states), None)
    if node is None:
        up = any(one.up for one in group.nodes)
        return (
            "no node of this kind was idle" if up else "all nodes of this kind are out of service"
        )
    said = "it is in no partition that can be used"
    for arguments in _attempts(cluster, group, node):
        argv = [*_srun(cluster, node, name), *arguments]
        argv += look.command(cluster.limits.tmp_fs, topology=True)
        try:
            done = run.run(argv, env=env, timeout=_TIMEOUT_SECONDS)
        except HpmlError as error:
            _cancel(name, run, env)
            return _words(str(error))
        found = look.parse(done.stdout)
        if found is not None:
            return found
        said = _reason(done.stderr) or f"srun ended with status {done.returncode}"
        if "Unable to allocate" not in done.stderr and "error" not in done.stderr:
            break
    return said


def _srun(cluster: Cluster, node: Node, name: str) -> list[str]:
    argv = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--time=1", "--quiet"]
    argv += [f"--immediate={IMMEDIATE_SECONDS}", f"--job-name={name}", f"--nodelist={node.name}"]
    argv += ["--chdir=/", "--mpi=none", "--cpu-bind=none"]
    if cluster.limits.memory_consumable:
        argv.append(f"--mem={_MEMORY_MIB}M")
    return argv


def _attempts(cluster: Cluster, group: NodeGroup, node: Node) -> Iterator[list[str]]:
    """Options to try in turn: the partitions of the node, then with a GPU, as some sites want."""
    usable = sorted(
        (one for one in cluster.partitions if node.name in one.nodes and _open(one)),
        key=lambda one: not one.default,
    )[:_PARTITIONS_TRIED]
    for partition in usable:
        yield [f"--partition={partition.name}"]
    for partition in usable:
        for gpu in group.gpus[:1]:
            kind = f"{gpu.kind}:" if gpu.kind else ""
            yield [f"--partition={partition.name}", f"--gres=gpu:{kind}1"]


def _open(partition: Partition) -> bool:
    return partition.state == "UP" and not (partition.root_only or partition.reservation_only)


def _cancel(name: str, run: Runner, env: Mapping[str, str]) -> None:
    with contextlib.suppress(HpmlError):  # its time limit of one minute ends it all the same
        run.run(["scancel", "--quiet", f"--name={name}"], env=env, timeout=_TIMEOUT_SECONDS)


def _reason(stderr: str) -> str:
    """The last thing that srun said."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()] or lines
    return _words(told[-1].removeprefix("srun: ").removeprefix("error: ")) if told else ""


def _words(text: str) -> str:
    return " ".join(text.split())[:_WORDS_CHARS]
