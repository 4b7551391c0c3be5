"""What shm and local stand for on this node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.jobs.nodepaths import node_paths

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
    assert node_paths(tmp_path, {}, chosen="none") == ("/dev/shm", "/tmp")
    assert node_paths(tmp_path, {"TMPDIR": "/t"}, chosen="none").scratch == "/t"
    both = {"TMPDIR": "/t", "SLURM_TMPDIR": "/s"}
    assert node_paths(tmp_path, both, chosen="none").scratch == "/s"


def test_the_profile_counts(tmp_path: Path, profile: str) -> None:
    """With the job's variables and partition; outside of a job there is no such disk."""
    here = {"TMPDIR": "/t"}
    assert node_paths(tmp_path, here, chosen=profile) == ("/ram", "")
    job = {"LOCAL_SCRATCH": "/l/7"}
    assert node_paths(tmp_path, job, chosen=profile) == ("/ram", "/l/7/stage")
    gpu = {"SLURM_JOB_PARTITION": "gpu"}
    assert node_paths(tmp_path, gpu, chosen=profile) == ("/ram", "/nvme")


def test_a_projects_profile_is_found(tmp_path: Path) -> None:
    """The one beside where the command runs."""
    (tmp_path / "hpml.toml").write_text('[paths]\nscratch = "/nvme"\n', encoding="utf-8")
    assert node_paths(tmp_path, {"HOME": str(tmp_path)}).scratch == "/nvme"


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    """Is an error, as for every command."""
    with pytest.raises(NotFoundError):
        node_paths(tmp_path, {}, chosen=str(tmp_path / "none.toml"))
