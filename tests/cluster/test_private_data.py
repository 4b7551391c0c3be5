"""An ordinary user on a cluster that hides things from him (PrivateData), and others' jobs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk

Hide = Callable[[str], None]


@pytest.fixture
def hide(slurm_cluster: SlurmCluster) -> Iterator[Hide]:
    """Set the cluster's PrivateData; unset again in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda kinds: stack.enter_context(slurm_cluster.configured(f"PrivateData={kinds}"))


@pytest.mark.parametrize(
    ("kinds", "unseen"),
    [
        ("nodes", "no nodes (PrivateData), so CPUs, memory, GPUs and features are unknown"),
        ("partitions", "no partitions or nodes (PrivateData), so limits on time and nodes, CPUs"),
        ("nodes,partitions", "no partitions or nodes (PrivateData)"),
    ],
)
def test_what_cannot_be_seen_is_not_called_right(
    desk: Desk, hide: Hide, kinds: str, unseen: str
) -> None:
    """`check` names it with status 5, `submit` warns and submits, `init` writes nothing empty."""
    hide(kinds)
    wrong = {"nodes": 99, "gpus": 3, "time": "00:01:00"}
    told = desk.hpml("check", desk.job("wrong", command=["true"], resources=wrong), code=None)
    assert told.returncode == (2 if kinds == "nodes" else 5)  # partitions show their size
    assert f"not checked against the cluster: it shows you {unseen}" in told.stdout
    assert "OK" not in told.stdout
    told = desk.hpml("init", code=None)
    assert told.returncode == (0 if kinds == "nodes" else 4)
    assert re.search("shows you no|not shown by the cluster", told.stdout + told.stderr)
    assert (desk.directory / "hpml.toml").exists() == (kinds == "nodes")
    right = desk.job("right", command=["true"], resources={"time": "00:01:00"})
    told = desk.hpml("submit", right)
    assert f"hpml: warning: not checked against the cluster: it shows you {unseen}" in told.stderr
    desk.slurm("scancel", told.stdout.split()[-1])


@pytest.mark.parametrize("kinds", ["none", "jobs"])
def test_another_users_job_cannot_be_cancelled(
    desk: Desk, hide: Hide, tmp_path: Path, kinds: str
) -> None:
    """The hint states that only the owner can, even if other users' jobs are hidden."""
    hide(kinds)
    (tmp_path / "root").mkdir()
    root = Desk(desk.cluster, tmp_path / "root", as_root=True)
    file = root.job("theirs", command=["sleep", "600"], resources={"time": "00:05:00"})
    job = root.json("submit", file)
    # a reader of somebody else's records needs to be let in
    root.directory.chmod(0o755)
    told = desk.hpml("--records", root.records, "cancel", job["id"], code=None)
    root.hpml("cancel", job["id"])
    assert told.returncode == 4, told.stderr
    assert "hint: another user's job can be cancelled only by its owner" in told.stderr
