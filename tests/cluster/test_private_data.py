"""An ordinary user on a cluster that hides things from him (PrivateData), and others' jobs."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import HPML, Desk

NOBODY = 65534
Hide = Callable[[str], None]


@pytest.fixture
def hide(slurm_cluster: SlurmCluster) -> Iterator[Hide]:
    """Set the cluster's PrivateData; unset again in the end."""
    before = slurm_cluster.slurm_conf.read_text()

    def private(kinds: str) -> None:
        slurm_cluster.slurm_conf.write_text(f"{before}PrivateData={kinds}\n")
        slurm_cluster.run("scontrol", "reconfigure")

    yield private
    slurm_cluster.slurm_conf.write_text(before)
    slurm_cluster.run("scontrol", "reconfigure")


@pytest.fixture
def desk(slurm_cluster: SlurmCluster) -> Desk:
    """The desk of root, where anybody may write: pytest's own directories are closed to others."""
    directory = Path(tempfile.mkdtemp(dir=slurm_cluster.box))
    directory.chmod(0o777)
    return Desk(slurm_cluster, directory)


def as_nobody(desk: Desk, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Call hpml as nobody, who may read everything: Python and the checkout may be root's alone."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.run(
        [*user, *HPML, *map(str, arguments)],
        env={**desk.environment, "HPML_HOME": str(desk.directory / "nobody")},
        cwd=desk.directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


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
    told = as_nobody(desk, "check", desk.job("wrong", command=["true"], resources=wrong))
    assert told.returncode == (2 if kinds == "nodes" else 5)  # partitions tell how many they have
    assert f"not checked against the cluster: it shows you {unseen}" in told.stdout
    assert "OK" not in told.stdout
    told = as_nobody(desk, "init")
    assert told.returncode == (0 if kinds == "nodes" else 4)
    assert "the cluster shows you no" in told.stdout + told.stderr
    assert (desk.directory / "hpml.toml").exists() == (kinds == "nodes")
    right = desk.job("right", command=["true"], resources={"time": "00:01:00"})
    told = as_nobody(desk, "submit", right)
    assert told.returncode == 0, told.stderr
    assert f"hpml: warning: not checked against the cluster: it shows you {unseen}" in told.stderr
    desk.slurm("scancel", told.stdout.split()[-1])


@pytest.mark.parametrize(("kinds", "owner"), [("none", "root"), ("jobs", "another user")])
def test_whose_job_it_is_that_cannot_be_cancelled(
    desk: Desk, hide: Hide, kinds: str, owner: str
) -> None:
    """The hint names the owner, as far as the cluster shows other users' jobs."""
    hide(kinds)
    file = desk.job("mine", command=["sleep", "600"], resources={"time": "00:05:00"})
    job = desk.json("submit", file)
    told = as_nobody(desk, "--records", desk.records, "cancel", job["id"])
    desk.hpml("cancel", job["id"])
    assert told.returncode == 4
    assert f"hint: the job belongs to {owner}: only its owner" in told.stderr
