"""Each rule of the check, just within its limit and just over it, on clusters made by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.check.job import check_local
from hpml_orchestrator.check.request import CheckFinding
from hpml_orchestrator.check.rules import check, check_room
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.scheduler.cluster import (
    Association,
    Cluster,
    ClusterLimits,
    Gres,
    Node,
    Partition,
    Qos,
)
from hpml_orchestrator.scheduler.local.processes import LocalMachine
from hpml_orchestrator.site.model import Site

HOUR = 3600
CPU = {"features": frozenset({"cpu", "rack1"}), "cpus": 8, "memory_mib": 8000}
GPU = {"features": frozenset({"gpu"}), "cpus": 16, "memory_mib": 32000, "tmp_disk_mib": 1000}
NODES = (
    Node("c1", frozenset({"IDLE"}), **CPU),  # type: ignore[arg-type]
    Node("c2", frozenset({"IDLE"}), **CPU),  # type: ignore[arg-type]
    Node("g1", frozenset({"MIXED"}), gres=(Gres("gpu", "a100", 4),), **GPU),  # type: ignore[arg-type]
    Node(
        "g2",
        frozenset({"IDLE"}),
        gres=(Gres("gpu", "a100", 2), Gres("gpu", "1g.10gb", 4)),
        **GPU,  # type: ignore[arg-type]
    ),
)
ALL = ("c1", "c2", "g1", "g2")
MAIN = Partition("main", default=True, nodes=ALL, max_seconds=2 * HOUR)
LONG = Partition("long", nodes=ALL[:2], max_seconds=168 * HOUR, max_nodes=1)
GPUS = Partition("gpus", nodes=ALL[2:], max_seconds=24 * HOUR)
ENFORCED = frozenset({"associations", "limits", "qos"})
LIMITS = ClusterLimits(
    accounting=True,
    accounting_enforce=ENFORCED,
    default_memory_per_cpu_mib=500,
)
MINE = (
    Association("dev", default=True, qos=("normal", "fast", "slow")),
    Association("course", qos=("normal",), max_seconds=1200, max_tres_per_job={"cpu": 4}),
)
QOS = (
    Qos("normal"),
    Qos("fast", flags=frozenset({"DenyOnLimit"}), max_seconds=1800),
    Qos("slow", max_tres_per_job={"gres/gpu": 2}),
    Qos("secret"),
)
CLUSTER = Cluster(
    limits=LIMITS,
    partitions=(MAIN, LONG, GPUS),
    nodes=NODES,
    user="ada",
    groups=("users",),
    associations=MINE,
    qos=QOS,
)


def job(stage: Any = (), **resources: Any) -> Job:
    return Job.from_json(
        {"name": "j", "command": ["true"], "stage": list(stage), "resources": resources}
    )


def found(cluster: Cluster = CLUSTER, **resources: Any) -> dict[str, CheckFinding]:
    """What is found of a job that requests these resources, by code."""
    return {finding.code: finding for finding in check(job(**resources), cluster).findings}


def with_partition(*partitions: Partition, **limits: Any) -> Cluster:
    return dataclasses.replace(
        CLUSTER, partitions=partitions, limits=dataclasses.replace(LIMITS, **limits)
    )


OVER = [
    # what of `main` is changed, what the job asks for, code, message, hint
    ({}, {"time": "03:00:00"}, "time.partition", "at most 02:00:00", ""),
    ({"state": "DOWN"}, {}, "partition.down", "main is DOWN", ""),
    ({"state": "DRAIN"}, {}, "partition.drain", "takes no jobs", ""),
    ({"state": "INACTIVE"}, {}, "partition.inactive", "takes no jobs", ""),
    ({"root_only": True}, {}, "partition.root-only", "root alone", ""),
    ({"reservation_only": True}, {}, "partition.reservation-only", "in a reservation", "--reserv"),
    ({"allow_groups": ("games",)}, {}, "partition.groups", "of games; you are in users", ""),
    ({"allow_accounts": ("course",)}, {}, "partition.account", "by default; it takes course", ""),
    ({"deny_accounts": ("DEV",)}, {"account": "dev"}, "partition.account", "to account dev", ""),
    ({"allow_qos": ("fast",)}, {}, "partition.qos", "it takes fast", ""),
    ({"deny_qos": ("normal",)}, {}, "partition.qos", "not open to QOS normal", ""),
    ({"min_nodes": 2}, {}, "nodes.least", "at least 2 nodes", ""),
    ({"max_nodes": 1}, {"nodes": 2}, "nodes.most", "at most 1 node", ""),
    ({}, {"nodes": 5}, "nodes.most", "has 4 nodes", ""),
    ({"max_memory_per_node_mib": 4096}, {"memory": "5G"}, "memory.most", "at most 4G", ""),
    ({"max_memory_per_cpu_mib": 100}, {"memory": "4G"}, "cpus.most", "41 CPUs per node", ""),
    ({"max_cpus_per_node": 4}, {"cpus_per_rank": 5}, "cpus.most", "at most 4", ""),
    ({"max_cpus_per_node": 4}, {"exclusive": True}, "cpus.most", "no whole node: at most 4", ""),
    ({}, {"cpus_per_rank": 17}, "cpus.most", "nodes of partition main have at most 16", ""),
    ({}, {"nodes": 3, "cpus_per_rank": 9}, "cpus.most", "only 2 nodes", ""),
    ({}, {"memory": "40000M"}, "memory.most", "at most 32000M", ""),
    ({}, {"cpus_per_rank": 16, "constraint": "cpu"}, "nodes.together", "no node of", ""),
    ({}, {"gpus": "a100:5"}, "gpus.most", "5 GPUs of type a100 per node; nodes of", ""),
    ({}, {"gpus": "a100:3", "nodes": 2}, "gpus.most", "only 1 node of partition main", ""),
    ({}, {"gpus": 7}, "gpus.most", "at most 6", ""),
    ({}, {"gpus": "h100:1"}, "gpus.type", "nodes have up to 1g.10gb:4 and a100:4", "mean a100?"),
    ({}, {"gpus": "3g.40gb:1"}, "gpus.type", "MIG profile 3g.40gb; nodes have up to 1g.10gb:4", ""),
    ({"nodes": ("c1", "c2")}, {"gpus": 1}, "gpus.most", "no node of partition main has any", ""),
    ({}, {"constraint": "rack"}, "features.unknown", "no node has the feature rack", "mean rack1?"),
    ({}, {"constraint": "cpu&gpu"}, "features.nodes", "the features cpu&gpu; no node of", ""),
    ({}, {"constraint": "rack1,cpu", "nodes": 3}, "features.nodes", "only 2 nodes of", ""),
    ({}, {"cpus_per_rank": 12, "constraint": "rack1"}, "nodes.together", "at once; 1 needed", ""),
    ({}, {"account": "cours"}, "account.unknown", "yours are dev and course", "mean course?"),
    ({}, {"qos": "fats"}, "qos.unknown", "there is no QOS fats", "did you mean fast?"),
    ({}, {"qos": "secret"}, "qos.account", "may not use QOS secret", ""),
    ({}, {"qos": "fast", "time": "40"}, "time.qos", "allows at most 00:30:00 per job", ""),
    ({}, {"qos": "slow", "gpus": "a100:3"}, "gpu.qos", "2 GPUs per job; this job asks for 3", ""),
    ({}, {"account": "course", "time": "30"}, "time.account", "and never start it", ""),
    ({}, {"account": "course", "time": "9", "cpus_per_rank": 5}, "cpu.account", "at most 4", ""),
    ({}, {"partition": "man"}, "partition.unknown", "there are main, long and gpus", "mean main?"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "asked", "code", "message", "hint"), OVER)
def test_what_would_not_run_is_an_error(
    changes: dict[str, Any], asked: dict[str, Any], code: str, message: str, hint: str
) -> None:
    """The finding names the field, its value and the limit."""
    cluster = with_partition(dataclasses.replace(MAIN, **changes), LONG, GPUS)
    findings = found(cluster, **asked)
    assert code in findings, findings
    assert findings[code].level == "error"
    assert message in findings[code].message
    assert hint in findings[code].hint
    assert findings[code].field.startswith("resources.")


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, {}),
        ({}, {"time": "02:00:00"}),
        ({"max_seconds": None}, {"time": "100-0"}),
        ({"allow_groups": ("users", "games")}, {}),
        ({"allow_accounts": ("DEV",)}, {}),
        ({"deny_accounts": ("course",)}, {}),
        ({"allow_qos": ("normal",)}, {}),
        ({"reservation_only": True, "allow_qos": None}, {"partition": "gpus"}),
        ({"min_nodes": 2}, {"nodes": 2}),
        ({}, {"nodes": 4, "cpus_per_rank": 8, "memory": "8000M"}),
        ({"max_memory_per_node_mib": 4096}, {"memory": "4G"}),
        ({"max_memory_per_cpu_mib": 1000}, {"memory": "8000M", "constraint": "cpu"}),
        ({"max_cpus_per_node": 4}, {"cpus_per_rank": 4}),
        ({}, {"cpus_per_rank": 16, "nodes": 2}),
        ({}, {"gpus": "a100:4"}),
        ({}, {"gpus": "a100:2,1g.10gb:1"}),
        ({}, {"gpus": 6}),
        ({}, {"nodes": 2, "gpus": "a100:2"}),
        ({}, {"constraint": "gpu|nope", "nodes": 4}),  # Slurm's to judge
        ({}, {"constraint": "[rack1*2&gpu*1]", "nodes": 3}),
        ({}, {"account": "COURSE", "time": "20", "cpus_per_rank": 4}),
        ({}, {"qos": "fast", "time": "30"}),
        ({}, {"qos": "slow", "gpus": "a100:2"}),
        ({"state": "DOWN"}, {"partition": "main,gpus"}),
    ],
)
def test_what_would_run_is_let_through(changes: dict[str, Any], asked: dict[str, Any]) -> None:
    """What is just within its limits has no finding at all."""
    cluster = with_partition(dataclasses.replace(MAIN, **changes), LONG, GPUS)
    assert found(cluster, **asked) == {}


@pytest.mark.parametrize(
    ("how", "codes"), [("NO", set()), ("ANY", set()), ("ALL", {"time.partition"})]
)
def test_of_several_partitions_one_will_do_unless_all_must(how: str, codes: set[str]) -> None:
    """EnforcePartLimits=ALL refuses a job that is over the limits of one of its partitions."""
    cluster = with_partition(MAIN, LONG, GPUS, enforce_partition_limits=how)
    findings = found(cluster, partition="main,gpus", time="3:00:00")
    assert set(findings) == codes


def test_a_partition_that_is_closed_spoils_the_others() -> None:
    """Observed with Slurm: as the first partition it blocks the job; else it is skipped."""
    closed = dataclasses.replace(GPUS, name="closed", root_only=True)
    lax = with_partition(MAIN, closed)
    assert found(lax, partition="closed,main")["partition.root-only"].level == "error"
    assert found(lax, partition="main,closed")["partition.root-only"].level == "warning"
    strict = with_partition(MAIN, closed, enforce_partition_limits="ANY")
    assert found(strict, partition="main,closed")["partition.root-only"].level == "error"


def test_a_cluster_without_a_default_partition() -> None:
    """One has to be named, unless a plugin chooses it."""
    cluster = with_partition(LONG, GPUS)
    assert found(cluster)["partition.none"].hint == "`partition: long`"
    assert found(with_partition(LONG, GPUS, submit_plugins=("lua",))) == {}
    assert found(with_partition(LONG, GPUS, submit_plugins=("all_partitions",))) == {}


def test_an_association_of_the_default_partition_alone() -> None:
    """It holds for a job that names no partition; a plugin may give a job any account."""
    bound = (Association("dev", partition="main", default=True),)
    cluster = dataclasses.replace(CLUSTER, associations=bound)
    assert found(cluster) == {}
    assert found(cluster, partition="main") == {}
    assert found(cluster, partition="long")["account.none"].level == "error"
    assert found(with_partition(LONG, GPUS, submit_plugins=("lua",))) == {}
    for plugin, level in (("lua", "warning"), ("throttle", "error")):
        limits = dataclasses.replace(LIMITS, submit_plugins=(plugin,))
        theirs = dataclasses.replace(CLUSTER, associations=(), limits=limits)
        assert found(theirs)["account.none"].level == level


@pytest.mark.parametrize(
    ("cluster", "asked", "left"),
    [
        (CLUSTER, {"extra": ["--time-min=5", "--overcommit"]}, []),
        (CLUSTER, {"extra": ["--licenses=b", "--exclude=c1"]}, ["--licenses=b", "--exclude=c1"]),
        (CLUSTER, {"extra": ["--hold", "--nice=5"]}, ["--hold", "--nice=5"]),
        (CLUSTER, {"constraint": "gpu|cpu"}, ["--constraint=gpu|cpu"]),
        (CLUSTER, {"constraint": "cpu&rack1"}, []),
        (
            with_partition(LONG, submit_plugins=("lua",)),
            {},
            ["the partition, which this site chooses at submission"],
        ),
    ],
)
def test_what_is_not_judged_is_listed(
    cluster: Cluster, asked: dict[str, Any], left: list[str]
) -> None:
    """An option that no rule compares with the cluster keeps `can start now` away."""
    assert list(check(job(**asked), cluster).not_checked) == left


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"ranks_per_node": 64}, "ranks_per_node"),
        ({"cpus_per_rank": 64}, "cpus_per_rank"),
        ({"ranks_per_node": 2, "cpus_per_rank": 64}, "cpus_per_rank"),
        ({"gpus": 4, "ranks_per_gpu": 16}, "ranks_per_gpu"),
    ],
)
def test_too_many_cpus_are_blamed_on_the_field_that_asks_for_them(
    asked: dict[str, Any], field: str
) -> None:
    """CPUs are ranks times CPUs per rank: a default is never to blame."""
    finding = found(**asked)["cpus.most"]
    assert (finding.field, finding.value) == (f"resources.{field}", asked[field])
    (here,) = (one for one in check_local(job(**asked), LocalMachine((0, 1), ("0",) * 4, 0)))
    assert (here.code, here.field) == ("local.cpus", f"resources.{field}")


def test_what_is_not_enforced_is_a_warning() -> None:
    """A warning for an account of others if accounting does not enforce it."""
    unknown = dataclasses.replace(CLUSTER, associations=None, qos=None)
    assert found(unknown, account="other", qos="other") == {}
    none = dataclasses.replace(CLUSTER, associations=())
    assert "you have no account" in found(none)["account.none"].message
    cluster = with_partition(MAIN, accounting_enforce=frozenset())
    assert found(cluster, account="other")["account.unknown"].level == "warning"
    assert found(cluster, qos="secret")["qos.account"].level == "warning"
    assert found(cluster, account="course", time="30") == {}


def test_of_each_limit_the_first_that_is_set_counts() -> None:
    """The partition's QOS comes before the job's, and that before the account."""
    generous = Qos("generous", max_seconds=7200)
    cluster = dataclasses.replace(CLUSTER, qos=(*QOS, generous))
    capped = dataclasses.replace(MAIN, qos="generous")
    cluster = dataclasses.replace(cluster, partitions=(capped,))
    assert found(cluster, account="course", time="60") == {}
    over = dataclasses.replace(generous, name="generous", max_seconds=600)
    cluster = dataclasses.replace(cluster, qos=(*QOS, over))
    told = found(cluster, qos="fast", time="20")["time.qos"]
    assert told.message.startswith("partition main (by its QOS generous) allows at most 00:10:00")


def test_limits_per_node_per_user_of_groups_and_from_below() -> None:
    """Each TRES limit is reported with its scope; whole nodes count with all of their CPUs."""
    limits: dict[str, tuple[dict[str, int], dict[str, Any], str, str]] = {
        "max_tres_minutes_per_job": (
            {"cpu": 29},
            {"cpus_per_rank": 3, "time": "10"},
            "minutes.qos",
            "at most 29 CPUs x minutes per job; this job asks for 30 CPUs x minutes; Slurm would",
        ),
        "max_tres_per_node": ({"cpu": 2}, {"cpus_per_rank": 3}, "cpu.qos", "2 CPUs per node"),
        "max_tres_per_user": ({"mem": 3000}, {"memory": "4G"}, "mem.qos", "for all jobs of a user"),
        "group_tres": ({"node": 2}, {"nodes": 3}, "node.qos", "2 nodes for all its jobs together"),
        "min_tres_per_job": (
            {"cpu": 4},
            {"cpus_per_rank": 3},
            "cpu.qos",
            "requires at least 4 CPUs",
        ),
        "max_tres_per_job": (
            {"gres/gpu:a100": 1},
            {"gpus": "a100:2"},
            "gpu:a100.qos",
            "at most 1 GPUs of type a100",
        ),
    }
    for name, (values, asked, code, message) in limits.items():
        qos = Qos("normal", **{name: values})  # type: ignore[arg-type]
        cluster = dataclasses.replace(CLUSTER, qos=(qos,))
        assert message in found(cluster, **asked)[code].message
    whole = dataclasses.replace(CLUSTER, qos=(Qos("normal", max_tres_per_job={"cpu": 7}),))
    for most, codes in ((0, {"job.qos"}), (1, set())):
        for name in ("max_tres_per_user", "group_tres"):
            qos = Qos("normal", **{name: {"job": most}})  # type: ignore[arg-type]
            cluster = dataclasses.replace(CLUSTER, qos=(qos,))
            assert set(found(cluster)) == codes
        assert check(job(), cluster).shared_limits == ("QOS normal",) * most
    assert set(found(whole, exclusive=True)) == {"cpu.qos"}
    assert found(whole, cpus_per_rank=7) == {}


def test_tasks_per_node_have_a_limit_of_their_own() -> None:
    """With launcher srun each rank is a task; torchrun is one."""
    asked = {"ranks_per_node": 5}
    cluster = with_partition(MAIN, max_tasks_per_node=4)
    data = {"name": "j", "command": ["true"], "resources": asked}
    codes = {
        launcher: [
            finding.code
            for finding in check(Job.from_json({**data, "launcher": launcher}), cluster).findings
        ]
        for launcher in ("srun", "torchrun")
    }
    assert codes == {"srun": ["ranks.tasks-per-node"], "torchrun": []}


def test_nodes_that_are_out_of_service_are_a_warning() -> None:
    """The job waits for them; each is named with its reason."""
    out = dataclasses.replace(NODES[2], states=frozenset({"DOWN"}), reason="bad fan")
    cluster = dataclasses.replace(CLUSTER, nodes=(*NODES[:2], out, NODES[3]))
    findings = found(cluster, partition="gpus", gpus="a100:4")
    assert findings["nodes.down"].level == "warning"
    assert "g1 is DOWN (bad fan)" in findings["nodes.down"].message
    assert found(cluster, partition="gpus", gpus="a100:2") == {}


def test_a_shorter_time_is_compared() -> None:
    """`--time-min` permits Slurm to shorten the time limit."""
    assert not found(extra=["--time-min=1:00:00"], time="5-0")


def test_what_is_staged_counts() -> None:
    """On the disk where Slurm knows its size; in RAM as the job's memory."""

    def codes(cluster: Cluster, disk_mib: int) -> list[str]:
        verdict = check(job(partition="gpus"), cluster, disk_mib=disk_mib)
        return [finding.code for finding in verdict.findings]

    assert codes(CLUSTER, 1000) == []
    assert codes(CLUSTER, 1001) == ["disk.most"]
    assert codes(with_partition(GPUS, tmp_fs="/scratch"), 1001) == [], (
        "its size is not that of /tmp"
    )
    stage = [{"name": "d", "source": "/d", "target": "shm", "size": "8G"}]
    (finding,) = check(job(stage, memory="25000M"), CLUSTER).findings
    assert finding.code == "memory.most"
    assert "33192M of memory per node (8G of it staged to shm)" in finding.message
    (finding,) = check(job(stage, memory_per_cpu="25000M"), CLUSTER).findings
    assert (finding.field, finding.value) == ("resources.memory_per_cpu", "25000M")
    (finding,) = check(job(stage), CLUSTER, shm_mib=8192).findings
    assert (finding.code, finding.level, finding.limit) == ("memory.staged", "warning", "500M")


@pytest.mark.parametrize(
    ("size", "array", "limits"),
    [(11, "0-10", {}), (11, "0-11%2", {"array.index": 10}), (0, "1-2", {"array.off": 0})],
)
def test_arrays(size: int, array: str, limits: dict[str, int]) -> None:
    """The largest index is one less than MaxArraySize; 0 switches arrays off."""
    asked = replace(job(), array=parse_array(array))
    findings = check(asked, with_partition(MAIN, max_array_size=size)).findings
    assert {finding.code: finding.limit for finding in findings} == limits


def test_what_no_node_of_the_cluster_has_is_reported_once() -> None:
    """Once, not for each partition; a cluster without GPUs is reported as such for any type."""
    cluster = dataclasses.replace(CLUSTER, nodes=NODES[:2], partitions=(LONG,))
    assert list(found(cluster, partition="long", gpus=1)) == ["gpus.none"]
    findings = check(job(gpus="h100:1", constraint="nope"), CLUSTER).findings
    assert [finding.code for finding in findings] == ["gpus.type", "features.unknown"]
    assert findings[0].to_json()["value"] == "h100:1"
    assert str(findings[0]).startswith("resources.gpus (h100:1): no node has the type of GPU h100")


@pytest.mark.parametrize(("value", "shown"), [(True, "true"), (False, "false")])
def test_a_finding_shows_a_value_as_the_job_file_has_it(value: bool, shown: str) -> None:
    """Not as Python does."""
    finding = CheckFinding(
        "warning", "monitor.port", "monitor.enabled", value, "its port may be taken"
    )
    assert str(finding) == f"monitor.enabled ({shown}): its port may be taken"


SITE = Site.model_validate(
    {
        "partitions": {
            "both": {"default": True, "node_types": ["a", "b"]},
            "small": {"node_types": ["a"]},
            "vague": {"node_types": ["a", "c"]},
        },
        "node_types": {
            "a": {"memory": "64G", "local_disk": "100G"},
            "b": {"memory": "256G", "local_disk": "2T"},
            "c": {},
        },
    }
)


@pytest.mark.parametrize(
    ("partition", "disk", "level"),
    [
        ("small", 100, ""),
        ("small", 101, "error"),
        (None, 101, "warning"),
        (None, 3000, "error"),
        ("vague", 101, "warning"),
    ],
)
def test_local_disks_of_the_site_profile(partition: str | None, disk: int, level: str) -> None:
    """Too small everywhere is an error; in some of the nodes, or unknown in others, a warning."""
    findings = list(check_room(job(partition=partition), SITE, disk_mib=disk * 1024))
    assert [finding.level for finding in findings] == [level] * bool(level)
    assert all(finding.code == "stage.local_disk" for finding in findings)
    assert all("nodes of type a" in finding.message for finding in findings)
