"""The topologies that a site profile names: read where a job may land, told when wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.job import check_job
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.submit import render_job
from hpml_orchestrator.site.profile import topologies_of
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site_load import ResolvedSite, load_site
from hpml_orchestrator.topology.record import topology_json
from tests.unit.placement.machines import milan

POWER8 = Path(__file__).parents[1] / "topology" / "data" / "hwloc" / "power8gpudistances.xml"
PROFILE = (
    '[partitions.gpu]\nnode_types = ["big"]\n[partitions.old]\nnode_types = ["power"]\n'
    '[node_types.big]\ntopology = "big.json"\n[node_types.power]\ntopology = "power8.xml"\n'
)
JOB = 'name: a\ncommand: ["true"]\nlauncher: srun\n'


@pytest.fixture
def site(tmp_path: Path) -> ResolvedSite:
    """A profile of two partitions with one type of nodes each, and the files of both."""
    (tmp_path / "site.toml").write_text(PROFILE)
    (tmp_path / "big.json").write_text(json.dumps(topology_json(milan())))
    (tmp_path / "power8.xml").write_bytes(POWER8.read_bytes())
    return load_site([tmp_path / "site.toml"])


def job(tmp_path: Path, site: ResolvedSite | None, **resources: Any) -> Any:
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}resources: {json.dumps(resources)}\n")
    return load_job(path, [], site)


def test_only_those_that_the_job_may_land_on_are_read(tmp_path: Path, site: ResolvedSite) -> None:
    """A file of another partition may be anything; without a profile there are none."""
    (tmp_path / "power8.xml").write_text("<broken")
    found = topologies_of(job(tmp_path, site, partition="gpu").job, site)
    assert {name: len(one.cores) for name, one in found.items()} == {"big": 64}
    assert topologies_of(job(tmp_path, None, partition="gpu").job, None) == {}
    assert topologies_of(job(tmp_path, site, partition="none-such").job, site) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("<broken", "the XML is cut off"),
        ("{}", ""),
        ("", "is empty"),
    ],
)
def test_a_file_that_tells_nothing_is_an_error(
    tmp_path: Path, site: ResolvedSite, text: str | None, message: str
) -> None:
    """It names the file, the field, and the profile that the field is in."""
    path = tmp_path / "big.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError) as caught:
        render_job(job(tmp_path, site, partition="gpu"), site=site)
    assert caught.value.field == "node_types.big.topology"
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert f"in {tmp_path}/site.toml" in caught.value.hint


def test_a_script_binds_by_the_sites_file(tmp_path: Path, site: ResolvedSite) -> None:
    """From the profile's file to the option of srun; not for jobs of this machine."""
    whole = job(tmp_path, site, partition="gpu", gpus=4, exclusive=True)
    assert "--cpu-bind=map_ldom:3,2,1,0 " in render_job(whole, site=site).script
    assert "--cpu-bind=map_ldom" not in render_job(whole, site=site, here=True).script
    old = job(tmp_path, site, partition="old", gpus=4, exclusive=True)
    script = render_job(old, site=site).script
    assert "--cpu-bind=cores --distribution=block:block --cpus-per-task=4 " in script


def test_the_check_knows_the_sites_nodes(tmp_path: Path, site: ResolvedSite) -> None:
    """Domains come from the file, cores too."""
    asked = job(tmp_path, site, partition="gpu", ranks_per_node=6, cpus_per_rank=2)
    numa = asked.job.model_copy(
        update={"binding": asked.job.binding.model_copy(update={"policy": "numa"})}
    )
    report = check_job(
        numa,
        backend="slurm",
        records=tmp_path,
        environment={"PATH": ""},
        cluster_seconds=0.1,
        site=site,
        topologies=topologies_of(numa, site),
    )
    (found,) = [one for one in report.findings if one.code == "binding.units"]
    assert "node type big has 4 for 6 ranks" in found.message
