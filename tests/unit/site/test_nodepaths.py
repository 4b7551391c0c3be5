"""What shm and local stand for on this node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.site.nodepaths import node_paths

PROFILE = """
[paths]
ram = "/ram"
scratch = "$LOCAL_SCRATCH/stage"
[partitions.gpu]
node_types = ["big"]
[node_types.big]
scratch = "/nvme"
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "site.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return str(path)


def test_a_laptop_has_the_usual_places(tmp_path: Path) -> None:
    """As a job's script without a profile has them."""
    assert node_paths(tmp_path, {}, chosen="none")[:2] == ("/dev/shm", "/tmp")
    assert node_paths(tmp_path, {"TMPDIR": "/t"}, chosen="none").scratch == "/t"
    both = {"TMPDIR": "/t", "SLURM_TMPDIR": "/s"}
    assert node_paths(tmp_path, both, chosen="none").scratch == "/s"


def test_the_profile_counts(tmp_path: Path, profile: str) -> None:
    """With the job's variables and partition; outside of a job there is no such disk."""
    here = {"TMPDIR": "/t"}
    assert node_paths(tmp_path, here, chosen=profile)[:2] == ("/ram", "")
    job = {"LOCAL_SCRATCH": "/l/7"}
    assert node_paths(tmp_path, job, chosen=profile)[:2] == ("/ram", "/l/7/stage")
    gpu = {"SLURM_JOB_PARTITION": "gpu"}
    assert node_paths(tmp_path, gpu, chosen=profile)[:2] == ("/ram", "/nvme")


def test_a_projects_profile_is_found(tmp_path: Path) -> None:
    """The one beside where the command runs."""
    (tmp_path / "hpml.toml").write_text('[paths]\nscratch = "/nvme"\n', encoding="utf-8")
    assert node_paths(tmp_path, {"HOME": str(tmp_path)}).scratch == "/nvme"


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    """Is an error, as for every command."""
    with pytest.raises(NotFoundError):
        node_paths(tmp_path, {}, chosen=str(tmp_path / "none.toml"))


def test_the_sites_limits_are_told(tmp_path: Path) -> None:
    """With the number of nodes that share the job's; none without a profile."""
    path = tmp_path / "site.toml"
    path.write_text(
        "[staging]\nopens_per_second = 500\nopens_per_second_per_job = 800\n", encoding="utf-8"
    )
    assert node_paths(tmp_path, {}, chosen="none")[2:] == (0, 0, 1)
    assert node_paths(tmp_path, {}, chosen=str(path))[2:] == (500, 800, 1)
    assert node_paths(tmp_path, {"SLURM_NNODES": "4"}, chosen=str(path))[2:] == (500, 800, 4)
