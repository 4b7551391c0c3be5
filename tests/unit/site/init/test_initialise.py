"""The profile is written where it was asked for, whole or not at all, and never over another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpml_orchestrator.errors import (
    InputError,
    NotFoundError,
    SchedulerError,
    SchedulerUnavailable,
)
from hpml_orchestrator.scheduler.cluster import Cluster
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.site import Plan, Profile, group_nodes, initialise, plan, save
from hpml_orchestrator.testing import FakeRunner
from tests.unit.site.init.test_every_partition import DATA, captured


def made(text: str = "a = 1\n", **files: str) -> Profile:
    return Profile(Cluster(), (), text, files={f"topology/{k}.xml": v for k, v in files.items()})


def test_it_goes_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the job files, below the configuration, or into a file by name."""
    monkeypatch.chdir(tmp_path)
    env = {"HOME": "/home/ada", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert plan("", user=False, force=False, environment=env).path == tmp_path / "hpml.toml"
    assert plan("x.toml", user=False, force=False, environment=env).path == tmp_path / "x.toml"
    own = plan("", user=True, force=False, environment=env).path
    assert own == tmp_path / "config" / "hpml" / "site.toml"
    assert own.parent.is_dir()


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A profile, even a dangling link, is replaced with --force alone."""
    path = tmp_path / "hpml.toml"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="is there already") as caught:
        plan(str(path), user=False, force=False, environment={})
    assert "--force" in caught.value.hint
    with pytest.raises(InputError, match="is there already"):
        save(made(), Plan(path))
    assert plan(str(path), user=False, force=True, environment={}).force


@pytest.mark.parametrize(
    ("output", "user", "words"),
    [
        ("nowhere/hpml.toml", False, "no such directory"),
        (".", False, "is a directory"),
        ("x", True, "one of --user and --output"),
        ("", True, "no home directory"),
    ],
)
def test_places_that_do_not_do(
    output: str, user: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the cluster is asked."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        plan(output, user=user, force=False, environment={})


def test_it_is_written_for_all_to_read(tmp_path: Path) -> None:
    """The profile with mode 644, its topology files before it, no temporary file left."""
    before = os.umask(0o077)
    try:
        written = save(made("a = 1\n", cpu="<xml/>"), Plan(tmp_path / "hpml.toml"))
    finally:
        os.umask(before)
    assert written == [tmp_path / "topology" / "cpu.xml", tmp_path / "hpml.toml"]
    assert (tmp_path / "hpml.toml").read_text() == "a = 1\n"
    assert stat.S_IMODE((tmp_path / "hpml.toml").stat().st_mode) == 0o644
    assert sorted(os.listdir(tmp_path)) == ["hpml.toml", "topology"]


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A file where the topology's directory should be: an error that names it, no profile."""
    (tmp_path / "topology").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        save(made("a = 1\n", cpu="<xml/>"), Plan(tmp_path / "hpml.toml"))
    assert not (tmp_path / "hpml.toml").exists()


def test_without_slurm_it_says_that_none_is_needed() -> None:
    """The local backend needs no profile."""
    with pytest.raises(NotFoundError, match="there is no Slurm here") as caught:
        initialise(FakeRunner({}), {}, writer="", when="")
    assert "needs no profile" in caught.value.hint


def test_a_silent_controller_is_told_as_such() -> None:
    """Exit status 5: try again."""
    silent = Completed(1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller\n")
    with pytest.raises(SchedulerUnavailable):
        initialise(FakeRunner({"scontrol": [silent]}), {}, writer="", when="")


def hiding(*kinds: str) -> FakeRunner:
    """A real cluster's answers, but for what it does not show this user."""
    run: dict[str, list[Completed | BaseException]] = {
        f"scontrol --all show {kind}": [
            Completed(1, "", "slurm_load_node error: Access/permission denied\n")
            if kind in kinds
            else Completed(0, (DATA / "22.05.8" / name).read_text())
        ]
        for kind, name in (
            ("config", "config.txt"),
            ("partition", "show-partition.txt"),
            ("node", "show-node.txt"),
            ("reservation", "show-reservation.txt"),
        )
    }
    return FakeRunner({**run, "sacctmgr": [Completed(0, "")], "sh": [Completed(0, "")]})


def test_a_cluster_that_hides_its_partitions_gets_no_profile() -> None:
    """An empty one would look like a true one."""
    with pytest.raises(SchedulerError, match="shows you no partitions or nodes") as caught:
        initialise(hiding("partition", "node"), {}, writer="", when="")
    assert "ask an administrator" in caught.value.hint


def test_a_cluster_that_hides_its_nodes_gets_a_profile_that_says_so() -> None:
    """Its partitions are true all the same."""
    profile = initialise(hiding("node"), {}, writer="", when="")
    assert "nodes       the cluster shows you none (PrivateData)" in profile.lines()
    assert "# The cluster showed no nodes to who wrote this (PrivateData)" in profile.text
    assert "[partitions.main]" in profile.text


def test_what_was_found_is_told_in_a_few_lines(small: Cluster) -> None:
    """Cluster, partitions, nodes, accounts; what was not looked at and why."""
    profile = Profile(small, group_nodes(small), "", looks={"cpu": "no node was idle"})
    assert profile.lines() == [
        "cluster     elbe, Slurm 22.05.8",
        "partitions  gpu, all (DRAIN); none is the default",
        "nodes       3: 2 a100x4, 1 cpu",
        "            1 out of service",
        "accounts    physics",
        "looked at   no kind of node",
        "            not at cpu: no node was idle",
    ]
    assert profile.to_json()["node_types"][0] == {
        "name": "a100x4",
        "count": 2,
        "gpus": "a100:4",
        "looked_at": None,
    }


def test_a_captured_cluster_is_told_in_a_few_lines() -> None:
    """What Slurm 22.05.8 said of a real cluster."""
    cluster = captured()
    lines = Profile(cluster, group_nodes(cluster), "").lines()
    assert lines[0] == "cluster     devcluster, Slurm 22.05.8"
    assert len(lines) <= 5
