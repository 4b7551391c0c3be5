"""A site profile contains the cluster's values, and hpml reads it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.scheduler.cluster import (
    Association,
    Cluster,
    ClusterLimits,
    Gres,
    Node,
    Partition,
)
from hpml_orchestrator.site.initialise import Origin, profile_text
from hpml_orchestrator.site.model import Site
from hpml_orchestrator.site.node_probe import Interface, NodeProbe, ScratchDirectory
from hpml_orchestrator.site.probe import group_nodes
from tests.unit.site.clusters import IDLE, loaded, uncommented

ODD = st.text(max_size=8) | st.sampled_from(
    ["gpu", "gpu.a", "a b", 'q"q', "ü", "x" * 300, "", "a]b", "#", "a\nb", "-x", "\udcff", "/local"]
)
NAMES = st.lists(ODD, max_size=4).map(tuple)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: ODD,
    int: st.integers(0, 2**40),
    bool: st.booleans(),
    int | None: st.none() | st.integers(0, 2**70),
    tuple[str, ...]: NAMES,
    tuple[str, ...] | None: st.none() | NAMES,
    frozenset[str]: st.frozensets(ODD | st.sampled_from(["IDLE", "DOWN", "DRAIN"]), max_size=3),
    tuple[int, ...]: st.lists(st.integers(0, 99), max_size=3).map(tuple),
}


def several(item: st.SearchStrategy[Any], **limits: Any) -> st.SearchStrategy[Any]:
    return st.lists(item, max_size=4, **limits).map(tuple)


def anything(kind: type[Any], /, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a class with any value of the right type in each field."""
    hints = get_type_hints(kind)
    return st.builds(
        kind, **{name: BY_TYPE[hint] for name, hint in hints.items() if hint in BY_TYPE} | own
    )


GPU_TYPES = st.sampled_from(["", "a100", "1g.10gb", "2080ti", "3090"]) | ODD
GRES = anything(Gres, name=st.sampled_from(["gpu", "mps", "shard"]) | ODD, kind=GPU_TYPES)
CLUSTERS = anything(
    Cluster,
    limits=anything(ClusterLimits),
    partitions=several(
        anything(Partition, state=st.sampled_from(["UP", "DOWN", "DRAIN", "INACTIVE"]) | ODD),
        unique_by=lambda partition: partition.name,
    ),
    nodes=several(anything(Node, gres=several(GRES)), unique_by=lambda node: node.name),
    associations=st.none() | several(anything(Association)),
)
PLACE_NAMES = st.sampled_from(["ram", "TmpFS", "path", "$LOCAL", "$TMPDIR"])
PLACES = anything(ScratchDirectory, name=PLACE_NAMES, path=ODD.map(lambda name: f"/{name}"))
LOOKS = anything(NodeProbe, places=several(PLACES), interfaces=several(anything(Interface)))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(CLUSTERS, LOOKS, ODD)
def test_whatever_slurm_says_becomes_a_profile(cluster: Cluster, look: NodeProbe, odd: str) -> None:
    """Odd names, quotes, unicode and absurd numbers never make a file that hpml does not read."""
    probes = {group.name: look for group in group_nodes(cluster)}
    for around in (Origin(odd, odd, odd), Origin(probes=probes)):
        text = profile_text(cluster, around)
        text.encode("utf-8")
        loaded(text)
        Site.model_validate(uncommented(text))
    assert profile_text(cluster) == profile_text(cluster)


def test_a_real_cluster_is_described_completely(captured: Cluster) -> None:
    """Every partition with its nodes' kinds, and every node of Slurm 22.05.8's own answers."""
    site = loaded(profile_text(captured))
    assert set(site.partitions) == {partition.name for partition in captured.partitions}
    assert sum(kind.count or 0 for kind in site.node_types.values()) == len(captured.nodes)
    for partition in captured.partitions:
        assert bool(site.partitions[partition.name].node_types) == bool(partition.nodes)


@pytest.mark.parametrize(
    ("found", "line"),
    [(None, ""), (True, "JobRequeue=1"), (False, "JobRequeue=0")],
)
def test_whether_jobs_are_requeued_by_default(found: bool | None, line: str) -> None:
    """The profile has the cluster's defaults for jobs."""
    text = profile_text(Cluster(ClusterLimits(job_requeue=found)))
    assert loaded(text).requeue == "auto"
    assert [
        one.partition("# ")[2].partition(";")[0] for one in text.splitlines() if "requeue =" in one
    ] == ([line] if line else [])


def test_a_partition_tells_its_limits(small: Cluster) -> None:
    """Time, nodes, CPUs, memory and who may use it."""
    gpu = loaded(profile_text(small)).partitions["gpu"]
    assert gpu.model_dump() == {
        "default": False,
        "node_types": ["a100x4"],
        "nodes": 2,
        "max_nodes": 2,
        "max_time": "1-00:00:00",
        "default_time": "01:00:00",
        "max_cpus_per_node": 120,
        "max_memory_per_node": "500000M",
        "exclusive": False,
        "accounts": ["physics"],
        "qos": ["normal", "long"],
    }


def test_nodes_are_grouped_by_equal_hardware(small: Cluster) -> None:
    """Each kind with its list, count and size; nodes that are down have their reason."""
    text = profile_text(small)
    kinds = loaded(text).node_types
    assert list(kinds) == ["a100x4", "cpu"]
    kind = kinds["a100x4"]
    assert (kind.nodes, kind.count, kind.cpus, str(kind.gpus)) == ("gpu[1-2]", 2, 128, "a100:4")
    assert (kind.memory, kind.local_disk, kind.threads_per_core) == (524288, 1843200, 2)
    assert "Out of service when this was written: 1 of 2." in text
    assert '# gpu2: fan "3" is dead ü' in text


def test_mixed_and_odd_gpus_are_named_sensibly() -> None:
    """MIG slices and whole GPUs, types without a name, and equal GPUs on unequal nodes."""

    def node(name: str, memory: int, *gres: Gres) -> Node:
        return Node(name, IDLE, memory_mib=memory, gres=gres)

    nodes = (
        node("a", 1, Gres("gpu", "1g.10gb", 7), Gres("gpu", "a100", 1)),
        node("b", 1, Gres("gpu", "", 2)),
        node("c", 1, Gres("gpu", "a100", 4)),
        node("d", 1, Gres("gpu", "a100", 4)),
        node("e", 2, Gres("gpu", "a100", 4)),
        node("f", 2, Gres("shard", "", 4)),
    )
    groups = group_nodes(Cluster(nodes=nodes))
    assert {group.name: [node.name for node in group.nodes] for group in groups} == {
        "a100x4": ["c", "d"],
        "1g10gbx7-a100x1": ["a"],
        "gpux2": ["b"],
        "a100x4-2": ["e"],
        "cpu": ["f"],
    }
    text = profile_text(Cluster(nodes=nodes))
    kinds = loaded(text).node_types
    assert str(kinds["1g10gbx7-a100x1"].gpus) == "1g.10gb:7,a100:1"
    assert str(kinds["gpux2"].gpus) == "2"
    assert "Other generic resources: shard:4." in text


def test_a_big_cluster_is_readable() -> None:
    """1,000 nodes with a feature per rack: kinds by hardware, no line too wide."""
    nodes = tuple(
        Node(
            f"n{number:05}",
            IDLE,
            (f"p{number % 60}",),
            gres=(Gres("gpu", f"h{number % 40}", 4),),
            features=frozenset({f"rack{number // 4}", "ib"}),
        )
        for number in range(1_000)
    )
    partitions = tuple(Partition(f"p{number}", default=number == 0) for number in range(60))
    text = profile_text(Cluster(partitions=partitions, nodes=nodes))
    site = loaded(text)
    assert (len(site.partitions), len(site.node_types)) == (60, 40)
    assert sum(kind.count or 0 for kind in site.node_types.values()) == 1_000
    assert all(kind.features == ["ib"] for kind in site.node_types.values())
    assert "# Nodes differ in features: these are the least values." in text
    assert max(map(len, text.split("\n"))) < 1_100  # a node list is one value, and long


@pytest.mark.parametrize(
    ("accounts", "expected"),
    [
        ((Association("physics"),), "physics"),
        ((Association("physics"), Association("physics", partition="gpu")), "physics"),
        ((Association("physics", default=True),), None),
        ((Association("physics"), Association("math")), None),
        ((), None),
        (None, None),
    ],
)
def test_an_account_is_set_where_only_one_can_be_meant(
    small: Cluster, accounts: tuple[Association, ...] | None, expected: str | None
) -> None:
    """One account and no default of Slurm's: that one; else the choice is the user's."""
    linear = replace(small.limits, whole_nodes=True)
    first = replace(small, associations=accounts, partitions=small.partitions[:1], limits=linear)
    site = loaded(profile_text(first))
    assert site.defaults["resources"].get("account") == expected
    assert site.defaults["resources"]["partition"] == "gpu"  # the only one, and no default
    assert site.directives["gpus-per-node"].rename == "--gres=gpu:{item}"


def test_scratch_is_slurms_directory_where_it_has_one(small: Cluster) -> None:
    """TmpFS other than /tmp with a disk counts; a pattern with a per-cent sign cannot."""

    def scratch(tmp_fs: str) -> str | None:
        limits = replace(small.limits, tmp_fs=tmp_fs)
        return loaded(profile_text(replace(small, limits=limits))).paths.scratch

    assert scratch("/local/scratch") == "/local/scratch"
    assert scratch("/tmp") is None
    assert scratch("/local/%h") is None


def test_what_a_look_found_is_set_for_its_kind(small: Cluster) -> None:
    """The largest local disk, the best network, the topology; the reason if no probe ran."""
    look = NodeProbe(
        "gpu1",
        places=(
            ScratchDirectory("ram", "/dev/shm", "tmpfs", 1000, 900, True),
            ScratchDirectory("$LOCAL_SCRATCH", "/nvme/job.1", "xfs", 5000, 4000, True),
            ScratchDirectory("path", "/scratch", "lustre", 90_000, 90_000, True),
        ),
        interfaces=(
            Interface("ib0", 200_000, True, True),
            Interface("eno1", 1_000, False, True),
        ),
        modules=("cuda/12.4",),
    )
    around = Origin(
        probes={"a100x4": look, "cpu": "no node of this kind was idle"},
        topologies={"a100x4": "topology/a100x4.xml"},
    )
    text = profile_text(small, around)
    site = loaded(text)
    kind = site.node_types["a100x4"]
    assert (kind.scratch, kind.interfaces) == ("$LOCAL_SCRATCH", ["ib0"])
    assert kind.topology == "topology/a100x4.xml"
    assert site.modules == ["cuda/12.4"]
    assert "# Not probed: no node of this kind was idle." in text
    assert "- ib0: 200 Gbit/s, IP over InfiniBand" in text
    assert "a probe of 1 of 2 kinds of nodes" in " ".join(text.replace("\n#", "").split())
    assert tomllib.loads(text)["node_types"]["cpu"].keys().isdisjoint({"scratch", "interfaces"})
