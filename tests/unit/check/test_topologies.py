"""The topologies of the nodes that a job may land on, from the site profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.request import topologies_of
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.site.model import ResolvedSite, load_site
from hpml_orchestrator.topology.model import topology_json
from tests.unit.placement.machines import milan

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
