"""A cluster is read from what scontrol and sacctmgr printed on a real one."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.cluster import (
    Association,
    Cluster,
    ClusterLimits,
    Gres,
    Node,
    Partition,
    Qos,
)
from hpml_orchestrator.scheduler.command import CommandMissing, Completed
from hpml_orchestrator.scheduler.slurm.client import slurm_version
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster, with_group_limits
from hpml_orchestrator.scheduler.slurm.records import limits_from, parse_config
from hpml_orchestrator.testing.runner import FakeRunner

DATA = Path(__file__).parent / "data"
SILENT = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n"


def said(name: str) -> list[Completed | BaseException]:
    return [Completed(0, (DATA / "22.05.8" / name).read_text())]


def runner(**changed: Completed | BaseException) -> FakeRunner:
    """Answers as a real 22.05.8 did; `changed` names a kind."""
    answers = {
        "scontrol --all show config": said("config.txt"),
        "scontrol --all show partition": said("show-partition.txt"),
        "scontrol --all show node": said("show-node.txt"),
        "sacctmgr -nP show user": said("sacctmgr-user.txt"),
        "sacctmgr -nP show qos": said("sacctmgr-qos.txt"),
    }
    for key in answers:
        kind = key.split()[-1]
        if kind in changed:
            answers[key] = [changed[kind]]
    return FakeRunner(answers)


def test_limits_partitions_and_nodes() -> None:
    """As they were set on that cluster."""
    cluster = read_cluster(runner(), user="ada", groups=["users"])
    assert cluster.user == "ada"
    assert cluster.groups == ("users",)
    assert cluster.limits == ClusterLimits(
        version=(22, 5, 8),
        cluster="devcluster",
        accounting=True,
        default_memory_per_cpu_mib=4000,
        job_requeue=True,
        preemption="REQUEUE",
    )
    nodes = ("node1", "node2")
    partition = functools.partial(Partition, preemption="REQUEUE")
    main, low, long, staff, empty = cluster.partitions
    assert main == partition("main", default=True, nodes=nodes, total_nodes=2, priority_tier=10)
    assert low == partition("low", nodes=nodes, total_nodes=2)
    assert long == partition(
        "long",
        nodes=nodes,
        total_nodes=2,
        max_seconds=216_000,
        default_seconds=1800,
        min_nodes=1,
        max_nodes=2,
        max_cpus_per_node=3,
        max_memory_per_cpu_mib=2000,
        default_memory_per_cpu_mib=500,
        allow_accounts=("dev", "root"),
        deny_qos=("normal",),
        exclusive=True,
    )
    assert staff == partition(
        "staff",
        state="DRAIN",
        nodes=("node2",),
        total_nodes=1,
        max_seconds=5400,
        min_nodes=1,
        max_memory_per_node_mib=8000,
        default_memory_per_node_mib=1000,
        deny_accounts=("dev",),
        allow_qos=("normal",),
        allow_groups=("wheel", "adm"),
        qos="normal",
        root_only=True,
        reservation_only=True,
    )
    assert empty == partition("empty", min_nodes=1)
    assert cluster.nodes == (
        Node(
            "node1",
            states=frozenset({"IDLE"}),
            partitions=("main", "low", "long"),
            cores_per_socket=4,
            cpus=4,
            memory_mib=16_000,
            gres=(Gres("gpu", "a100", 2),),
            features=frozenset({"fast", "gpu"}),
        ),
        Node(
            "node2",
            states=frozenset({"IDLE", "DRAIN"}),
            partitions=("main", "low", "long", "staff"),
            cores_per_socket=4,
            cpus=4,
            memory_mib=16_000,
            gres=(Gres("gpu", "a100", 2),),
            reason="bad disk = slow, see ticket=12",
        ),
    )
    assert [node.up for node in cluster.nodes] == [True, False]


def test_associations_and_qos() -> None:
    """With their limits, memory in MiB, and the default account."""
    cluster = read_cluster(runner(), user="ada", groups=[])
    assert cluster.associations == (
        Association("root", qos=("normal",)),
        Association(
            "lab",
            partition="main",
            default=True,
            qos=("high", "normal"),
            default_qos="high",
            max_seconds=1800,
            max_tres_per_job={"gres/gpu": 2, "mem": 10_240},
            max_tres_minutes_per_job={"node": 90},
            max_tres_per_node={"cpu": 2},
            max_tres_per_user={"job": 3},
            group_tres={"cpu": 50, "job": 0},
        ),
    )
    assert cluster.qos == (
        Qos("normal"),
        Qos(
            "high",
            flags=frozenset({"DenyOnLimit", "NoDecay"}),
            max_seconds=172_800,
            min_tres_per_job={"cpu": 2, "gres/gpu": 1},
            max_tres_per_job={"cpu": 100, "mem": 65_536},
            max_tres_minutes_per_job={"cpu": 600},
            max_tres_per_node={"cpu": 3},
            max_tres_per_user={"gres/gpu:a100": 8, "job": 2},
            group_tres={"mem": 1500, "node": 4, "job": 6},
        ),
    )


def test_one_call_per_kind_in_a_clean_environment() -> None:
    """A site's own variables change nothing, and times come as numbers."""
    run = runner()
    read_cluster(
        run, user="ada", groups=[], env={"SCONTROL_FUTURE": "1", "SLURM_CONF": "/c", "PATH": "/b"}
    )
    asked = sorted(" ".join(call.argv[:4]) for call in run.calls)
    assert asked == [
        "sacctmgr -nP show qos",
        "sacctmgr -nP show user",
        "scontrol --all show config",
        "scontrol --all show node",
        "scontrol --all show partition",
    ]
    for call in run.calls:
        assert call.env == {
            "SLURM_CONF": "/c",
            "PATH": "/b",
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",
        }


@pytest.mark.parametrize(
    "answer",
    [
        Completed(1, "", "sacctmgr: error: Problem talking to the database: Connection refused\n"),
        CommandMissing("there is no command sacctmgr"),
        SchedulerUnavailable("sacctmgr gave no answer in 60 s"),
    ],
)
def test_accounting_that_does_not_answer_is_no_error(answer: Completed | BaseException) -> None:
    """Then nobody knows the associations, which is not the same as having none."""
    cluster = read_cluster(runner(user=answer, qos=answer), user="ada", groups=[])
    assert cluster.associations is None
    assert cluster.qos is None
    assert len(cluster.nodes) == 2


def test_a_cluster_without_accounting_is_not_asked_for_it() -> None:
    """It would only complain."""
    config = (DATA / "22.05.8" / "config.txt").read_text()
    config = config.replace("accounting_storage/slurmdbd", "accounting_storage/none")
    run = runner(config=Completed(0, config))
    cluster = read_cluster(run, user="ada", groups=[])
    assert not cluster.limits.accounting
    assert cluster.associations is None
    assert run.count("sacctmgr") == 0


def test_a_controller_that_does_not_answer() -> None:
    """The words are Slurm's, and a hint has a solution."""
    down = Completed(1, "", SILENT)
    with pytest.raises(SchedulerUnavailable, match="Unable to contact") as caught:
        read_cluster(runner(config=down, partition=down, node=down), user="a", groups=[])
    assert caught.value.message == (
        "scontrol: Unable to contact slurm controller (connect failure)"
    )
    assert "scontrol ping" in caught.value.hint


def test_what_a_site_hides_is_empty() -> None:
    """PrivateData: the controller answers, but not this user."""
    denied = Completed(1, "", "slurm_load_node error: Access/permission denied\n")
    cluster = read_cluster(runner(node=denied), user="ada", groups=[])
    assert cluster.nodes == ()
    assert len(cluster.partitions) == 5


def test_specialised_cpus_and_memory_are_not_for_jobs() -> None:
    """CPUEfctv if given, and memory without the system's share."""
    text = (
        "NodeName=a CPUEfctv=14 CPUTot=16\n   RealMemory=64000 MemSpecLimit=4000\n   State=IDLE\n"
    )
    old = "NodeName=b CPUTot=16\n   RealMemory=64000\n   State=DOWN*\n"
    first, second = read_cluster(runner(node=Completed(0, text + old)), user="ada", groups=[]).nodes
    assert (first.cpus, first.memory_mib) == (14, 60_000)
    assert (second.cpus, second.memory_mib, second.up) == (16, 64_000, False)


def test_limits_of_another_site() -> None:
    """The answers of a site with linear selection, enforcement and plugins."""
    limits = limits_from(
        parse_config(
            "AccountingStorageEnforce = associations,limits,qos,safe\n"
            "AccountingStorageType = accounting_storage/slurmdbd\n"
            "EnforcePartLimits = ANY\n"
            "GresTypes = gpu,mps,shard\n"
            "JobSubmitPlugins = lua,require_timelimit\n"
            "MaxArraySize = 100001\n"
            "MaxMemPerCPU = 8000\n"
            "MaxTasksPerNode = 1024\n"
            "SchedulerParameters = bf_continue,max_script_size=1000,defer\n"
            "SelectType = select/linear\n"
            "SelectTypeParameters = CR_ONE_TASK_PER_CORE\n"
            "SLURM_VERSION = 24.11.5\n"
            "TmpFS = /scratch\n"
        )
    )
    assert limits == ClusterLimits(
        version=(24, 11, 5),
        max_array_size=100_001,
        max_script_bytes=1000,
        max_tasks_per_node=1024,
        enforce_partition_limits="ANY",
        accounting=True,
        accounting_enforce=frozenset({"associations", "limits", "qos", "safe"}),
        memory_consumable=False,
        whole_nodes=True,
        max_memory_per_cpu_mib=8000,
        tmp_fs="/scratch",
        submit_plugins=("lua", "require_timelimit"),
    )


def test_the_config_of_a_newer_slurm() -> None:
    """25.11.7 prints the same names."""
    text = (DATA / "25.11.7" / "config.txt").read_text()
    assert limits_from(parse_config(text)) == ClusterLimits(
        version=(25, 11, 7),
        cluster="box",
        accounting=True,
        default_memory_per_cpu_mib=1000,
        job_requeue=True,
        preemption="REQUEUE",
    )


def test_the_version() -> None:
    """As sbatch of Debian and of a release candidate say it; no version is an error."""
    run = FakeRunner(
        {"sbatch": [Completed(0, "slurm-wlm 22.05.8\n"), Completed(0, "slurm 26.05.0-0rc1\n")]}
    )
    assert slurm_version(run) == (22, 5, 8)
    assert slurm_version(run) == (26, 5, 0)
    with pytest.raises(SchedulerUnavailable, match="no version"):
        slurm_version(FakeRunner({"sbatch": [Completed(0, "hello\n")]}))
    with pytest.raises(SchedulerUnavailable, match="sbatch: broken"):
        slurm_version(FakeRunner({"sbatch": [Completed(1, "", "sbatch: error: broken\n")]}))


# As 22.05.8 printed it, with one more level.
TREE = "root||||\ncourse|physics|mem=6000M|\nphysics|root|mem=8000M,cpu=4|0\ndev|root||\n"
CLUSTER = Cluster(
    limits=ClusterLimits(cluster="c", accounting=True, accounting_enforce=frozenset({"limits"})),
    associations=(
        Association("course", group_tres={"cpu": 2, "node": 1}),
        Association("dev"),
    ),
)


def test_the_least_of_all_levels_counts() -> None:
    """From the association over its account up to the root."""
    run = FakeRunner({"sacctmgr": [Completed(0, TREE)]})
    course, dev = with_group_limits(CLUSTER, run, env={}).associations or ()
    assert course.group_tres == {"cpu": 2, "node": 1, "mem": 6000, "job": 0}
    assert dev.group_tres == {}
    assert "cluster=c" in run.calls[0].argv


@pytest.mark.parametrize(
    "answer", [Completed(1, "", "sacctmgr: error: no"), SchedulerUnavailable("silent")]
)
def test_where_nobody_answers_the_cluster_stays_as_it_is(
    answer: Completed | SchedulerUnavailable,
) -> None:
    """The check continues without."""
    assert with_group_limits(CLUSTER, FakeRunner({"sacctmgr": [answer]}), env={}) == CLUSTER


def test_limits_that_are_not_enforced_are_not_asked_for() -> None:
    """Nor those of a user without associations."""
    run = FakeRunner({})
    lax = dataclasses.replace(CLUSTER, limits=ClusterLimits(accounting=True))
    assert with_group_limits(lax, run, env={}) is lax
    nobody = dataclasses.replace(CLUSTER, associations=())
    assert with_group_limits(nobody, run, env={}) is nobody
