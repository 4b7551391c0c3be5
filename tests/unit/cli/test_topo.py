"""`hpml topo`: a node as tables, JSON and a picture, and where ranks would run on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.cli.topopicture import boxes_of_places, boxes_of_plan, names, picture
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.runs.reporting.binding import RankLocation
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Core, Domain, Topology
from hpml_orchestrator.topology.recognise import parse_xml, read_topology
from tests.unit.cli.support import SVG, Hpml, Shell
from tests.unit.topology.machines import two_sockets, write_sysfs

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

DATA = Path(__file__).parents[1] / "topology" / "data"
H100 = DATA / "nvidia-smi/h100-hgx-8gpu-2socket.txt"
V100 = next(DATA.rglob("v100-sxm2-8gpu-2socket.txt"))
QUAD = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     NV4     NV4     24-31   3
GPU1    NV4      X      NV4     NV4     16-23   2
GPU2    NV4     NV4      X      NV4     8-15    1
GPU3    NV4     NV4     NV4      X      0-7     0
"""
"""Four GPUs in reversed order, each with a domain of 8 CPUs."""


@pytest.fixture
def quad(shell: Shell) -> str:
    """The file of a node with four GPUs."""
    (shell.root / "quad.txt").write_text(QUAD)
    return "quad.txt"


def texts(svg: str) -> list[str | None]:
    """The texts of a picture."""
    return [text.text for text in parse_xml(svg).iter(f"{SVG}text")]


def test_a_file_as_tables_and_json(hpml: Hpml) -> None:
    """Domains, GPUs and cards in a table each; in JSON everything that is known."""
    shown = hpml("topo", str(H100))
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0] == (
        "h100-hgx-8gpu-2socket.txt (nvidia-smi topo -m): 2 NUMA domains, 112 cores, 224 CPUs, "
        "8 GPUs, 12 network cards"
    )
    assert "1\t-\t56\t56-111,168-223\t-\tGPU4-7\tNIC6-11\t-" in lines
    assert "GPU5\t-\t1\t56-111,168-223\tPXB NIC9" in lines
    assert "NIC11\t-\t1" in lines
    assert "warning: Sockets and hardware threads are unknown" in shown.err
    document = hpml("topo", str(DATA / "hwloc/nvidiaDGX2.xml"), "--json").json()
    fields = {"index", "name", "address", "uuid", "parent", "domain", "cpus"}
    assert set(document["gpus"][15]) == fields
    assert document["source"] == "hwloc XML"
    assert document["domains"][1]["distances"] == {"0": 21, "1": 10}
    assert document["cores"][2] == {"number": 2, "socket": 1, "domain": 1, "cpus": "24"}


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
    machine, _ = two_sockets()
    write_sysfs(tmp_path, machine)
    ranks = hpml("topo", str(tmp_path), "--ranks", "3", "--json").json()["ranks"]
    assert [rank["gpu"] for rank in ranks] == [gpu.address for gpu in machine.gpus]
    assert shell.bash(f'"$@" < {H100}', "topo", "-", "--json").json()["source"].startswith("nvidia")
    assert shell.bash('"$@" <&-', "topo", "-").refuses(2, "standard input: is empty")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("none.xml", 3, "no such file: none.xml"),
        (".", 2, ".: is a directory without devices/system/cpu"),
        ("notes.txt", 2, "notes.txt: is not a topology in a known format"),
        ("cut.xml", 2, "cut.xml: the XML is cut off"),
        ("{v100} --svg notes.txt/x.svg", 2, "--svg: cannot be written"),
        ("{v100} --svg - --json", 2, "--json: cannot be given together with --svg -"),
        ("{v100} --policy numa", 2, "--policy: needs --ranks"),
        ("{v100} --allowed-cpus 0", 2, "--allowed-cpus: needs --ranks or --plan"),
        ("{v100} --ranks 2 --policy sockets", 2, "'sockets' is not one of 'gpu-local', "),
        ("{v100} --ranks 2 --allowed-cpus a-b", 2, "--allowed-cpus: must be a list of CPUs"),
        ("{v100} --ranks 2 --allowed-cpus 900", 2, "--allowed-cpus: contains none of the node's"),
        ("{v100} --ranks 0", 2, "--ranks"),
        ("{v100} --ranks 2 --plan job.yaml", 2, "--ranks: cannot be given together with --plan"),
        ("{v100} --plan job.yaml --policy numa", 2, "--policy: cannot be given together with"),
        ("{v100} --set resources.nodes=2", 2, "--set: needs --plan"),
        ("{v100} --node n1", 2, "--node: needs --run"),
        ("{v100} --run last", 2, "FILE: cannot be given together with --run"),
        ("{v100} --plan bad.yaml", 2, "script, module and command"),
        *((f"{option} {{empty}}", 2, "must not be empty") for option in ("--plan", "--run", "")),
    ],
)
def test_what_is_wrong(shell: Shell, hpml: Hpml, words: str, code: int, message: str) -> None:
    """One error, a status, and nothing on standard output."""
    (shell.root / "notes.txt").write_text("Remember the milk.\n")
    (shell.root / "cut.xml").write_text("<topology><object type='Machine'>\n")
    (shell.root / "bad.yaml").write_text("name: bad\n")
    places = {"{v100}": str(V100), "{empty}": " "}
    assert hpml("topo", *(places.get(word, word) for word in words.split())).refuses(code, message)


def test_a_picture(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Beside the table, or alone on standard output; a box per core, GPU and card."""
    file = str(DATA / "nccl/topo_16p1h.xml")
    assert hpml("topo", file, "--svg", "node.svg").out.startswith("topo_16p1h.xml")
    svg = (shell.root / "node.svg").read_text()
    kinds = [box.get("class") for box in parse_xml(svg).iter(f"{SVG}rect")]
    counts = {"page": 1, "socket": 1, "domain": 4, "core": 128, "gpu": 16, "nic": 8}
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    assert {"GPU15", "PIX mlx5_8"} <= set(texts(svg))
    words = texts(hpml("topo", quad, "--ranks", "4", "--svg", "-").out)
    assert "quad.txt (nvidia-smi topo -m): plan of 4 ranks (gpu-local)" in words
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
@pytest.mark.parametrize("file", ["hwloc/power8gpudistances.xml", "nvidia-smi/1gpu-numa1.txt"])
def test_nothing_in_a_picture_overlaps(file: str, ranks: str) -> None:
    """Boxes of a kind lie apart and on the page, and so do texts, in a font wider than usual."""
    machine = read_topology(DATA / file)
    cpus = sorted(machine.cpus)
    wrong = ("runs where it should not, and this is said at length " * 3,)
    places = [
        RankLocation(1000 + n, n, "n1", machine.gpus[0].name, format_list(cpus[n::5]), wrong=wrong)
        for n in range(6)
    ]
    boxes = {
        "none": [],
        "plan": boxes_of_plan(plan(machine, 3 * len(machine.devices), ranks_per_gpu=3)),
        "seen": boxes_of_places(places),
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
    """It shows how many share it; rows of numbers in names are drawn together."""
    machine = Topology(
        "", (Core(0, 0, 0, (0, 4)), Core(1, 0, 0, (1, 5))), (Domain(0, (0, 1, 4, 5)),)
    )
    places = [
        RankLocation(7, 0, "n", cpus="0"),
        RankLocation(8, 1, "n", cpus="1,5"),
        RankLocation(9, 2, "n", cpus="5"),
    ]
    words = texts(picture(machine, title="]]>&\x00", ranks=boxes_of_places(places)))
    assert (words.count("7"), words.count("x2"), words.count("8")) == (1, 1, 0)
    assert "ranks (several ranks share grey cores)" in words
    assert names(["GPU0", "GPU1", "GPU3", "a", "mlx5_9", "mlx5_10"]) == "GPU0-1 GPU3 a mlx5_9-10"
    assert names(["GPU01", "GPU02", "GPU2", "GPU2"]) == "GPU01 GPU02 GPU2 GPU2"


def test_ranks_get_a_gpu_and_cores_next_to_it(hpml: Hpml) -> None:
    """Eight V100: four on each socket's CPUs; nvidia-smi's matrix has no distances, so none is."""
    document = hpml("topo", str(V100), "--ranks", "8", "--json").json()
    ranks = document["ranks"]
    assert [rank["gpu"] for rank in ranks] == [f"GPU{number}" for number in range(8)]
    assert [rank["numa"] for rank in ranks] == [[0]] * 4 + [[1]] * 4
    assert {rank["distance"] for rank in ranks} == {None}
    cpus = [cpu for rank in ranks for cpu in parse_list(rank["cpus"])]
    assert sorted(cpus) == list(range(96))
    assert document["warnings"]
    assert "distance" not in hpml("topo", str(V100), "--ranks", "8", "--svg", "-").out


def plan_of(hpml: Hpml, *words: str) -> tuple[list[Any], list[str], list[str]]:
    """CPUs and notes of a plan, and its warnings."""
    planned = hpml(*words, "--json").json()
    return [rank["cpus"] for rank in planned["ranks"]], planned["notes"], planned["warnings"]


def test_a_jobs_plan(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Ranks, ranks per GPU, loader workers and policy are those of the job file."""
    resources = {"gpus": 4, "ranks_per_gpu": 2, "cpus_per_rank": 4}
    job = shell.job("whole", resources=resources, binding={"policy": "numa", "loader_workers": 1})
    planned = hpml("topo", quad, "--plan", job, "--json").json()
    assert [rank["gpu"] for rank in planned["ranks"]] == ["GPU0", "GPU1", "GPU2", "GPU3"] * 2
    assert {rank["threads"] for rank in planned["ranks"]} == {3}
    assert (planned["policy"], planned["notes"]) == ("numa", [])
    cpus, _, _ = plan_of(hpml, "topo", quad, "--plan", job, "--set", "binding.policy=none")
    assert set(cpus) == {"0-31"}


def test_a_job_of_a_part_of_the_node(shell: Shell, hpml: Hpml, quad: str) -> None:
    """A note names the planned part; CPUs next to other jobs' GPUs are left where possible."""
    job = shell.job("part", resources={"gpus": 2, "cpus_per_rank": 4})
    shown = hpml("topo", quad, "--plan", job)
    cells = [line.split("\t")[1:3] for line in shown.out.splitlines()[1:]]
    assert cells == [["GPU0", "24-31"], ["GPU1", "16-23"]]
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
        f"[node_types.a]\ntopology = '{quad}'\n[node_types.b]\ntopology = '{V100}'\n"
        f"[node_types.c]\n[node_types.d]\ntopology = 'nowhere.json'\n"
    )

    def topo(*words: str, **resources: object) -> Any:
        job = shell.job("sited", resources=resources)
        return hpml("--site", str(profile), "topo", *words, "--plan", job, "--json")

    cpus = [rank["cpus"] for rank in topo(gpus=4).json()["ranks"]]
    assert cpus == ["24-31", "16-23", "8-15", "0-7"]
    assert topo(str(V100), gpus=4).json()["ranks"][0]["cpus"] == "0-5,48-53"
    assert topo(partition="both").refuses(2, "FILE: this job may run on several kinds of nodes: ")
    dark = topo(partition="dark")
    assert (dark.code, "the plan is for this machine" in dark.err) == (0, True)
    assert topo(partition="bad").refuses(2, "node_types.d.topology: ", f"in {profile}")
