"""`hpml bench` on this machine: from the job to the kept result, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.bench.job import BenchSize, Nodes, own_python, parse_nodes, size_of
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.scheduler.cluster import Cluster, ClusterLimits, Gres, Node, Partition
from tests.unit.local_runs import Desk


def bench(desk: Desk, *options: str) -> subprocess.CompletedProcess[str]:
    """Measure this machine, without PyTorch, so that the job is short."""
    (desk.root / "modules").mkdir(exist_ok=True)
    (desk.root / "modules" / "torch.py").write_text("raise ImportError")
    variables = json.dumps({"PYTHONPATH": str(desk.root / "modules")})
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("HPML", "SLURM"))}
    more = {"HPML_HOME": str(desk.root / "records"), "XDG_CONFIG_HOME": str(desk.root / "config")}
    argv = [sys.executable, "-m", "hpml_orchestrator.cli", "bench", "--local"]
    argv += ["--set", f"environment.variables={variables}", "--set", "resources.gpus=0", *options]
    return subprocess.run(
        argv,
        cwd=desk.root,
        env={**kept, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def status(node: Mapping[str, Any]) -> int:
    """Return the exit status that follows from a node; a part of a busy machine may be too late."""
    figures = node["figures"]
    if node["failed"] or any(figure["outlier"] for figure in figures):
        return 9
    return 6 if node["unclear"] else 0


def test_results_are_kept_and_compared(tmp_path: Path) -> None:
    """The fourth run has the first three as its history; nothing but the results is left."""
    desk = Desk(tmp_path)
    (tmp_path / "data").mkdir()
    done = bench(desk, "--shared", "data", "--json")
    first = json.loads(done.stdout)
    (made,) = first["nodes"]
    assert done.returncode == status(made), done.stderr
    desk.hpml("show", "last", code=3)  # the benchmark's run is the only one
    names = {figure["name"] for figure in made["figures"]}
    assert {"host.memory.domain0", "disk.read", "shared.opens", "shm.read"} <= names
    assert made["not_measured"] == {"matmul, all-reduce": "needs PyTorch"}
    assert (first["normal"], first["lost"]) == (False, [])
    assert made["unclear"]  # nothing to be compared with yet
    kept = Path(first["kept"])
    assert kept == tmp_path / "records" / "bench"
    assert list((tmp_path / "data").iterdir()) == []
    # As if the same node had been a thousand times as fast on three days, and nobody beside it.
    (path,) = kept.glob("*/*/*.json")
    record = json.loads(path.read_text())
    for figure in record["figures"].values():
        figure.update(value=figure["value"] * 1000, spread=0.0)
    path.unlink()
    for day in ("monday", "tuesday", "wednesday"):
        text = json.dumps({**record, "run": day, "load": 0.0})
        (path.parent / f"{day}.json").write_text(text)
    done = bench(desk, "--shared", "data", "--json")
    (again,) = json.loads(done.stdout)["nodes"]
    figures = again["figures"]
    assert made["failed"] or again["failed"] or {figure["name"] for figure in figures} == names
    for figure in figures:  # other processes may disturb this machine: then it accuses nobody
        assert figure["outlier"] == (None if figure["uncertain"] else "history"), figure
    assert done.returncode == status(again), done.stderr


# What a virtual machine measured while others used 62 % of its CPUs: 9 of 11 figures are uncertain.
DISTURBED: dict[str, Any] = json.loads(Path(__file__).with_name("disturbed.json").read_text())
PLAYER = """#!{python}
import os, sys
from pathlib import Path
if "--out" not in sys.argv:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
place = Path(sys.argv[sys.argv.index("--out") + 1])
place.mkdir(exist_ok=True)
(place / "vm.json").write_bytes(Path("{record}").read_bytes())
"""


def calm(share: float) -> dict[str, Any]:
    """Return the measurement without the other processes, with a share of each rate."""
    figures = {
        name: {**figure, "value": figure["value"] * share, "spread": 0.01}
        for name, figure in DISTURBED["figures"].items()
    }
    return {**DISTURBED, "load": 0.0, "figures": figures}


@pytest.mark.parametrize(
    ("earlier", "code", "says"),
    [
        ([DISTURBED] * 3, 6, "11 of 11 figures have nothing to be compared with yet"),
        ([DISTURBED, DISTURBED, calm(1)], 6, "hint: measure again: three certain runs"),
        ([DISTURBED, *[calm(1)] * 3], 9, "38% below the median of 3 earlier runs of this node"),
    ],
)
def test_a_calm_run_after_disturbed_ones(
    tmp_path: Path, earlier: Sequence[Mapping[str, Any]], code: int, says: str
) -> None:
    """It is an outlier only if three certain runs were faster; the disturbed ones do not count."""
    kept = tmp_path / "records" / "bench" / DISTURBED["type"] / DISTURBED["node"]
    kept.mkdir(parents=True)
    for day, record in enumerate(earlier):
        (kept / f"day{day}.json").write_text(json.dumps({**record, "run": f"day{day}"}))
    (tmp_path / "now.json").write_text(json.dumps({**calm(0.62), "complete": True}))
    player = tmp_path / "player"
    player.write_text(PLAYER.format(python=sys.executable, record=tmp_path / "now.json"))
    player.chmod(0o755)
    done = bench(Desk(tmp_path), "--set", f"environment.python={player}")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.slow
def test_without_a_place_for_results_it_still_judges(tmp_path: Path) -> None:
    """What cannot be kept is a warning; the table is printed and the status is that of the node."""
    desk = Desk(tmp_path)
    place = tmp_path / "records" / "bench"
    place.mkdir(parents=True)
    # The program is there already, and directories cannot be made where a file is.
    done = bench(desk)
    assert done.returncode in (0, 6, 9), done.stderr  # a busy machine is not normal
    (kind,) = [path for path in place.iterdir() if path.is_dir()]
    for path in kind.rglob("*.json"):
        path.unlink()
    (node,) = kind.iterdir()
    node.rmdir()
    node.write_text("in the way")
    done = bench(desk)
    assert done.returncode in (0, 6, 9), done.stderr  # a busy machine is not normal
    assert "warning: the results cannot be kept: " in done.stderr
    assert "shared file system opens\t" in done.stdout
    assert "kept in" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes: must be from 1 to 65536 (got '0')"),
        (["--nodes", ""], "--nodes: must be a number of nodes or their names (got '')"),
        (["--nodes", "node[1-"], "--nodes: is not a list of nodes (got 'node[1-')"),
        (["--nodes", "2"], "--nodes: with the local backend it measures this machine alone"),
        (["--nodes", "elsewhere"], "--nodes: with the local backend it measures this machine"),
        (["--shared", "missing"], "--shared: is not a directory (got 'missing')"),
        (["--set", "resources.cpus_per_rank=9999"], "resources.cpus_per_rank"),
        (["--set", "environment.venv=missing"], "environment.venv"),
        (["--set", "environment.python=missing-python", "--set", "name=x y"], "name"),
        (["--set", "resources.memroy=3"], "resources.memroy: unknown field"),
        (["--backend", "nowhere"], "--backend"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: Sequence[str], message: str) -> None:
    """Nothing is submitted; the error names option and value, and no job file: there is none."""
    done = bench(Desk(tmp_path), *options)
    assert done.returncode == 2, done.stderr
    assert "bench.yaml" not in done.stderr
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("records/submissions/*"))


def test_a_job_that_cannot_start_measures_nothing(tmp_path: Path) -> None:
    """A Python that is not there: status 6, and where to look."""
    done = bench(Desk(tmp_path), "--set", "environment.python=missing-python")
    assert done.returncode == 6, done.stderr
    assert "hint: hpml logs bench-" in done.stderr
    assert done.stdout == ""


# --- how large the job is


def cluster(*nodes: Node, **fields: Any) -> Cluster:
    """Return a cluster with the partitions main (default) and gpu."""
    names = tuple(node.name for node in nodes)
    partitions = (
        Partition(
            "main", default=True, nodes=tuple(n for n in names if n.startswith("n")), **fields
        ),
        Partition("gpu", nodes=tuple(n for n in names if n.startswith("g"))),
        Partition("all", nodes=names),
    )
    return Cluster(ClusterLimits(), partitions, nodes)


def gpu_node(name: str, count: int = 4, **fields: Any) -> Node:
    """Return a node with GPUs."""
    return Node(name, cpus=64, memory_mib=500_000, gres=(Gres("gpu", "h100", count),), **fields)


SMALL = [Node(f"n{index}", cpus=8, memory_mib=2000) for index in (1, 2, 3)]
MIXED = cluster(*SMALL, Node("n4", cpus=32, memory_mib=64_000), gpu_node("g1"), gpu_node("g2", 8))


@pytest.mark.parametrize(
    ("nodes", "partition", "expected"),
    [
        ("2", None, BenchSize(8, 0, 1800, exclude=("n4",))),
        ("n4", None, BenchSize(32, 0, 4096)),
        ("n1,n4", None, BenchSize(8, 0, 1800)),
        ("1", "gpu", BenchSize(64, 4, 20_480, exclude=("g2",))),
        ("g[1-2]", None, BenchSize(64, 4, 20_480, "gpu")),
        ("n1,g1", None, BenchSize(8, 0, 1800, "all")),
        ("g2", "gpu", BenchSize(64, 8, 36_864)),
        ("9", "nowhere", BenchSize()),
    ],
)
def test_the_job_asks_for_whole_nodes_of_one_kind(
    nodes: str, partition: str | None, expected: BenchSize
) -> None:
    """CPUs, GPUs and memory are those of the smallest node that may be measured."""
    assert size_of(parse_nodes(nodes), partition, MIXED) == expected


@pytest.mark.parametrize(
    ("nodes", "known", "message", "hint"),
    [
        (Nodes(1, ("n11",)), MIXED, "does not exist", "did you mean n1?"),
        (
            Nodes(2, ("n1", "g1")),
            Cluster(ClusterLimits(), MIXED.partitions[:2], MIXED.nodes),
            "none of the partitions has all of these nodes",
            "there are main and gpu",
        ),
        (Nodes(1), Cluster(ClusterLimits(), (), ()), "", ""),
    ],
)
def test_nodes_that_no_job_can_have(nodes: Nodes, known: Cluster, message: str, hint: str) -> None:
    """A name that is mistyped, and names that are in no partition together."""
    if not message:  # hidden from this user: the job is small, unless --set makes it larger
        assert size_of(nodes, None, known) == BenchSize()
        return
    with pytest.raises(InputError, match=message) as caught:
        size_of(nodes, None, known)
    assert caught.value.field == "--nodes"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("environment", "own"),
    [({}, True), ({"venv": "/v"}, False), ({"modules": ["a"]}, False), ({"python": "py"}, False)],
)
def test_the_software_that_measures(environment: dict[str, Any], own: bool) -> None:
    """Without software of the job or the site it is the Python of hpml itself."""
    job = Job.from_json({"name": "a", "command": ["true"], "environment": environment})
    assert bool(own_python(job)) is own
