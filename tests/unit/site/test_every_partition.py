"""From a cluster to a profile to jobs: what the profile lets a job ask for, the cluster has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpml_orchestrator.scheduler.cluster import Node, Partition
from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.site.profile_text import profile_text
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import NodeType, Site
from hpml_orchestrator.spec.site_load import ResolvedSite, load_site

MIB = {"M": 1, "G": 1024, "T": 1024**2}


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def seconds(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + rest


def greedy(site: Site, name: str, kind: NodeType) -> dict[str, object]:
    """Resources that take all that a profile offers in a partition."""
    partition = site.partitions[name]
    cpus = min(one for one in (kind.cpus, partition.max_cpus_per_node) if one)
    memory = [one for one in (kind.memory, partition.max_memory_per_node) if one]
    wanted: dict[str, object] = {
        "partition": name,
        "nodes": min(one for one in (partition.max_nodes, kind.count) if one is not None),
        "gpus": kind.gpus,
        "ranks_per_node": 1,
        "cpus_per_rank": cpus,
    }
    if memory:
        wanted["memory"] = min(memory, key=lambda one: int(one[:-1]) * MIB[one[-1]])
    if partition.max_time not in (None, "unlimited"):
        wanted["time"] = partition.max_time
    return wanted


def check(asked: dict[str, str], partition: Partition, nodes: list[Node]) -> None:
    """What a script asks for is what enough nodes of the partition have, within its limits."""
    assert asked["partition"] == partition.name
    gpus = dict(
        one.rpartition(":")[::2] for one in asked.get("gpus-per-node", "").split(",") if one
    )
    fit = [
        node
        for node in nodes
        if int(asked["cpus-per-task"]) <= node.cpus
        and int(asked.get("mem", "0M").removesuffix("M")) <= node.memory_mib
        and all(int(number) <= node.gpus(kind) for kind, number in gpus.items())
    ]
    assert len(fit) >= int(asked["nodes"])
    if partition.max_nodes is not None:
        assert int(asked["nodes"]) <= partition.max_nodes
    if partition.max_cpus_per_node is not None:
        assert int(asked["cpus-per-task"]) <= partition.max_cpus_per_node
    if partition.max_memory_per_node_mib is not None:
        assert int(asked["mem"].removesuffix("M")) <= partition.max_memory_per_node_mib
    if partition.max_seconds is not None:
        assert seconds(asked["time"]) <= partition.max_seconds


@pytest.mark.parametrize("which", ["small", "big", "captured"])
def test_jobs_that_take_all_a_profile_offers_fit_the_cluster(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """For every kind of node in every partition, of real clusters and of a big made-up one."""
    cluster = request.getfixturevalue(which)
    profile = tmp_path / "hpml.toml"
    profile.write_text(profile_text(cluster))
    site: ResolvedSite = load_site([profile])
    assert set(site.site.partitions) == {one.name for one in cluster.partitions}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"name": "a", "command": ["true"], "launcher": "srun"}))
    rendered = 0
    for partition in cluster.partitions:
        names = set(partition.nodes)
        nodes = [node for node in cluster.nodes if node.name in names]
        kinds = site.site.partitions[partition.name].node_types
        assert bool(kinds) == bool(nodes)
        for kind in kinds:
            wanted = greedy(site.site, partition.name, site.site.node_types[kind])
            if which == "big":  # a kind's nodes are spread over many partitions
                wanted["nodes"] = 1
            elif not wanted["nodes"]:
                continue
            wanted["nodes"] = min(int(str(wanted["nodes"])), len(nodes))
            job = load_job(path, [("resources", wanted)], site).job
            check(directives(render(job, Capabilities("/usr/bin/python3"), site)), partition, nodes)
            rendered += 1
    assert rendered >= 2
