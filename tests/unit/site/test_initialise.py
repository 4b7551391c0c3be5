"""The profile is written to the requested path, atomically, and never replaces another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpml_orchestrator.errors import (
    InputError,
    NotFoundError,
    SchedulerError,
)
from hpml_orchestrator.scheduler.cluster import Cluster
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.site.initialise import ProfileDraft, initialise, profile_path, save
from hpml_orchestrator.site.probe import group_nodes
from hpml_orchestrator.testing.runner import FakeRunner
from tests.unit.site.clusters import slurm_answers


def made(text: str = "a = 1\n", **files: str) -> ProfileDraft:
    return ProfileDraft(
        Cluster(), (), text, files={f"topology/{k}.xml": v for k, v in files.items()}
    )


def test_it_goes_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the job files, below the configuration, or into a file by name."""
    monkeypatch.chdir(tmp_path)
    env = {"HOME": "/home/ada", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    for output, user, path in (
        ("", False, "hpml.toml"),
        ("x.toml", False, "x.toml"),
        ("", True, "config/hpml/site.toml"),
    ):
        found = profile_path(output, user=user, force=False, environment=env)
        assert found == tmp_path / path
        assert found.parent.is_dir()


@pytest.mark.parametrize(
    ("output", "user", "message"),
    [
        ("nowhere/hpml.toml", False, "does not exist"),
        (".", False, "is a directory"),
        ("x", True, "one of --user and --output"),
        ("", True, "no home directory"),
        ("link.toml", False, "is there already"),
    ],
)
def test_other_places_are_refused(
    output: str, user: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the cluster is asked; what exists, even a dangling link, is kept without --force."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=message):
        profile_path(output, user=user, force=False, environment={})
    if not user and output == "link.toml":
        assert profile_path(output, user=user, force=True, environment={})
        with pytest.raises(InputError, match="is there already"):
            save(made(), tmp_path / output)


def test_it_is_written_for_all_to_read(tmp_path: Path) -> None:
    """The profile with mode 644, its topology files before it, no temporary file left."""
    before = os.umask(0o077)
    try:
        written = save(made("a = 1\n", cpu="<xml/>"), tmp_path / "hpml.toml")
    finally:
        os.umask(before)
    assert written == [tmp_path / "topology" / "cpu.xml", tmp_path / "hpml.toml"]
    assert (tmp_path / "hpml.toml").read_text() == "a = 1\n"
    assert stat.S_IMODE((tmp_path / "hpml.toml").stat().st_mode) == 0o644
    assert sorted(os.listdir(tmp_path)) == ["hpml.toml", "topology"]


def test_without_slurm_it_says_that_none_is_needed() -> None:
    """The local backend needs no profile."""
    with pytest.raises(NotFoundError, match="there is no Slurm here") as caught:
        initialise(FakeRunner({}), {}, writer="", when="")
    assert "needs no profile" in caught.value.hint


def hiding(*kinds: str) -> FakeRunner:
    """A real cluster's answers, but for what it does not show this user."""
    denied = Completed(1, "", "slurm_load_node error: Access/permission denied\n")
    hidden = {f"scontrol --all show {kind}": [denied] for kind in kinds}
    return FakeRunner({**slurm_answers(), **hidden, "sacctmgr": [Completed(0, "")]})


def test_a_cluster_that_hides_its_partitions_gets_no_profile() -> None:
    """An empty one would look like a true one."""
    with pytest.raises(SchedulerError, match="shows you no partitions or nodes") as caught:
        initialise(hiding("partition", "node"), {}, writer="", when="")
    assert "ask an administrator" in caught.value.hint


def test_a_cluster_that_hides_its_nodes_gets_a_profile_that_says_so() -> None:
    """Its partitions are true all the same."""
    profile = initialise(hiding("node"), {}, writer="", when="")
    assert "nodes       not shown by the cluster (PrivateData)" in profile.lines()
    assert "# The cluster shows its nodes to administrators only (PrivateData)" in profile.text
    assert "[partitions.main]" in profile.text


def test_what_was_found_is_told_in_a_few_lines(small: Cluster) -> None:
    """Cluster, partitions, nodes, accounts; what was not looked at and why."""
    profile = ProfileDraft(small, group_nodes(small), "", probes={"cpu": "no node was idle"})
    assert profile.lines() == [
        "cluster     elbe, Slurm 22.05.8",
        "partitions  gpu and all (DRAIN); default: none",
        "nodes       3: 2 a100x4 and 1 cpu",
        "            1 out of service",
        "accounts    physics",
        "probed      no kind of node",
        "            not cpu: no node was idle",
    ]
    assert profile.to_json()["node_types"] == [
        {"name": "a100x4", "count": 2, "gpus": "a100:4", "looked_at": None, "sees_records": None},
        {"name": "cpu", "count": 1, "gpus": "0", "looked_at": None, "sees_records": None},
    ]
