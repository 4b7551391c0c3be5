"""The check and the site profile: Slurm is asked for what the site's rules leave, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.job import check_job
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.script.site_rules import as_asked
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite
from hpml_orchestrator.testing import FakeRunner

DATA = Path(__file__).parents[1] / "scheduler" / "slurm" / "data" / "25.11.7"
PARTITION = (
    "PartitionName=main\n   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n"
    "   Default=YES QoS=N/A\n   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0\n"
    "   Nodes=node1\n   State=UP TotalCPUs=16 TotalNodes=1\n"
)
NODE = (
    "NodeName=node1 CoresPerSocket=8\n   CPUAlloc=0 CPUEfctv=16 CPUTot=16\n"
    "   Gres=(null)\n   RealMemory=64000 Sockets=2\n   State=IDLE ThreadsPerCore=1\n"
    "   Partitions=main\n"
)

DENIED = Completed(1, "", "slurm_load_node error: Access/permission denied\n")


def job(**resources: Any) -> Job:
    return Job.model_validate(
        {"name": "a", "command": ["true"], "workdir": "/", "resources": resources}
    )


def rules(**given: dict[str, Any]) -> Site:
    named = {name.replace("_", "-"): rule for name, rule in given.items()}
    return Site.model_validate({"directives": named})


def found(
    tmp_path: Path, asked: Job, site: Site | None, partition: str = PARTITION
) -> dict[str, str]:
    """Codes and levels of what a check finds on a cluster of one node, told by a fake runner."""
    told = {
        "scontrol --all show config": (DATA / "config.txt").read_text("utf-8"),
        "scontrol --all show partition": partition,
        "scontrol --all show node": NODE,
        "scontrol --all show reservation": "No reservations in the system\n",
        "sacctmgr": "",
    }
    runner = FakeRunner({command: [Completed(0, text)] * 9 for command, text in told.items()})
    report = check_job(
        asked,
        backend="slurm",
        records=tmp_path,
        environment={},
        run=runner,
        site=ResolvedSite(site) if site else None,
    )
    assert not report.not_asked, report.not_asked
    # Records in /tmp are said to be this machine's own: true here, and not what this is about.
    return {one.code: one.level for one in report.findings if one.code != "records.local"}


@pytest.mark.parametrize(
    ("partition", "node", "unseen"),
    [
        (DENIED, DENIED, "partitions or nodes (PrivateData), so limits on time and nodes, CPUs"),
        (Completed(0, ""), Completed(0, ""), "partitions or nodes"),
        (Completed(0, PARTITION), DENIED, "nodes (PrivateData), so CPUs, memory, GPUs"),
    ],
)
def test_what_a_site_hides_is_not_right(
    tmp_path: Path, partition: Completed, node: Completed, unseen: str
) -> None:
    """No error, for the job may be right, but no success either: the report says what is unseen."""
    runner = FakeRunner(
        {
            "scontrol --all show config": [Completed(0, (DATA / "config.txt").read_text("utf-8"))],
            "scontrol --all show partition": [partition],
            "scontrol --all show node": [node],
            "scontrol --all show reservation": [DENIED],
            "sacctmgr": [Completed(0, "")],
        }
    )
    report = check_job(job(gpus=9), backend="slurm", records=tmp_path, environment={}, run=runner)
    assert report.errors == []
    assert f"it shows you no {unseen}" in report.not_asked
    assert report.to_json()["ok"] is False


def test_what_a_site_leaves_out_is_not_asked_for() -> None:
    """The job as Slurm sees it, field by field."""
    site = rules(
        mem={"omit": True},
        exclusive={"omit": True},
        account={"default": "physics"},
        qos={"default": "low"},
        reservation={"default": "course"},
        nice={"omit": True},
        gpus_per_node={"rename": "--gres=gpu:{item}"},
    )
    asked = job(memory="4G", exclusive=True, qos="high", gpus=2, extra=["--nice=3", "--contiguous"])
    seen = as_asked(asked, site.directives).resources
    assert seen.memory is None
    assert not seen.exclusive
    assert (seen.account, seen.qos) == ("physics", "high")
    assert seen.gpus == "2", "under another name it is asked for all the same"
    assert seen.extra == ["--contiguous", "--reservation=course"]


@pytest.mark.parametrize(
    ("resources", "rule"),
    [
        ({"memory": "1T"}, {"mem": {"omit": True}}),
        ({"partition": "mane"}, {"partition": {"omit": True}}),
    ],
)
def test_a_limit_on_what_the_site_leaves_out_does_not_matter(
    tmp_path: Path, resources: dict[str, Any], rule: dict[str, dict[str, Any]]
) -> None:
    """The same job is wrong without the rule and right with it."""
    without = found(tmp_path, job(**resources), None)
    assert "error" in without.values()
    assert "error" not in found(tmp_path, job(**resources), rules(**rule)).values()


def test_a_default_of_the_site_is_checked(tmp_path: Path) -> None:
    """A partition that a rule adds must be there."""
    assert found(tmp_path, job(), rules(partition={"default": "mane"})) == {
        "partition.unknown": "error"
    }


def test_a_profile_of_another_cluster_is_a_warning(tmp_path: Path) -> None:
    """The captured cluster is called box."""
    assert found(tmp_path, job(), Site(cluster="box")) == {}
    assert found(tmp_path, job(), Site(cluster="elsewhere")) == {"site.cluster": "warning"}


@pytest.mark.parametrize(
    ("resources", "rule", "codes"),
    [
        ({}, {"mem": {"default": "1T"}}, {"memory.most": "error"}),
        ({"memory": "1G"}, {"mem": {"default": "1T"}}, {}),
        ({"memory": "1T"}, {"mem": {"rename": "--tmp={value}"}}, {}),
        ({"partition": "mane"}, {"partition": {"rename": "--prefer={value}"}}, {}),
        ({"partition": "ma"}, {"partition": {"rename": "--partition={value}in"}}, {}),
        (
            {"partition": "main"},
            {"partition": {"rename": "--partition={value}-gpu"}},
            {"partition.unknown": "error"},
        ),
        ({"constraint": "none"}, {"constraint": {"rename": "--prefer={value}"}}, {}),
        ({"time": "2-00:00:00"}, {"time": {"omit": True}}, {}),
        ({"time": "2-00:00:00"}, {}, {"time.partition": "error"}),
    ],
)
def test_the_check_follows_the_sites_rules(
    tmp_path: Path,
    resources: dict[str, Any],
    rule: dict[str, dict[str, Any]],
    codes: dict[str, str],
) -> None:
    """What a rule adds is compared with the cluster, what it renames or drops only as it became."""
    limited = PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=1-00:00:00")
    assert found(tmp_path, job(**resources), rules(**rule), limited) == codes


def test_excluding_every_node_is_said_in_these_words(tmp_path: Path) -> None:
    """It is the excluding, not the CPUs, that keeps the job from running."""
    assert found(tmp_path, job(extra=["--exclude=node1"]), None) == {"nodes.excluded": "error"}


@pytest.mark.parametrize(
    ("resources", "site", "partition", "told"),
    [
        ({}, None, PARTITION, True),
        ({}, rules(), PARTITION, True),
        ({"exclusive": True}, None, PARTITION, False),
        ({"exclusive": True}, rules(exclusive={"omit": True}), PARTITION, True),
        ({}, None, PARTITION + "   OverSubscribe=EXCLUSIVE\n", False),
        (
            {"partition": "main"},
            Site.model_validate({"partitions": {"main": {"exclusive": True}}}),
            PARTITION,
            False,
        ),
    ],
)
def test_a_fixed_port_is_for_nodes_of_one_job(
    tmp_path: Path, resources: dict[str, Any], site: Site | None, partition: str, *, told: bool
) -> None:
    """Elsewhere another job's monitor may have it; nodes are whole by wish, profile or Slurm."""
    monitor = {"enabled": True, "listen": "127.0.0.1:9500"}
    asked = Job.model_validate({**job(**resources).model_dump(mode="json"), "monitor": monitor})
    assert ("monitor.port" in found(tmp_path, asked, site, partition)) is told


def test_this_machine_is_nobodys_alone(tmp_path: Path) -> None:
    """Jobs of the local backend run side by side, whatever they ask for."""
    monitor = {"enabled": True, "listen": "127.0.0.1:9500"}
    fields = job(exclusive=True).model_dump(mode="json")
    report = check_job(
        Job.model_validate({**fields, "monitor": monitor}),
        backend="local",
        records=tmp_path,
        environment={},
    )
    assert "monitor.port" in {one.code for one in report.findings}
