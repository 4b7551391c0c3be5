"""What an exporter is told of its job, where it can be reached, and where it runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.node import monitorjob
from hpml_orchestrator.node.monitorjob import (
    allocated_gpus,
    free_cpus,
    job_facts,
    labels_of,
    target_address,
)
from hpml_orchestrator.node.planning import Prepared
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.verify import Circumstances
from hpml_orchestrator.topology.model import Topology
from tests.unit.placement.machines import dgx_a100

ATTEMPT = Path("/records/runs/digits-1/attempts/0")
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_UID": "4242",
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_ACCOUNT": "proj",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NAME": "digits",
    "HPML_SWEEP": "lr",
    "HPML_POINT": "3",
}


def prepared(
    *cpus: Sequence[int], topology: Topology | None = None, visible: str | None = None
) -> Prepared:
    """A node whose ranks have these CPUs."""
    ranks = tuple(RankPlan(rank, cpus=tuple(own)) for rank, own in enumerate(cpus))
    around = Circumstances("n1", "warn", (), visible, frozenset(), 1)
    return Prepared(Plan(ranks), topology, around)


def test_the_facts_of_a_job() -> None:
    """By Slurm's variables; the run is that of the attempt's directory."""
    assert job_facts(SLURM, ATTEMPT, ["GPU-1"]) == {
        "jobid": "17",
        "uid": 4242,
        "user": "ada",
        "account": "proj",
        "partition": "gpu",
        "name": "digits",
        "gpus": ["GPU-1"],
        "run": "digits-1",
        "sweep": "lr",
        "point": "3",
    }


def test_what_slurm_does_not_say_stays_empty() -> None:
    """The user is at least the one who runs."""
    facts = job_facts({"SLURM_JOB_ID": "1", "USER": "me"}, ATTEMPT, None)
    assert (facts["uid"], facts["user"], facts["account"]) == (os.getuid(), "me", "")
    assert facts["gpus"] is None


def test_gpus_by_the_nodes_own_topology() -> None:
    """Those that are visible, in PCI addresses or UUIDs, never by index."""
    topology = dgx_a100()
    third, first = topology.gpus[2], topology.gpus[0]
    made = prepared([0], topology=topology, visible="2,0")
    assert allocated_gpus(made, {}, none=False) == [
        third.uuid or third.address,
        first.uuid or first.address,
    ]
    named = replace(topology, gpus=(replace(first, uuid="GPU-a"), *topology.gpus[1:]))
    made = prepared([0], topology=named, visible="0")
    assert allocated_gpus(made, {}, none=False) == ["GPU-a"]


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "GPU-a,MIG-b", "SLURM_NNODES": "1"}, ["GPU-a", "MIG-b"]),
        ({"SLURM_JOB_GPUS": "GPU-a", "SLURM_NNODES": "2"}, None),
        ({"SLURM_STEP_GPUS": "0-1,5"}, None),
        ({"SLURM_JOB_GPUS": "3", "SLURM_NNODES": "1"}, None),
        ({}, None),
    ],
)
def test_gpus_by_what_the_scheduler_says(
    environment: dict[str, str], gpus: list[str] | None
) -> None:
    """UUIDs name devices; Slurm's numbers are places in gres.conf, and nobody is named by those.

    Of a job on several nodes the batch script's list is that of its own node only.
    """
    assert allocated_gpus(None, environment, none=False) == gpus


def test_a_job_without_gpus_has_none() -> None:
    """Whatever the node has."""
    made = prepared([0], topology=dgx_a100())
    assert allocated_gpus(made, {"SLURM_STEP_GPUS": "0"}, none=True) == []


def test_cpus_that_no_rank_has() -> None:
    """Best whole cores; else the second threads of ranks' cores; else wherever the kernel likes."""
    topology = dgx_a100()
    first, second = topology.cores[0].cpus, topology.cores[1].cpus
    assert len(first) == 2
    allowed = {*first, *second}
    assert free_cpus(prepared(first, topology=topology), allowed) == set(second)
    assert free_cpus(prepared(first[:1], topology=topology), allowed) == set(second)
    assert free_cpus(prepared(first[:1], topology=topology), set(first)) == {first[1]}
    assert free_cpus(prepared(first, second, topology=topology), allowed) == frozenset()
    assert free_cpus(None, allowed) == frozenset()


@pytest.mark.parametrize(
    ("listens", "target"),
    [
        ("10.1.2.3:9445", "10.1.2.3:9445"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("127.0.0.1:4000", ""),
        ("[::1]:4000", ""),
        ("localhost:4000", ""),
    ],
)
def test_an_address_is_a_target_as_it_stands(listens: str, target: str) -> None:
    """But loopback, which on a Prometheus' own host would be another service."""
    environment = {"SLURM_SUBMIT_HOST": "login1"}
    assert target_address(listens, environment, "n1", host="gpu01") == target


def test_loopback_is_a_target_on_the_host_that_submitted() -> None:
    """As on a workstation with a Prometheus of its own."""
    environment = {"SLURM_SUBMIT_HOST": "desk.home"}
    assert target_address("127.0.0.1:4000", environment, "n1", host="desk") == "127.0.0.1:4000"


@pytest.mark.parametrize(
    ("known", "outgoing", "target"),
    [
        ({"n1": "10.0.0.7", "gpu01": "10.0.0.7"}, "10.0.0.7", "n1:4000"),
        ({"gpu01": "10.0.0.7"}, "10.0.0.7", "gpu01:4000"),
        ({"n1": "127.0.1.1", "gpu01": "127.0.1.1"}, "10.0.0.7", "10.0.0.7:4000"),
        ({}, "", ""),
    ],
)
@pytest.mark.parametrize("listens", ["0.0.0.0:4000", "[::]:4000", ":4000"])
def test_everywhere_is_a_name_that_leads_here(
    monkeypatch: pytest.MonkeyPatch,
    known: dict[str, str],
    outgoing: str,
    target: str,
    listens: str,
) -> None:
    """The node's, the host's, or the address of its packets (a fake name service and network)."""
    monkeypatch.setattr(
        monitorjob, "resolve", lambda names: {n: known[n] for n in names if n in known}
    )
    monkeypatch.setattr(monitorjob, "_outgoing", lambda: outgoing)
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu01")
    environment = {"SLURM_SUBMIT_HOST": "login1"}
    assert target_address(listens, environment, "n1", host="gpu01") == target
    if not target:
        here = {"SLURM_SUBMIT_HOST": "gpu01"}
        assert target_address(listens, here, "n1", host="gpu01") == "127.0.0.1:4000"


def test_tls_is_told_to_prometheus(tmp_path: Path) -> None:
    """By the scheme of the target, if the web config has it and it is no remark."""
    facts = job_facts(SLURM, ATTEMPT, [])
    web = tmp_path / "web.yml"
    for text, scheme in (
        ("tls_server_config:\n  cert_file: a\n", "https"),
        ("{tls_server_config: {cert_file: a}}\n", "https"),
        ("# tls_server_config:\nbasic_auth_users: {a: b}\n", ""),
    ):
        web.write_text(text)
        assert labels_of(facts, "n1", str(web))["__scheme__"] == scheme
    labels = labels_of(facts, "n1", str(tmp_path / "none"))
    assert labels == {
        "jobid": "17",
        "run": "digits-1",
        "user": "ada",
        "node": "n1",
        "__scheme__": "",
    }
