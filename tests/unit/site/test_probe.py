"""A look at the nodes: bounded, in turn through what a site may want, and never a hindrance.

The probes themselves run for real, here and in tests/cluster; what srun answers on sites with rules
comes from a fake.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.scheduler.cluster import Cluster
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.site.node_probe import Interface, NodeProbe, ScratchDirectory, command, parse
from hpml_orchestrator.site.probe import group_nodes, probe
from hpml_orchestrator.testing.runner import FakeRunner

SEEN = """\
Welcome to elbe!
=== hpml look ===
host\tgpu1
place\tram\t/dev/shm\ttmpfs\t524288\t500000\tyes
place\t$LOCAL_SCRATCH\t/nvme/job.7\txfs\t900000000\t800000000\tyes
place\tTmpFS\t/local\text4\t1000\t500\tyes
place\tpath\t/scratch\tlustre\t9000000000\t800\tyes
place\tpath\t/odd
interface\teno1\t1000\t1\tyes
interface\tib0\t200000\t32\tyes
interface\teno2\t-1\t1\tno
module\tmodules yes
module\t/usr/share/modules/modulefiles:
module\tcuda/12.4(default)
module\tgcc/
module\tR
module\topenmpi/4.1.6 <aL>
module\tNo modules here
=== hpml end ===
"""
REFUSED = Completed(1, "", "srun: error: Unable to allocate resources: Invalid qos specification\n")


def test_what_a_node_prints_is_read() -> None:
    """Places, networks with the best first, modules without their marks."""
    look = parse(SEEN)
    assert look is not None
    assert look.host == "gpu1"
    assert look.places[0] == ScratchDirectory(
        "ram", "/dev/shm", "tmpfs", 524288, 500000, writable=True
    )
    assert look.interfaces == (
        Interface("ib0", 200_000, infiniband=True, addressed=True),
        Interface("eno1", 1_000, infiniband=False, addressed=True),
        Interface("eno2", 0, infiniband=False, addressed=False),
    )
    assert look.network == ("ib0", "eno1")
    assert look.modules == ("cuda/12.4", "R", "openmpi/4.1.6")
    assert look.scratch == ScratchDirectory(
        "$LOCAL_SCRATCH", "/nvme/job.7", "xfs", 900_000_000, 800_000_000, writable=True
    )


@pytest.mark.parametrize("text", ["", "=== hpml look ===\nhost\tx\n", "slurmstepd: error: killed"])
def test_a_look_that_was_cut_off_is_none(text: str) -> None:
    """Half of what a node has to say is not taken for all of it."""
    assert parse(text) is None


def places(*rows: tuple[str, str, str, int, bool]) -> NodeProbe:
    return NodeProbe(
        "n",
        tuple(
            ScratchDirectory(name, path, kind, size, size, ok)
            for name, path, kind, size, ok in rows
        ),
    )


@pytest.mark.parametrize(
    ("look", "path"),
    [
        (places(("path", "/tmp", "ext4", 50, True)), None),
        (places(("path", "/tmp", "ext4", 50, True), ("path", "/nvme", "xfs", 90, True)), "/nvme"),
        (places(("path", "/tmp", "ext4", 50, True), ("path", "/nvme", "xfs", 90, False)), None),
        (places(("path", "/tmp", "ext4", 50, True), ("path", "/raid", "xfs", 40, True)), None),
        (places(("path", "/scratch", "nfs4", 900, True)), None),
        (places(("path", "/scratch", "fuse.sshfs", 900, True)), None),
        (places(("path", "/mnt/nvme", "tmpfs", 900, True)), None),
        (
            places(("TmpFS", "/local", "xfs", 10, True), ("path", "/raid", "xfs", 90, True)),
            "/local",
        ),
        (
            places(("$SLURM_TMPDIR", "/t/1", "xfs", 1, True), ("path", "/raid", "xfs", 9, True)),
            None,
        ),
        (places(("$TMPDIR", "/tmp", "ext4", 5, True), ("path", "/raid", "xfs", 9, True)), "/raid"),
        (NodeProbe("n"), None),
    ],
)
def test_scratch_is_what_hpml_would_not_find_by_itself(look: NodeProbe, path: str | None) -> None:
    """A local disk that can be written; not RAM, not what is shared, not what is taken anyway."""
    found = look.scratch
    assert (found.path if found else None) == path


@pytest.mark.parametrize("shell", ["dash", "bash --posix"])
def test_the_script_is_plain_sh_and_takes_odd_names(shell: str, tmp_path: Path) -> None:
    """Any POSIX shell runs it; a directory's odd name is not executed and breaks no line."""
    odd = tmp_path / "a $(touch ran) 'b"
    odd.mkdir()
    argv = command(str(odd), topology=True)
    done = subprocess.run(
        [*shell.split(), *argv[1:]],
        env={"PATH": os.environ["PATH"], "MY_SCRATCH": str(odd)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    look = parse(done.stdout)
    assert look is not None
    assert [one.path for one in look.places if one.name == "$MY_SCRATCH"] == [str(odd)]
    assert sorted(os.listdir(tmp_path)) == [odd.name]


@pytest.mark.parametrize(("name", "seen"), [("token", True), ("none", False), ("", None)])
def test_whether_the_node_sees_the_records(tmp_path: Path, name: str, seen: bool | None) -> None:
    """By a new file in their directory, if one could be made."""
    (tmp_path / "token").touch()
    token = str(tmp_path / name) if name else ""
    argv = command(str(tmp_path), topology=False, token=token)
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    look = parse(done.stdout)
    assert look is not None
    assert look.sees_records is seen


@pytest.mark.parametrize(
    ("version", "kept"), [("2.0", True), ("2.1", True), ("1.0", False), ("", False)]
)
def test_topology_is_taken_from_lstopo_of_hwloc_2(version: str, kept: bool, tmp_path: Path) -> None:
    """A stand-in for lstopo (hwloc is not everywhere): its XML, whole and of version 2, is kept."""
    attribute = f' version="{version}"' if version else ""
    xml = f'<?xml version="1.0"?>\n<topology{attribute}>\n<object type="Machine"/>\n</topology>\n'
    (tmp_path / "lstopo-no-graphics").write_text(
        f'#!/bin/sh\ntest "$1" = --disallowed || exit 1\ncat <<"E"\n{xml}E\n'
    )
    (tmp_path / "lstopo-no-graphics").chmod(0o755)
    done = subprocess.run(
        command("/tmp", topology=True),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    look = parse(done.stdout)
    assert look is not None
    assert look.topology == (xml if kept else "")


def test_each_kind_is_looked_at_once_on_an_idle_node(small: Cluster, tmp_path: Path) -> None:
    """One short srun per kind: a minute, one task, a node that is up, no waiting."""
    run = FakeRunner({"srun": [Completed(0, SEEN)]})
    found = probe(small, group_nodes(small), run, {"PATH": "/bin"}, tmp_path)
    assert isinstance(found["a100x4"], NodeProbe)
    assert found["cpu"] == "it is in no usable partition"  # but in one that drains
    (call,) = run.calls
    assert {"--time=1", "--ntasks=1", "--nodelist=gpu1", "--partition=gpu"} <= set(call.argv)
    assert any(word.startswith("--immediate=") for word in call.argv)
    assert call.env == {"PATH": "/bin"}


def test_a_site_that_wants_gpus_asked_for_is_asked_so(small: Cluster, tmp_path: Path) -> None:
    """After a refusal the same with a GPU."""
    run = FakeRunner({"srun": [REFUSED, Completed(0, SEEN)]})
    groups = group_nodes(small)[:1]
    assert isinstance(probe(small, groups, run, {}, tmp_path)["a100x4"], NodeProbe)
    assert [word for word in run.calls[1].argv if word.startswith("--gres")] == [
        "--gres=gpu:a100:1"
    ]
    assert not [word for word in run.calls[0].argv if word.startswith("--gres")]


def test_refusals_are_told_in_slurms_words(small: Cluster, tmp_path: Path) -> None:
    """The profile has the reason why a kind was not probed."""
    run = FakeRunner({"srun": [REFUSED]})
    found = probe(small, group_nodes(small)[:1], run, {}, tmp_path)
    assert found == {"a100x4": "Unable to allocate resources: Invalid qos specification"}
    assert run.count("srun") == 2


def test_kinds_without_an_idle_node_are_left_alone(small: Cluster, tmp_path: Path) -> None:
    """Nobody waits for a busy node, nor for one that is down."""
    run = FakeRunner({"srun": [Completed(0, SEEN)]})
    busy = tuple(
        replace(node, states=frozenset({"ALLOCATED"} if node.name != "cpu1" else {"IDLE", "DRAIN"}))
        for node in small.nodes
    )
    cluster = replace(small, nodes=busy)
    assert probe(cluster, group_nodes(cluster), run, {}, tmp_path) == {
        "a100x4": "no node of this kind was idle",
        "cpu": "all nodes of this kind are out of service",
    }
    assert run.calls == []


@pytest.mark.parametrize("flag", ["BLOCKED", "RESERVED", "PERFCTRS", "POWERED_DOWN"])
def test_an_idle_node_that_takes_no_job_now_is_left_alone(
    flag: str, small: Cluster, tmp_path: Path
) -> None:
    """Besides IDLE it has a flag that keeps jobs away: srun would get no answer in time."""
    run = FakeRunner({"srun": [Completed(0, SEEN)]})
    states = frozenset({"IDLE", flag})
    cluster = replace(small, nodes=tuple(replace(node, states=states) for node in small.nodes))
    assert probe(cluster, group_nodes(cluster)[:1], run, {}, tmp_path) == (
        {"a100x4": "no node of this kind was idle"}
    )
