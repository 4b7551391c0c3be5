"""Each rule of the check, on both of its sides; the clusters are made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpml_orchestrator.check import constraint as check_constraint
from hpml_orchestrator.check.ask import ask_of
from hpml_orchestrator.check.finding import Finding, errors_of
from hpml_orchestrator.check.rules import check, check_array
from hpml_orchestrator.scheduler.cluster import (
    Association,
    Cluster,
    Gres,
    Limits,
    Node,
    Partition,
    Qos,
    Reservation,
)
from hpml_orchestrator.spec import Job

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
LIMITS = Limits(
    accounting=True,
    accounting_enforce=ENFORCED,
    default_memory_per_cpu_mib=500,
    gres_names=("gpu",),
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
    return Job.model_validate(
        {"name": "j", "command": ["true"], "stage": list(stage), "resources": resources}
    )


def found(cluster: Cluster = CLUSTER, **resources: Any) -> dict[str, Finding]:
    """What is found of a job that asks for these resources, by code."""
    return {one.code: one for one in check(job(**resources), cluster)}


def with_partition(*partitions: Partition, **limits: Any) -> Cluster:
    return dataclasses.replace(
        CLUSTER, partitions=partitions, limits=dataclasses.replace(LIMITS, **limits)
    )


CHANGED = [
    # what of `main` is changed, what the job asks for, what is found, a part of message and hint
    ({}, {"time": "03:00:00"}, "time.partition", "at most 02:00:00", "partitions long or gpus"),
    ({"state": "DOWN"}, {}, "partition.down", "main is DOWN", "gpus would take this job"),
    ({"state": "DRAIN"}, {}, "partition.drain", "takes no jobs", "would take"),
    ({"state": "INACTIVE"}, {}, "partition.inactive", "takes no jobs", "would take"),
    ({"root_only": True}, {}, "partition.root-only", "root alone", "would take"),
    ({"reservation_only": True}, {}, "partition.reservation-only", "in a reservation", "--res"),
    ({"allow_groups": ("games",)}, {}, "partition.groups", "members of games", "would take"),
    ({"allow_accounts": ("course",)}, {}, "partition.account", "takes course", "account: course"),
    ({"deny_accounts": ("DEV",)}, {}, "partition.account", "closed to account dev", "course"),
    ({"allow_qos": ("fast",)}, {}, "partition.qos", "it takes fast", "`qos: fast`"),
    ({"deny_qos": ("normal",)}, {}, "partition.qos", "closed to QOS normal", "`qos: fast`"),
    ({"min_nodes": 2}, {}, "nodes.least", "at least 2 nodes", "2 nodes"),
    ({"max_nodes": 1}, {"nodes": 2}, "nodes.most", "at most 1 node", "at most 1"),
    ({}, {"nodes": 5}, "nodes.most", "has 4 nodes", "at most 4"),
    ({"max_memory_per_node_mib": 4096}, {"memory": "5G"}, "memory.most", "4G", "at most 4G"),
    ({"max_memory_per_cpu_mib": 100}, {"memory": "4G"}, "cpus.most", "41 CPUs", "less memory"),
    ({"max_cpus_per_node": 4}, {"cpus_per_rank": 5}, "cpus.most", "more than 4", "at most 4"),
    (
        {"max_cpus_per_node": 4},
        {"exclusive": True},
        "cpus.most",
        "gives no whole node: at most 4 CPUs",
        "would take",
    ),
    ({}, {"cpus_per_rank": 17}, "cpus.most", "more than 16", "at most 16"),
    ({}, {"nodes": 3, "cpus_per_rank": 9}, "cpus.most", "at most 8 each", "at most 2 nodes"),
    ({}, {"memory": "40000M"}, "memory.most", "more than 32000M", "at most 32000M"),
    ({}, {"cpus_per_rank": 16, "nodes": 2, "memory": "8G", "constraint": "cpu"}, "nodes.together",
     "0 of them, 2 needed", "ask for less"),
    ({}, {"gpus": "a100:5"}, "gpus.most", "more than 4", "at most 4"),
    ({}, {"gpus": "a100:3", "nodes": 2}, "gpus.most", "at most 2 each", "at most 1 node"),
    ({}, {"gpus": 7}, "gpus.most", "more than 6", "at most 6"),
    ({}, {"gpus": "h100:1"}, "gpus.type", "a100:4", "did you mean a100?"),
    ({}, {"gpus": "3g.40gb:1"}, "gpus.type", "MIG profile 3g.40gb; per node there are 1g.10gb:4",
     "ask for one"),
    ({"nodes": ("c1", "c2")}, {"gpus": 1}, "gpus.most", "no node of partition main has any",
     "partition gpus would take"),
    ({}, {"constraint": "rack"}, "features.unknown", "no node has the feature rack",
     "did you mean rack1?"),
    ({}, {"constraint": "cpu&gpu"}, "features.nodes", "no node of partition main has", "cpu"),
    ({}, {"constraint": "rack1", "nodes": 3}, "features.nodes", "2 nodes of partition main", ""),
    ({}, {"constraint": "[cpu|gpu]", "nodes": 3}, "features.nodes", "no 3 nodes", ""),
    ({}, {"constraint": "(cpu"}, "features.form", "brackets that do not close", ""),
    ({}, {"cpus_per_rank": 12, "constraint": "rack1"}, "nodes.together", "at once",
     "`cpus_per_rank` of at most 8"),
    ({}, {"account": "cours"}, "account.unknown", "yours are dev and course",
     "did you mean course?"),
    ({}, {"qos": "fats"}, "qos.unknown", "there is no QOS fats", "did you mean fast?"),
    ({}, {"qos": "secret"}, "qos.account", "may not use QOS secret", "leave it out"),
    ({}, {"qos": "fast", "time": "40"}, "time.qos", "allows at most 00:30:00", "00:30:00"),
    ({}, {"qos": "slow", "gpus": "a100:3"}, "gpu.qos", "at most 2 GPUs per job", "at most 2 GPUs"),
    ({}, {"account": "course", "time": "30"}, "time.account", "never start it", "00:20:00"),
    ({}, {"account": "course", "time": "9", "cpus_per_rank": 5}, "cpu.account", "at most 4 CPUs",
     "at most 4"),
    ({}, {"partition": "man"}, "partition.unknown", "there are main, long and gpus",
     "did you mean main?"),
    ({}, {"extra": ["--reservation=x"]}, "reservation.unknown", "no reservation x", "leave it"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "asked", "code", "message", "hint"), CHANGED)
def test_what_would_not_run_is_an_error(
    changes: dict[str, Any], asked: dict[str, Any], code: str, message: str, hint: str
) -> None:
    """The finding names the field, its value, the limit, and what would do."""
    cluster = with_partition(dataclasses.replace(MAIN, **changes), LONG, GPUS)
    findings = found(cluster, **asked)
    assert code in findings, findings
    assert findings[code].level == "error"
    assert message in findings[code].message
    assert hint in findings[code].hint
    assert findings[code].field.startswith(("resources.", "array"))


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
        ({}, {"constraint": "(cpu|gpu)", "nodes": 4}),
        ({}, {"constraint": "[rack1*2&gpu*1]", "nodes": 3}),
        ({}, {"account": "COURSE", "time": "20", "cpus_per_rank": 4}),
        ({}, {"qos": "fast", "time": "30"}),
        ({}, {"qos": "slow", "gpus": "a100:2"}),
        ({"state": "DOWN"}, {"partition": "main,gpus"}),
        ({}, {"extra": ["--clusters=other"], "nodes": 99}),
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
    if codes:
        assert "`partition: gpus` would take this job" in findings["time.partition"].hint


def test_a_partition_that_is_closed_spoils_the_others() -> None:
    """Seen with Slurm: where it stands first, the job waits for ever; else it is left out."""
    closed = dataclasses.replace(GPUS, name="closed", root_only=True)
    lax = with_partition(MAIN, closed)
    assert found(lax, partition="closed,main")["partition.root-only"].level == "error"
    assert found(lax, partition="main,closed")["partition.root-only"].level == "warning"
    strict = with_partition(MAIN, closed, enforce_partition_limits="ANY")
    assert found(strict, partition="main,closed")["partition.root-only"].level == "error"


def test_root_may_use_what_is_closed_to_others() -> None:
    """Root is no member of any group, and needs to be none."""
    closed = dataclasses.replace(MAIN, root_only=True, allow_groups=("games",))
    cluster = dataclasses.replace(with_partition(closed), user="root", groups=("root",))
    assert found(cluster) == {}


def test_a_cluster_without_a_default_partition() -> None:
    """One has to be named, unless a plugin chooses it."""
    cluster = with_partition(LONG, GPUS)
    assert found(cluster)["partition.none"].hint == "`partition: long`"
    assert found(with_partition(LONG, GPUS, submit_plugins=("lua",))) == {}
    assert found(with_partition(LONG, GPUS, submit_plugins=("all_partitions",))) == {}


def test_what_is_not_enforced_is_a_warning() -> None:
    """An account that is not yours, and limits, where accounting only looks on."""
    cluster = with_partition(MAIN, accounting_enforce=frozenset())
    assert found(cluster, account="other")["account.unknown"].level == "warning"
    assert found(cluster, qos="secret")["qos.account"].level == "warning"
    assert found(cluster, account="course", time="30") == {}


def test_nothing_is_said_of_accounts_where_nobody_can_be_asked() -> None:
    """Without slurmdbd, or where it does not answer."""
    cluster = dataclasses.replace(CLUSTER, associations=None, qos=None)
    assert found(cluster, account="other", qos="other") == {}


def test_a_user_without_an_account() -> None:
    """Is told so where jobs need one."""
    cluster = dataclasses.replace(CLUSTER, associations=())
    assert "no account on this cluster" in found(cluster)["account.none"].message


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
    """Each kind of TRES limit says its scope; whole nodes count with all of their CPUs."""
    limits: dict[str, tuple[dict[str, int], dict[str, Any], str, str]] = {
        "max_tres_per_node": ({"cpu": 2}, {"cpus_per_rank": 3}, "cpu.qos", "2 CPUs per node"),
        "max_tres_per_user": ({"mem": 3000}, {"memory": "4G"}, "mem.qos", "for all jobs of a user"),
        "group_tres": ({"node": 2}, {"nodes": 3}, "node.qos", "2 nodes for all its jobs together"),
        "min_tres_per_job": ({"cpu": 4}, {"cpus_per_rank": 3}, "cpu.qos", "wants at least 4 CPUs"),
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
    assert set(found(whole, exclusive=True)) == {"cpu.qos"}
    assert found(whole, cpus_per_rank=7) == {}


def test_tasks_per_node_have_a_limit_of_their_own() -> None:
    """With launcher srun each rank is a task; torchrun is one."""
    asked = {"ranks_per_node": 5}
    cluster = with_partition(MAIN, max_tasks_per_node=4)
    data = {"name": "j", "command": ["true"], "resources": asked}
    ranks = check(Job.model_validate({**data, "launcher": "srun"}), cluster)
    assert [one.code for one in ranks] == ["ranks.tasks-per-node"]
    assert check(Job.model_validate({**data, "launcher": "torchrun"}), cluster) == []


def test_a_reservation_is_for_those_whom_it_names() -> None:
    """By user or by account; one that is over is told as such."""
    reservations = (
        Reservation("ada", users=("ada",)),
        Reservation("eve", users=("eve",)),
        Reservation("dev", accounts=("dev",), ended=100.0),
    )
    cluster = dataclasses.replace(CLUSTER, reservations=reservations)

    def told(name: str, now: float = 50.0) -> list[str]:
        return [one.code for one in check(job(extra=[f"--reservation={name}"]), cluster, now=now)]

    assert told("ada") == []
    assert told("eve") == ["reservation.others"]
    assert told("dev") == []
    assert told("dev", now=150.0) == ["reservation.over"]


def test_nodes_that_are_out_of_service_are_a_warning() -> None:
    """The job waits for them; each is named with its reason. Another partition may have others."""
    out = dataclasses.replace(NODES[2], states=frozenset({"DOWN"}), reason="bad fan")
    cluster = dataclasses.replace(CLUSTER, nodes=(*NODES[:2], out, NODES[3]))
    findings = found(cluster, partition="gpus", gpus="a100:4")
    assert findings["nodes.down"].level == "warning"
    assert "g1 is DOWN (bad fan)" in findings["nodes.down"].message
    assert found(cluster, partition="gpus", gpus="a100:2") == {}


def test_nodes_that_are_asked_for_by_name() -> None:
    """They must be there, in the partition, and have what is asked for."""

    def told(names: set[str], excluded: frozenset[str] = frozenset(), **asked: Any) -> list[str]:
        required = frozenset(names)
        found = check(job(**asked), CLUSTER, required=required, excluded=excluded)
        return [one.code for one in found]

    assert told({"c1"}) == []
    assert told({"c9"})[0] == "nodes.unknown"
    assert told({"c1"}, partition="gpus") == ["nodes.required"]
    assert told(set(), excluded=frozenset({"g1"}), gpus="a100:4") == ["gpus.most"]


def test_what_is_staged_counts() -> None:
    """On the disk where Slurm knows its size; in RAM as the job's memory."""
    assert [one.code for one in check(job(), CLUSTER, disk_mib=1000)] == []
    told = check(job(partition="gpus"), CLUSTER, disk_mib=1001)
    assert [one.code for one in told] == ["disk.most"]
    assert "1001M of local disk" in told[0].message
    elsewhere = with_partition(GPUS, tmp_fs="/scratch")  # whose size says nothing of /tmp
    assert check(job(partition="gpus"), elsewhere, disk_mib=1001) == []
    stage = [{"name": "d", "source": "/d", "target": "shm", "size": "8G"}]
    told = check(job(stage, memory="25000M"), CLUSTER)
    assert [one.code for one in told] == ["memory.most"]
    assert "33192M of memory per node (8G of it for what is staged to shm)" in told[0].message
    (warning,) = check(job(stage), CLUSTER, shm_mib=8192)
    assert (warning.code, warning.level, warning.limit) == ("memory.staged", "warning", "500M")


def test_arrays_and_long_scripts() -> None:
    """The largest index is one less than MaxArraySize; 0 switches arrays off."""
    cluster = with_partition(MAIN, max_array_size=11, max_script_bytes=100)
    assert check_array(10, 11, cluster) == []
    assert check_array(11, 3, cluster)[0].limit == 10
    assert check_array(1, 2, with_partition(MAIN, max_array_size=0))[0].code == "array.off"
    array = job().model_copy(update={"array": "0-11%2"})
    assert [one.code for one in check(array, cluster)] == ["array.index"]
    assert check(job(), cluster, script_bytes=100) == []
    assert check(job(), cluster, script_bytes=101)[0].code == "script.size"


def test_a_comma_in_a_constraint_is_an_and() -> None:
    """As Slurm has it."""
    both = check_constraint.matches("a,b", [frozenset("ab"), frozenset("a")], 1)
    assert both is True
    assert check_constraint.matches("a,b", [frozenset("a"), frozenset("b")], 1) is False
    assert check_constraint.features_of("a,b|c") == ["a", "b", "c"]


def test_time_min_lets_slurm_shorten_the_time() -> None:
    """The shorter one is compared with the limits."""
    asked = job(time="5-0", extra=["--time-min=0:05:00"])
    assert ask_of(asked).minutes == 5
    assert ask_of(job(time="5-0")).minutes == 5 * 24 * 60


def test_a_finding_is_one_thing() -> None:
    """What no node of the cluster has is not said of each partition again; errors come first."""
    told = check(job(gpus="h100:1", constraint="nope"), CLUSTER)
    assert [one.code for one in told] == ["gpus.type", "features.unknown"]
    assert errors_of(told) == told
    assert told[0].to_json()["value"] == "h100:1"
    assert str(told[0]).startswith("resources.gpus (h100:1): no node has the type of GPU h100")


def test_a_cluster_without_gpus() -> None:
    """Says so, whatever type is asked for."""
    cluster = dataclasses.replace(CLUSTER, nodes=NODES[:2], partitions=(LONG,))
    assert [one.code for one in check(job(partition="long", gpus=1), cluster)] == ["gpus.none"]


@pytest.mark.parametrize(("value", "shown"), [(True, "true"), (False, "false")])
def test_a_finding_shows_a_value_as_the_job_file_has_it(value: bool, shown: str) -> None:
    """Not as Python does."""
    finding = Finding("warning", "monitor.port", "monitor.enabled", value, "its port may be taken")
    assert str(finding) == f"monitor.enabled ({shown}): its port may be taken"
