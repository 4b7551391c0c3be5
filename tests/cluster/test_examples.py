"""Examples of `hpml new` on a real Slurm of two nodes, started by srun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.hpml_on_slurm import PYTHON, Desk

# Name, job file, and arguments that make it short.
SHORT = {
    "communication": ("communication.yaml", ("--method=topk", "--target-accuracy=0.9")),
    "lm": ("lm.yaml", ("--steps=20", "--parallel=fsdp")),
    "trees": ("trees.yaml", ("--trees=200", "--epochs=1")),
    "mine": ("job.yaml", ("--steps=50",)),
}


@pytest.mark.parametrize("name", SHORT)
def test_an_example_trains_under_srun(name: str, desk: Desk, tmp_path: Path) -> None:
    """One rank on each of two nodes: they find each other, train, and report a result."""
    job_file, arguments = SHORT[name]
    desk.hpml("new", name, str(tmp_path / name))
    sets = ["--set=launcher=srun", f"--set=environment.python={PYTHON}"]
    sets += ["--set=resources.nodes=2", "--set=resources.ranks_per_node=1"]
    job = str(tmp_path / name / job_file)
    ran = json.loads(desk.hpml("run", "--json", job, *sets, "--", *arguments).stdout)
    assert ran["state"] == "COMPLETED"
    assert ran["summary"]["world_size"] == 2
    assert ran["summary"]["result"]
    nodes = [rank["node"] for rank in desk.json("show", ran["id"])["bindings"]]
    assert nodes == ["node1", "node2"]
