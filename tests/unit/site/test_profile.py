"""Which profile counts: its directories on this node, and the topologies of its node types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.site.profile import node_paths, topologies_of
from hpml_orchestrator.spec.load import load_job
from hpml_orchestrator.spec.site import ResolvedSite, load_site
from hpml_orchestrator.topology.model import topology_json
from tests.unit.placement.machines import milan

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


PROFILE = (
    '[partitions.gpu]\nnode_types = ["big"]\n[partitions.old]\nnode_types = ["old"]\n'
    '[node_types.big]\ntopology = "big.json"\n[node_types.old]\ntopology = "old.xml"\n'
)


@pytest.fixture
def site(tmp_path: Path) -> ResolvedSite:
    """A profile of two partitions with one type of nodes each; one topology file is broken."""
    (tmp_path / "site.toml").write_text(PROFILE)
    (tmp_path / "big.json").write_text(json.dumps(topology_json(milan())))
    (tmp_path / "old.xml").write_text("<broken")
    return load_site([tmp_path / "site.toml"])


def job(tmp_path: Path, site: ResolvedSite | None, **resources: Any) -> Any:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\ncommand: ['true']\nresources: {json.dumps(resources)}\n")
    return load_job(path, [("launcher", "srun")], site)


def test_topologies_of_a_job(tmp_path: Path, site: ResolvedSite) -> None:
    """Only those of nodes that the job may land on are read."""
    found = topologies_of(job(tmp_path, site, partition="gpu").job, site)
    assert {name: len(topology.cores) for name, topology in found.items()} == {"big": 64}
    assert topologies_of(job(tmp_path, None, partition="gpu").job, None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("<broken", "the XML is cut off"), ("{}", ""), ("", "is empty")],
)
def test_a_wrong_topology_file_is_an_error(
    tmp_path: Path, site: ResolvedSite, text: str | None, message: str
) -> None:
    """It names the file, the field, and the profile that the field is in."""
    path = tmp_path / "big.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError) as caught:
        topologies_of(job(tmp_path, site, partition="gpu").job, site)
    assert caught.value.field == "node_types.big.topology"
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert f"in {tmp_path}/site.toml" in caught.value.hint
