"""`hpml topo`: a node as tables, JSON and a picture, and where ranks would run on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.cli.topopicture import picture, ranks_of_places, ranks_of_plan
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.runs.reporting.summary import RankLocation
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Core, Domain, Topology, topology_json
from hpml_orchestrator.topology.sysfs import parse_xml, read_topology
from tests.unit.cli.support import SVG, Hpml, Shell
from tests.unit.placement.machines import node, threads
from tests.unit.topology.machines import hwloc_xml, two_sockets, write_sysfs

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

DATA = Path(__file__).parents[1] / "topology" / "data"
DGX = Path(__file__).parents[3] / "docs/machines/dgx-a100.json"


@pytest.fixture
def quad(shell: Shell) -> str:
    """The file of four GPUs in reversed order, each with a domain of 8 CPUs."""
    machine = node([(0, threads(8 * number, 8)) for number in range(4)], (3, 2, 1, 0))
    (shell.root / "quad.json").write_text(json.dumps(topology_json(machine)))
    return "quad.json"


def texts(svg: str) -> list[str | None]:
    """The texts of a picture."""
    return [text.text for text in parse_xml(svg).iter(f"{SVG}text")]


def test_a_file_as_tables_and_json(hpml: Hpml) -> None:
    """Domains, GPUs and cards in a table each; in JSON everything that is known."""
    shown = hpml("topo", str(DGX))
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0] == (
        "dgx-a100.json (by hand): 2 sockets, 8 NUMA domains, 128 cores, 256 CPUs, 8 GPUs, "
        "8 network cards"
    )
    assert (
        "3	0	16	48-63,176-191	64 GiB	GPU0-1	mlx5_0-1	0:12 1:12 2:12 3:10 4:32"
        in shown.out
    )
    assert "GPU5	0000:06:00.0	7	-	-" in lines
    assert "mlx5_7	-	5" in lines
    document = hpml("topo", str(DATA / "hwloc/nvidiaDGX2.xml"), "--json").json()
    fields = {"index", "name", "address", "uuid", "parent", "domain", "cpus"}
    assert set(document["gpus"][15]) == fields
    assert document["source"] == "hwloc XML"
    assert document["domains"][1]["distances"] == {"0": 21, "1": 10}
    assert document["cores"][2] == {"number": 2, "socket": 1, "domain": 1, "cpus": "24", "kind": ""}


def test_kinds_of_cores(shell: Shell, hpml: Hpml, quad: str) -> None:
    """A node whose cores differ has a line for it; the tables have no column of it."""
    document = json.loads((shell.root / quad).read_text())
    for core in document["cores"]:
        core["kind"] = "core" if core["number"] < 6 else "atom"
    (shell.root / quad).write_text(json.dumps(document))
    assert "kinds of cores: 6 core, 26 atom\n\nDOMAIN" in hpml("topo", quad).out


def test_this_node_and_the_cpus_that_a_process_may_use(shell: Shell, hpml: Hpml) -> None:
    """The kernel's CPUs; a plan has only those that this process may use, and a note reports it."""
    domains = hpml("topo", "--json").json()["domains"]
    count = sum(len(parse_list(domain["cpus"])) for domain in domains)
    assert count == os.sysconf("SC_NPROCESSORS_ONLN")
    last = str(max(os.sched_getaffinity(0)))
    words = ["topo", "--ranks", "2", "--policy", "spread", "--json"]
    bound = shell.bash(f'taskset --cpu-list {last} "$@"', *words)
    assert [rank["cpus"] for rank in bound.json()["ranks"]] == [last] * 2
    assert (f"note: this process may only use CPUs {last}\n" in bound.err) == (count > 1)


def test_a_copy_of_sys_and_standard_input(shell: Shell, hpml: Hpml, tmp_path: Path) -> None:
    """A directory that has /sys and /proc, as hwloc-gather-topology packs them, or a pipe."""
    machine = two_sockets()
    write_sysfs(tmp_path, machine)
    ranks = hpml("topo", str(tmp_path), "--ranks", "3", "--json").json()["ranks"]
    assert [rank["gpu"] for rank in ranks] == [gpu.address for gpu in machine.gpus]
    assert shell.bash(f'"$@" < {DGX}', "topo", "-", "--json").json()["source"] == "by hand"
    assert shell.bash('"$@" <&-', "topo", "-").refuses(2, "standard input: is empty")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("none.xml", 3, "no such file: none.xml"),
        (".", 2, ".: is a directory without devices/system/cpu"),
        ("notes.txt", 2, "notes.txt: is not a topology in a known format"),
        ("cut.xml", 2, "cut.xml: the XML is cut off"),
        ("{dgx} --svg notes.txt/x.svg", 2, "--svg: cannot be written"),
        ("{dgx} --svg - --json", 2, "--json: cannot be given together with --svg -"),
        ("{dgx} --policy numa", 2, "--policy: needs --ranks"),
        ("{dgx} --allowed-cpus 0", 2, "--allowed-cpus: needs --ranks or --plan"),
        ("{dgx} --ranks 2 --policy sockets", 2, "'sockets' is not one of 'gpu-local', "),
        ("{dgx} --ranks 2 --allowed-cpus a-b", 2, "--allowed-cpus: must be a list of CPUs"),
        ("{dgx} --ranks 2 --allowed-cpus 900", 2, "--allowed-cpus: contains none of the node's"),
        ("{dgx} --ranks 0", 2, "--ranks"),
        ("{dgx} --ranks 2 --plan job.yaml", 2, "--ranks: cannot be given together with --plan"),
        ("{dgx} --plan job.yaml --policy numa", 2, "--policy: cannot be given together with"),
        ("{dgx} --set resources.nodes=2", 2, "--set: needs --plan"),
        ("{dgx} --node n1", 2, "--node: needs --run"),
        ("{dgx} --run last", 2, "FILE: cannot be given together with --run"),
        ("{dgx} --plan bad.yaml", 2, "script, module and command"),
        *((f"{option} {{empty}}", 2, "must not be empty") for option in ("--plan", "--run", "")),
    ],
)
def test_what_is_wrong(shell: Shell, hpml: Hpml, words: str, code: int, message: str) -> None:
    """One error, a status, and nothing on standard output."""
    (shell.root / "notes.txt").write_text("Remember the milk.\n")
    (shell.root / "cut.xml").write_text("<topology><object type='Machine'>\n")
    (shell.root / "bad.yaml").write_text("name: bad\n")
    places = {"{dgx}": str(DGX), "{empty}": " "}
    assert hpml("topo", *(places.get(word, word) for word in words.split())).refuses(code, message)


def test_a_picture(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Beside the table, or alone on standard output; a box per core, GPU and card."""
    (shell.root / "node.xml").write_text(hwloc_xml(two_sockets()))
    assert hpml("topo", "node.xml", "--svg", "node.svg").out.startswith("node.xml (hwloc XML)")
    svg = (shell.root / "node.svg").read_text()
    kinds = [box.get("class") for box in parse_xml(svg).iter(f"{SVG}rect")]
    counts = {"page": 1, "socket": 2, "domain": 2, "core": 8, "gpu": 3, "nic": 1}
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    assert {"nvml2", "PIX mlx5_0"} <= set(texts(svg))
    words = texts(hpml("topo", quad, "--ranks", "4", "--svg", "-").out)
    assert "quad.json (by hand): plan of 4 ranks (gpu-local)" in words
    assert [words.count(str(rank)) for rank in range(4)] == [8 + 1] * 4  # cores, GPU
    assert "rank 0: GPU0" in words
    piped = shell.bash('"$@" 3>&1 >/dev/null | cat', "topo", quad, "--svg", "/dev/fd/3")
    assert piped.out.startswith("<svg")


def corners(root: ET.Element, kind: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of all boxes of a kind."""
    boxes = [
        tuple(float(box.get(name, "")) for name in ("x", "y", "width", "height"))
        for box in root.iter(f"{SVG}rect")
        if kind in box.get("class", "").split()
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in boxes]


def apart(boxes: list[tuple[float, float, float, float]], page: tuple[float, ...]) -> None:
    """No two boxes overlap, and all are on the page."""
    assert boxes
    for index, one in enumerate(boxes):
        assert one[0] >= 0 <= one[1]
        assert one[2] <= page[2]
        assert one[3] <= page[3]
        for two in boxes[index + 1 :]:
            assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


@pytest.mark.parametrize("ranks", ["none", "plan", "seen"])
@pytest.mark.parametrize("file", [DATA / "hwloc/power8gpudistances.xml", DGX])
def test_nothing_in_a_picture_overlaps(file: Path, ranks: str) -> None:
    """Boxes of a kind lie apart and on the page, and so do texts, in a font wider than usual."""
    machine = read_topology(file)
    cpus = sorted(machine.cpus)
    wrong = ("runs where it should not, and this is said at length " * 3,)
    places = [
        RankLocation(1000 + n, n, "n1", machine.gpus[0].name, format_list(cpus[n::5]), wrong=wrong)
        for n in range(6)
    ]
    boxes = {
        "none": [],
        "plan": ranks_of_plan(plan(machine, 3 * len(machine.devices), ranks_per_gpu=3)),
        "seen": ranks_of_places(places),
    }[ranks]
    root = parse_xml(picture(machine, title="a machine", ranks=boxes))
    (page,) = corners(root, "page")
    for kind in ("core", "gpu", "domain", "socket"):
        apart(corners(root, kind), page)
    lines = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(name, "")) for name in ("font-size", "x", "y"))
        long = 0.6 * size * len(text.text or "")
        x -= long / 2 if text.get("text-anchor") == "middle" else 0
        lines.append((x, y - size * 0.8, x + long, y + size * 0.2))
    apart(lines, page)


def test_a_core_of_several_ranks_is_grey() -> None:
    """It shows how many share it."""
    machine = Topology(
        "", (Core(0, 0, 0, (0, 4)), Core(1, 0, 0, (1, 5))), (Domain(0, (0, 1, 4, 5)),)
    )
    places = [
        RankLocation(7, 0, "n", cpus="0"),
        RankLocation(8, 1, "n", cpus="1,5"),
        RankLocation(9, 2, "n", cpus="5"),
    ]
    words = texts(picture(machine, title="]]>&\x00", ranks=ranks_of_places(places)))
    assert (words.count("7"), words.count("x2"), words.count("8")) == (1, 1, 0)
    assert "ranks (several ranks share grey cores)" in words


def plan_of(hpml: Hpml, *words: str) -> tuple[list[Any], list[str], list[str]]:
    """CPUs and notes of a plan, and its warnings."""
    planned = hpml(*words, "--json").json()
    return [rank["cpus"] for rank in planned["ranks"]], planned["notes"], planned["warnings"]


def test_a_jobs_plan(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Ranks, ranks per GPU, loader workers and policy are those of the job file."""
    resources = {"gpus": 4, "ranks_per_gpu": 2, "cpus_per_rank": 4}
    job = shell.job("whole", resources=resources, binding={"policy": "numa", "loader_workers": 1})
    planned = hpml("topo", quad, "--plan", job, "--json").json()
    assert [rank["gpu"] for rank in planned["ranks"]] == [
        f"0000:0{n}:00.0" for n in range(1, 5)
    ] * 2
    assert {rank["threads"] for rank in planned["ranks"]} == {3}
    assert (planned["policy"], planned["notes"]) == ("numa", [])
    cpus, _, _ = plan_of(hpml, "topo", quad, "--plan", job, "--set", "binding.policy=none")
    assert set(cpus) == {"0-31"}


def test_a_job_of_a_part_of_the_node(shell: Shell, hpml: Hpml, quad: str) -> None:
    """A note names the planned part; CPUs next to other jobs' GPUs are left where possible."""
    job = shell.job("part", resources={"gpus": 2, "cpus_per_rank": 4})
    shown = hpml("topo", quad, "--plan", job)
    cells = [line.split("\t")[1:3] for line in shown.out.splitlines()[1:]]
    assert cells == [["0000:01:00.0", "24-31"], ["0000:02:00.0", "16-23"]]
    assert shown.err.endswith(
        "note: the job requests 8 of 32 CPUs and 2 of 4 GPUs: Slurm decides which; this plan uses "
        "the CPUs not next to other jobs' GPUs and the first 2 GPUs\n"
    )
    words = ("topo", quad, "--plan", job)
    cpus, (note,), _ = plan_of(hpml, *words, "--set", "resources.cpus_per_rank=12")
    assert cpus == ["8-15,24-31", "0-7,16-23"]
    assert note.endswith("this plan uses all CPUs and the first 2 GPUs")
    cpus, notes, _ = plan_of(hpml, *words, "--allowed-cpus", "20-27")
    assert cpus == ["24-27", "20-23"]
    assert notes == [
        "the job requests 2 of 4 GPUs: Slurm decides which; this plan uses the first 2 GPUs"
    ]
    whole = shell.job("many", resources={"gpus": 8, "exclusive": True})
    _, notes, warnings = plan_of(hpml, "topo", quad, "--plan", whole)
    assert notes == []
    assert "the job requests 8 GPUs, and this node has 4" in warnings


def test_the_site_profile_has_the_jobs_node(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Without FILE the plan is for the node type of the job's partition, else for this machine."""
    profile = shell.root / "cluster.toml"
    profile.write_text(
        f"[partitions.gpu]\ndefault = true\nnode_types = ['a']\n"
        f"[partitions.both]\nnode_types = ['a', 'b']\n[partitions.dark]\nnode_types = ['c']\n"
        f"[partitions.bad]\nnode_types = ['d']\n"
        f"[node_types.a]\ntopology = '{quad}'\n[node_types.b]\ntopology = '{DGX}'\n"
        f"[node_types.c]\n[node_types.d]\ntopology = 'nowhere.json'\n"
    )

    def topo(*words: str, **resources: object) -> Any:
        job = shell.job("sited", resources=resources)
        return hpml("--site", str(profile), "topo", *words, "--plan", job, "--json")

    cpus = [rank["cpus"] for rank in topo(gpus=4).json()["ranks"]]
    assert cpus == ["24-31", "16-23", "8-15", "0-7"]
    assert topo(str(DGX), gpus=4).json()["ranks"][0]["cpus"].startswith("32-")
    assert topo(partition="both").refuses(2, "FILE: this job may run on several kinds of nodes: ")
    dark = topo(partition="dark")
    assert (dark.code, "the plan is for this machine" in dark.err) == (0, True)
    assert topo(partition="bad").refuses(2, "node_types.d.topology: ", f"in {profile}")
