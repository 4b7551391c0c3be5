"""A topology file of the site profile that describes another machine than Slurm's is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.check.job import check_job
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.site.profile import topologies_of
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import ResolvedSite, load_site
from hpml_orchestrator.testing import FakeRunner
from hpml_orchestrator.topology.model import topology_json
from tests.unit.placement.machines import milan

if TYPE_CHECKING:
    from hpml_orchestrator.check.finding import Finding

PROFILE = '[partitions.gpu]\nnode_types = ["big"]\n[node_types.big]\ntopology = "big.json"\n'


@pytest.fixture
def site(tmp_path: Path) -> ResolvedSite:
    """A profile of one partition, whose nodes have a topology file."""
    (tmp_path / "site.toml").write_text(PROFILE)
    (tmp_path / "big.json").write_text(json.dumps(topology_json(milan())))
    return load_site([tmp_path / "site.toml"])


def job(tmp_path: Path, site: ResolvedSite | None, **resources: Any) -> Any:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\ncommand: ['true']\nresources: {json.dumps(resources)}\n")
    return load_job(path, [("launcher", "srun")], site)


PARTITION = (
    "PartitionName=gpu\n   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n"
    "   Default=YES QoS=N/A\n   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0\n"
    "   Nodes=n[1-2]\n   State=UP TotalCPUs=256 TotalNodes=2\n"
)
NODE = (
    "NodeName={} CoresPerSocket=64\n   CPUAlloc=0 CPUEfctv={} CPUTot={}\n   Gres={}\n"
    "   RealMemory=64000 Sockets=1\n   State=IDLE ThreadsPerCore={}\n   Partitions=gpu\n"
)


def compared(
    tmp_path: Path, site: ResolvedSite, node: tuple[str, int, int, str], **resources: Any
) -> list[Finding]:
    """What the check says of the profile's topology for a right node and another."""
    asked = job(tmp_path, site, partition="gpu", gpus=4, **{"exclusive": True, **resources}).job
    data = Path(__file__).parents[1] / "scheduler" / "slurm" / "data" / "25.11.7" / "config.txt"
    nodes = [("n1", 128, 2, "gpu:a100:4"), node]
    told = {
        "scontrol --all show config": data.read_text("utf-8"),
        "scontrol --all show partition": PARTITION,
        "scontrol --all show node": "\n".join(
            NODE.format(name, cpus, cpus, gres, threads) for name, cpus, threads, gres in nodes
        ),
        "scontrol --all show reservation": "No reservations in the system\n",
        "sacctmgr": "",
    }
    report = check_job(
        asked,
        backend="slurm",
        records=tmp_path,
        environment={"PATH": ""},
        run=FakeRunner({command: [Completed(0, text)] * 9 for command, text in told.items()}),
        site=site,
        topologies=topologies_of(asked, site),
    )
    assert not report.not_asked, report.not_asked
    return [one for one in report.findings if one.code == "site.topology"]


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (("n2", 64, 1, "gpu:a100:4"), "it has 128 CPUs, and n2 has 64 CPUs"),
        (("n2", 128, 2, "gpu:a100:8"), "it has 4 GPUs, and n2 has 8 GPUs"),
    ],
)
def test_a_topology_of_another_machine_is_an_error(
    tmp_path: Path, site: ResolvedSite, node: tuple[str, int, int, str], says: str
) -> None:
    """Unless the job cannot land on that node, or the launcher does not bind by it."""
    (found,) = compared(tmp_path, site, node)
    assert (found.level, found.field) == ("error", "node_types.big.topology")
    assert says in found.message
    assert f"{tmp_path}/big.json (named in {tmp_path}/site.toml)" in found.message
    assert compared(tmp_path, site, node, extra=["--exclude=n2"]) == []
    assert compared(tmp_path, site, node, exclusive=False) == []
