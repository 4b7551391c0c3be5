"""Which site profile applies, and its directories on this node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.site.profile import node_paths

PATHS = """
[paths]
ram = "/ram"
scratch = "$LOCAL_SCRATCH/stage"
[staging]
opens_per_second = 500
opens_per_second_per_job = 800
[partitions.gpu]
node_types = ["big"]
[node_types.big]
scratch = "/nvme"
"""


@pytest.mark.parametrize(
    ("profile", "environment", "paths"),
    [
        ("none", {}, ("/dev/shm", "/tmp", 0, 0, 1)),
        ("none", {"TMPDIR": "/t"}, ("/dev/shm", "/t", 0, 0, 1)),
        ("none", {"TMPDIR": "/t", "SLURM_TMPDIR": "/s"}, ("/dev/shm", "/s", 0, 0, 1)),
        ("", {"TMPDIR": "/t"}, ("/ram", "", 500, 800, 1)),
        ("", {"LOCAL_SCRATCH": "/l/7", "SLURM_NNODES": "4"}, ("/ram", "/l/7/stage", 500, 800, 4)),
        ("", {"SLURM_JOB_PARTITION": "gpu"}, ("/ram", "/nvme", 500, 800, 1)),
    ],
)
def test_the_directories_of_this_node(
    tmp_path: Path, profile: str, environment: dict[str, str], paths: tuple[object, ...]
) -> None:
    """Those of the project's profile with the job's variables, else the usual ones."""
    (tmp_path / "hpml.toml").write_text(PATHS, encoding="utf-8")
    environment = {"HOME": str(tmp_path), **environment}
    assert node_paths(tmp_path, environment, chosen=profile) == paths
    with pytest.raises(NotFoundError):
        node_paths(tmp_path, environment, chosen=str(tmp_path / "none.toml"))
