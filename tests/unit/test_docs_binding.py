"""docs/binding.md shows the plans that hpml makes, and its picture is the one that it draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from hpml_orchestrator.cli.show import COLUMNS
from hpml_orchestrator.placement.planner import POLICIES, plan
from hpml_orchestrator.records.job import Verify
from hpml_orchestrator.topology.model import Topology
from hpml_orchestrator.topology.sysfs import read_topology
from tests.unit.placement.machines import dgx_a100, intel, mi250x, milan, two_by_twelve

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "binding.md").read_text("utf-8")
DGX = DOCS / "machines" / "dgx-a100.json"
USABLE = [cpu for cpu in range(64) if cpu % 8]
MACHINES: dict[str, tuple[Topology, int, list[int] | None]] = {
    "2 sockets of 8 cores with 2 threads, 4 GPUs": (intel((0, 0, 1, 1)), 4, None),
    "Milan with NPS4, 4 A100 in reversed order": (milan(), 4, None),
    "DGX A100, 8 domains": (dgx_a100(), 8, None),
    "MI250X, 8 devices, 56 of 64 cores usable": (mi250x(), 8, USABLE),
    "2 sockets of 12 cores, no GPU, 2 ranks": (two_by_twelve(), 2, None),
}


def rows(*header: str) -> list[list[str]]:
    """The cells of a table's rows."""
    table = PAGE.partition(f"| {' | '.join(header)} |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]


def test_the_table_has_the_plans_that_are_made() -> None:
    """GPUs and CPUs of each rank are the planner's, for every machine."""
    header = ("node", "GPU → NUMA", "CPUs of local rank 0, 1, …")
    table = rows(*header)[1:]
    assert [row[0] for row in table] == list(MACHINES)
    for name, gpus, cpus in table:
        topology, ranks, allowed = MACHINES[name]
        assert gpus == (",".join(str(gpu.domain) for gpu in topology.gpus) or "—")
        made = plan(topology, ranks, allowed_cpus=allowed)
        assert re.findall(r"`([^`]+)`", cpus) == [rank.cpu_list() for rank in made.ranks]


def test_policies_and_verify_are_told() -> None:
    """Every word of the job file's `binding` has its row."""
    told = [row[0].strip("`") for row in rows("policy", "what a rank gets")[1:]]
    assert sorted(told) == sorted(POLICIES)
    verify = [row[0].strip("`") for row in rows("verify", "when a rank is not bound as planned")]
    assert set(verify[1:]) == set(get_args(Verify))


def test_the_columns_of_show_are_told() -> None:
    """The page explains the columns that `hpml show` prints, no more and no less."""
    names = ", ".join(row[0] for row in rows("column", "meaning")[1:]).split(", ")
    assert tuple(names) == COLUMNS


def test_the_picture_is_current(tmp_path: Path) -> None:
    """`hpml topo docs/machines/dgx-a100.json --ranks 8 --svg docs/binding.svg` changes nothing."""
    assert read_topology(DGX) == dgx_a100()
    target = tmp_path / "binding.svg"
    hpml = Path(sys.executable).parent / "hpml"
    command = [str(hpml), "topo", str(DGX), "--ranks", "8", "--svg", str(target)]
    subprocess.run(command, env={**os.environ, "COLUMNS": "100"}, check=True, timeout=120)
    assert target.read_text("utf-8") == (DOCS / "binding.svg").read_text("utf-8")
