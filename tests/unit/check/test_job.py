"""The whole check of a job: this machine, a cluster shown by a fake runner, the site profile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.job import CheckReport, check_job, check_local, invalid_job, refusal
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.scheduler.command import Completed, SubprocessRunner
from hpml_orchestrator.scheduler.local.processes import LocalMachine
from hpml_orchestrator.site.model import ResolvedSite, Site
from hpml_orchestrator.testing.runner import FakeRunner

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


def job(array: str | None = None, **resources: Any) -> Job:
    fields = {"name": "a", "command": ["true"], "workdir": "/"}
    return Job.from_json({**fields, "array": array, "resources": resources})


def rules(**given: dict[str, Any]) -> Site:
    named = {name.replace("_", "-"): rule for name, rule in given.items()}
    return Site.model_validate({"directives": named})


def reported(
    tmp_path: Path,
    asked: Job,
    site: Site | None = None,
    partition: str | Completed = PARTITION,
    node: str | Completed = NODE,
) -> CheckReport:
    """What a check finds on a cluster of one node."""
    answers = {
        "scontrol --all show config": (DATA / "config.txt").read_text("utf-8"),
        "scontrol --all show partition": partition,
        "scontrol --all show node": node,
        "sacctmgr": "",
    }
    runner = FakeRunner(
        {
            command: [Completed(0, answer) if isinstance(answer, str) else answer] * 9
            for command, answer in answers.items()
        }
    )
    return check_job(
        asked,
        backend="slurm",
        records=tmp_path,
        environment={},
        run=runner,
        site=ResolvedSite(site) if site else None,
    )


def found(
    tmp_path: Path, asked: Job, site: Site | None = None, partition: str = PARTITION
) -> dict[str, str]:
    """Codes and levels of what it finds."""
    report = reported(tmp_path, asked, site, partition)
    assert not report.not_asked, report.not_asked
    # Records in /tmp are local to this machine: true here, and not what this is about.
    return {one.code: one.level for one in report.findings if not one.code.endswith(".local")}


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
    """Neither an error nor a success: the job may be right, and the report names what is hidden."""
    report = reported(tmp_path, job(gpus=9), None, partition, node)
    assert report.errors == []
    assert f"it shows you no {unseen}" in report.not_asked
    assert report.to_json()["ok"] is False


LIMITED = PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=1-00:00:00")
TOO_LONG = {"time": "2-00:00:00"}


@pytest.mark.parametrize(
    ("resources", "site", "codes"),
    [
        ({}, None, {}),
        ({"memory": "1T"}, None, {"memory.most": "error"}),
        ({"memory": "1T"}, rules(mem={"omit": True}), {}),
        ({}, rules(mem={"default": "1T"}), {"memory.most": "error"}),
        ({"memory": "1G"}, rules(mem={"default": "1T"}), {}),
        ({"memory": "1T"}, rules(mem={"rename": "--tmp={value}"}), {}),
        ({}, rules(partition={"default": "mane"}), {"partition.unknown": "error"}),
        ({"partition": "mane"}, rules(partition={"omit": True}), {}),
        ({"partition": "ma"}, rules(partition={"rename": "--partition={value}in"}), {}),
        ({"constraint": "none"}, rules(constraint={"rename": "--prefer={value}"}), {}),
        (TOO_LONG, rules(time={"omit": True}), {}),
        (TOO_LONG, None, {"time.partition": "error"}),
        ({}, Site(cluster="box"), {}),  # as the captured cluster is called
        ({}, Site(cluster="elsewhere"), {"site.cluster": "warning"}),
    ],
)
def test_the_check_follows_the_sites_rules(
    tmp_path: Path, resources: dict[str, Any], site: Site | None, codes: dict[str, str]
) -> None:
    """What a rule adds is compared with the cluster, what it renames or drops only as it became."""
    assert found(tmp_path, job(**resources), site, LIMITED) == codes


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        (job(gpus=1, cpus_per_rank=2, memory="4G"), {}),
        (
            job(nodes=2, gpus=2, cpus_per_rank=3, memory="5G"),
            {"local.nodes": 1, "local.gpus": 1, "local.cpus": 2, "local.memory": "4G"},
        ),
        (job("0-999"), {}),
        (job("0-1000"), {"local.array": 1000}),
    ],
)
def test_this_machine_has_what_it_has(asked: Job, limits: dict[str, Any]) -> None:
    """Nodes, GPUs, CPUs, memory and tasks are compared with the local backend's."""
    findings = check_local(asked, LocalMachine((0, 1), ("0",), 4096))
    assert {finding.code: finding.limit for finding in findings} == limits


def test_a_controller_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """The commands share the time limit; the report has the reason for the missing answer."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    (bin_dir / "scontrol").chmod(0o755)
    began = time.monotonic()
    report = check_job(
        job(),
        backend="slurm",
        records=tmp_path,
        environment={"PATH": f"{bin_dir}:/usr/bin:/bin"},
        run=SubprocessRunner(),
        cluster_seconds=0.5,
    )
    assert time.monotonic() - began < 120
    assert "scontrol gave no answer" in report.not_asked
    assert report.errors == []
    assert report.to_json()["ok"] is False


def test_an_answer_that_makes_no_sense_is_no_obstacle(tmp_path: Path) -> None:
    """What is wrong with the check is not wrong with the job."""
    run = FakeRunner({"scontrol": [ValueError("odd")]})
    report = check_job(job(), backend="slurm", records=tmp_path, environment={}, run=run)
    assert "was not understood (ValueError: odd)" in report.not_asked


def test_a_refusal_names_every_error(tmp_path: Path) -> None:
    """Every finding with its hint in one error, whose hint names --no-check."""
    asked = job(nodes=3, memory="100T")
    report = check_job(asked, backend="local", records=tmp_path, environment={})
    error = refusal(report.errors)
    assert error.exit_code == 2
    assert "asks for 3 nodes" in str(error)
    assert "100T of memory" in str(error)
    assert error.field == "resources.nodes"
    assert "--no-check" in error.hint


def test_what_auto_became_is_a_note(tmp_path: Path) -> None:
    """A line per entry of `stage` with `auto`."""
    stage = [{"name": "d", "source": "/none"}, {"name": "e", "source": "/none"}]
    asked = Job.from_json({**job().to_json(), "stage": stage})
    why = {"e": "its size is not known"}
    report = check_job(asked, backend="local", records=tmp_path, environment={}, targets=why)
    assert report.notes == ["stage.1.target: auto is local here: its size is not known"]
    assert [finding.code for finding in report.errors] == ["stage.missing"] * 2


def test_what_the_local_backend_would_refuse_is_an_error(tmp_path: Path) -> None:
    """As `hpml run --local` prints it."""
    fields = {**job().to_json(), "launcher": "srun", "mpi": "pmix"}
    asked = Job.from_json(fields)
    report = check_job(asked, backend="local", records=tmp_path, environment={})
    assert [(finding.field, finding.value) for finding in report.errors] == [("mpi", "pmix")]


def test_a_job_file_that_is_wrong_is_a_report(tmp_path: Path) -> None:
    """Each problem is a finding with its field and value; a fault of the file itself is one."""
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nscript: x\nresources: {nodes: 0}\nmpi: lam\n")
    with pytest.raises(InputError) as caught:
        load_job(path)
    findings = invalid_job(caught.value).findings
    assert [(finding.field, finding.value) for finding in findings] == [
        ("mpi", "lam"),
        ("resources.nodes", 0),
    ]
    assert findings[1].message == "must be at least 1"
    path.write_text("name: a\nscript: x\nmpi: pmix\nargs: ['{stage.d}']\n")
    with pytest.raises(InputError) as caught:
        load_job(path)
    findings = invalid_job(caught.value).findings
    assert [(finding.field, finding.value) for finding in findings] == [
        ("mpi", "pmix"),
        ("args.0", "{stage.d}"),
    ]
    (one,) = invalid_job(InputError("says 'a (got b)'", field="f", value="c (got d)")).findings
    assert (one.message, one.value) == ("says 'a (got b)'", "c (got d)")
    report = invalid_job(InputError("it is empty"))
    assert (report.to_json()["ok"], report.errors[0].field) == (False, "job")
