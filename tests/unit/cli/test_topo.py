"""`hpml topo`: tables, JSON and a picture of this node or of a file."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.cli.topopicture import (
    RankBox,
    boxes_of_places,
    boxes_of_plan,
    names,
    picture,
)
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.runs.bound import Place
from hpml_orchestrator.topology import (
    Core,
    Domain,
    Gpu,
    Nic,
    Topology,
    format_list,
    parse_list,
    read_topology,
)
from hpml_orchestrator.topology.recognise import parse_xml
from tests.unit.cli.support import HPML
from tests.unit.topology.machines import two_sockets, write_sysfs

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

    from tests.unit.cli.support import Result, Shell

Hpml = Callable[..., "Result"]
DATA = Path(__file__).parents[1] / "topology" / "data"
H100 = DATA / "nvidia-smi/h100-hgx-8gpu-2socket.txt"
SVG = "{http://www.w3.org/2000/svg}"


def test_a_file_as_tables(hpml: Hpml) -> None:
    """Domains, GPUs and cards in a table each, separated by tabs where no terminal is."""
    told = hpml("topo", str(H100))
    assert told.code == 0
    lines = told.out.splitlines()
    assert lines[0] == (
        "h100-hgx-8gpu-2socket.txt (nvidia-smi topo -m): 2 NUMA domains, 112 cores, 224 CPUs, "
        "8 GPUs, 12 network cards"
    )
    assert "1\t-\t56\t56-111,168-223\t-\tGPU4-7\tNIC6-11\t-" in lines
    assert "GPU5\t-\t1\t56-111,168-223\tPXB NIC9" in lines
    assert "NIC11\t-\t1" in lines
    assert "warning: Sockets and hardware threads are unknown" in told.err


@pytest.mark.parametrize("encoding", ["ascii:strict"])
def test_a_name_that_is_no_text_is_shown_all_the_same(shell: Shell, encoding: str) -> None:
    """Linux allows any bytes in names; terminals, and JSON, do not."""
    name = b"odd\xff\xc3\xa9.txt"
    (shell.root / os.fsdecode(name)).write_bytes(H100.read_bytes())
    environment = {**shell.environment(), "PYTHONIOENCODING": encoding}
    for more in ([], ["--json"], ["--ranks", "4", "--json"]):
        done = subprocess.run(
            [HPML, "topo", name, *more],
            env=environment,
            cwd=shell.root,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert b"internal error" not in done.stderr
        if more:
            json.loads(done.stdout)
        else:
            assert b"12 network cards" in done.stdout


def test_standard_input_that_is_closed_or_too_large_is_refused(shell: Shell) -> None:
    """Both in one line; else `nvidia-smi topo -m | hpml topo -` needs no file."""
    piped = subprocess.run(
        [HPML, "topo", "-", "--json"],
        input=H100.read_bytes(),
        env=shell.environment(),
        capture_output=True,
        check=True,
    )
    assert b'"nvidia-smi topo -m"' in piped.stdout
    for feed, words in (
        ("{} topo - <&-", "standard input: is empty"),
        ("head -c 67108865 /dev/zero | {} topo -", "standard input: is larger than 64 MiB"),
    ):
        done = subprocess.run(
            ["bash", "-c", feed.format(HPML)],
            env=shell.environment(),
            cwd=shell.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_file_as_json(hpml: Hpml) -> None:
    """Everything that is known, sets of CPUs in the kernel's format."""
    told = hpml("topo", str(DATA / "hwloc/nvidiaDGX2.xml"), "--json").json()
    assert told["source"] == "hwloc XML"
    assert told["domains"][1] == {
        "number": 1,
        "cpus": "24-25",
        "memory_bytes": 811737923584,
        "distances": {"0": 21, "1": 10},
    }
    assert told["gpus"][15] == {
        "index": 15,
        "name": "nvml15",
        "address": "0000:e7:00.0",
        "uuid": "GPU-bb4648d3-e72b-4bac-a32f-4c9f3e4eb547",
        "parent": "",
        "domain": 1,
        "cpus": "24-25",
    }
    assert told["cores"][2] == {"number": 2, "socket": 1, "domain": 1, "cpus": "24"}
    assert (told["nics"], told["links"], told["warnings"]) == ([], [], [])


def test_this_node(hpml: Hpml) -> None:
    """Without a file the CPUs are those that the kernel has online."""
    told = hpml("topo", "--json").json()
    assert told["source"] == "sysfs"
    count = sum(
        int(part.split("-")[-1]) - int(part.split("-")[0]) + 1
        for domain in told["domains"]
        for part in domain["cpus"].split(",")
    )
    assert count == os.sysconf("SC_NPROCESSORS_ONLN")
    assert hpml("topo").out.startswith(os.uname().nodename)


def test_a_process_that_is_bound_is_planned_on_its_cpus(shell: Shell) -> None:
    """A plan for this node has no CPU that this process may not use, and a note tells so."""
    mine = sorted(os.sched_getaffinity(0))
    words = ["topo", "--ranks", "2", "--policy", "spread", "--json"]
    done = subprocess.run(
        ["taskset", "--cpu-list", str(mine[-1]), HPML, *words],
        env=shell.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [one["cpus"] for one in json.loads(done.stdout)["ranks"]] == [str(mine[-1])] * 2
    note = f"note: this process may use the CPUs {mine[-1]} only\n"
    assert (note in done.stderr) == (os.sysconf("SC_NPROCESSORS_ONLN") > 1)


@pytest.mark.parametrize("part", [".", "sys"])
def test_a_copy_of_sys_is_read(hpml: Hpml, tmp_path: Path, part: str) -> None:
    """A directory that has /sys and /proc, as hwloc-gather-topology packs them, or /sys alone."""
    machine, _ = two_sockets()
    write_sysfs(tmp_path, machine)
    told = hpml("topo", str(tmp_path / part), "--ranks", "3", "--json").json()
    assert [one["gpu"] for one in told["ranks"]] == [one.address for one in machine.gpus]
    for one, gpu in zip(told["ranks"], machine.gpus, strict=True):
        assert set(parse_list(one["cpus"])) <= set(machine.cpus(gpu.domain))
        assert one["gpu_uuid"] == gpu.uuid


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none.xml"], 3, "no such file: none.xml"),
        ([""], 2, "FILE: must name a file (got '')"),
        ([str(H100), "--svg", ""], 2, "--svg: must not be empty"),
        (["."], 2, ".: is a directory without devices/system/cpu"),
        (["notes.txt"], 2, "notes.txt: describes no machine in a format that hpml knows"),
        (["cut.xml"], 2, "cut.xml: the XML is cut off"),
        ([str(H100), "--svg", "notes.txt/x.svg"], 2, "--svg: cannot be written"),
    ],
)
def test_what_is_wrong_is_told(
    shell: Shell, hpml: Hpml, words: list[str], code: int, message: str
) -> None:
    """One line and an exit status; nothing on standard output."""
    (shell.root / "notes.txt").write_text("Remember the milk.\n")
    (shell.root / "cut.xml").write_text("<topology><object type='Machine'>\n")
    told = hpml("topo", *words)
    assert (told.code, told.out) == (code, "")
    assert message in told.err
    assert "Traceback" not in told.err


def test_a_picture_is_written(shell: Shell, hpml: Hpml) -> None:
    """Beside the table; its file is XML with a box per core, GPU and card."""
    told = hpml("topo", str(DATA / "nccl/topo_16p1h.xml"), "--svg", "node.svg")
    assert told.code == 0
    root = parse_xml((shell.root / "node.svg").read_text())
    kinds = [box.get("class") for box in root.iter(f"{SVG}rect")]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "page": 1,
        "socket": 1,
        "domain": 4,
        "core": 128,
        "gpu": 16,
        "nic": 8,
    }
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "GPU15" in words
    assert "PIX mlx5_8" in words


def test_a_picture_that_finds_no_room_leaves_the_one_before(shell: Shell) -> None:
    """A file size limit stands for a full disk; nothing new lies beside it either."""
    picture_file = shell.root / "node.svg"
    picture_file.write_text("the one before\n")
    before = sorted(os.listdir(shell.root))
    limited = f"ulimit -f 1; trap '' XFSZ; exec {sys.executable} -m hpml_orchestrator.cli"
    done = subprocess.run(
        ["bash", "-c", f'{limited} topo "$@"', "topo", H100, "--svg", "node.svg"],
        cwd=shell.root,
        env=shell.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--svg: cannot be written: File too large" in done.stderr
    assert picture_file.read_text() == "the one before\n"
    assert sorted(os.listdir(shell.root)) == before


def test_a_picture_through_a_link_and_over_a_file(shell: Shell, hpml: Hpml) -> None:
    """The link stays a link, and the file's mode is kept."""
    (shell.root / "far").mkdir()
    there = shell.root / "far" / "node.svg"
    there.write_text("old")
    there.chmod(0o640)
    (shell.root / "link.svg").symlink_to("far/node.svg")
    assert hpml("topo", str(H100), "--svg", "link.svg").code == 0
    assert (shell.root / "link.svg").is_symlink()
    assert there.read_text().startswith("<svg")
    assert there.stat().st_mode & 0o777 == 0o640
    assert os.listdir(shell.root / "far") == ["node.svg"]


@pytest.mark.parametrize(
    ("path", "script"), [("/dev/stdout", '"$@" | cat'), ("/dev/fd/3", '"$@" 3>&1 >/dev/null | cat')]
)
def test_a_picture_to_a_pipe(shell: Shell, path: str, script: str) -> None:
    """As `>(rsvg-convert …)` and `| less` give one: it has no name beside which to write."""
    words = [sys.executable, "-m", "hpml_orchestrator.cli", "topo", str(H100), "--svg", path]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, "topo", *words],
        cwd=shell.root,
        env=shell.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<svg")
    assert "</svg>" in done.stdout


def odd_machine() -> Topology:
    """Sixteen domains of 9 cores in two sockets, memory alone, and devices of no domain."""
    cores = [
        Core(n, n // 72, n // 9, tuple(n + 144 * thread for thread in range(4))) for n in range(144)
    ]
    domains = [
        Domain(
            number,
            tuple(cpu for core in cores if core.domain == number for cpu in core.cpus),
            2**40,
            tuple((other, 10 if other == number else 32) for other in range(17)),
        )
        for number in range(16)
    ]
    gpus = [Gpu(n, f"GPU{n} MIG 1g.10gb+me 0<&>", f"0000:{n:02x}:00.0", domain=n) for n in range(6)]
    gpus += [Gpu(6, "GPU6", "0000:f0:00.0"), Gpu(7, "GPU7", domain=3)]
    nics = [Nic(f"mlx5_bond_with_a_long_name_{n}", "", n or None) for n in range(3)]
    return Topology(
        "sysfs", tuple(cores), (*domains, Domain(16, (), 2**36)), tuple(gpus), tuple(nics)
    )


def boxes(root: ET.Element, kinds: set[str]) -> Iterator[tuple[float, float, float, float]]:
    for box in root.iter(f"{SVG}rect"):
        if box.get("class", "").split()[0] in kinds:
            x, y = float(box.get("x", "")), float(box.get("y", ""))
            yield x, y, x + float(box.get("width", "")), y + float(box.get("height", ""))


def drawn(machine: Topology, how: str) -> list[RankBox]:
    """Three ranks for each GPU by a plan, or six ranks that run anywhere."""
    if how == "no ranks":
        return []
    if how == "a plan":
        return boxes_of_plan(plan(machine, 3 * len(machine.devices) or 5, ranks_per_gpu=3))
    cpus = sorted(machine.cpus)
    return boxes_of_places(
        [
            Place(
                1000 + number,
                number,
                "n1",
                machine.gpus[0].name if machine.gpus else None,
                format_list(cpus[number::5] + cpus[:3]),
                nic="mlx5_0",
                right=not number % 2,
                wrong=("runs where it should not, and this is told at length " * 3,),
            )
            for number in range(6)
        ]
    )


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


DRAWN = ["hwloc/power8gpudistances.xml", "nccl/topo_16p1h.xml", "nvidia-smi/1gpu-numa1.txt"]


@pytest.mark.parametrize("ranks", ["no ranks", "a plan", "seen"])
@pytest.mark.parametrize(
    "machine",
    [odd_machine(), *(read_topology(DATA / name) for name in DRAWN)],
    ids=["odd", *DRAWN],
)
def test_nothing_in_a_picture_overlaps(machine: Topology, ranks: str) -> None:
    """Boxes of a kind lie apart and on the sheet, texts are apart, by a font wider than usual."""
    root = parse_xml(picture(machine, title="a machine", ranks=drawn(machine, ranks)))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for kinds in ({"core", "gpu", "nic"}, {"domain", "gpu", "nic"}, {"socket", "gpu", "nic"}):
        found = list(boxes(root, kinds))
        for index, one in enumerate(found):
            assert one[0] >= 0 <= one[1] and one[2] <= width and one[3] <= height  # noqa: PT018
            assert not any(overlap(one, other) for other in found[index + 1 :])
    texts = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(name, "")) for name in ("font-size", "x", "y"))
        long = 0.6 * size * len(text.text or "")
        x -= long / 2 if text.get("text-anchor") == "middle" else 0
        texts.append((x, y - size * 0.8, x + long, y + size * 0.2))
    for index, one in enumerate(texts):
        assert one[2] <= width
        assert not any(overlap(one, other) for other in texts[index + 1 :]), one
    cores = list(boxes(root, {"core"}))
    for one in boxes(root, {"rank"}):
        assert one[0] >= 0 and one[2] <= width and one[3] <= height  # noqa: PT018
        for core in cores:
            inside = core[0] <= one[0] and one[2] <= core[2] and core[1] <= one[1] <= core[3]
            assert inside or not overlap(one, core)
    homes = list(boxes(root, {"domain"}))
    for one in boxes(root, {"core"}):
        assert any(
            home[0] <= one[0] and one[2] <= home[2] and home[1] <= one[1] and one[3] <= home[3]
            for home in homes
        )


def test_a_core_of_several_ranks_is_nobodys() -> None:
    """Shared cores say how many share them; CPUs of different ranks are parts of their core."""
    machine = Topology(
        "", (Core(0, 0, 0, (0, 4)), Core(1, 0, 0, (1, 5))), (Domain(0, (0, 1, 4, 5)),)
    )
    boxes_of = [RankBox("7", cpus=(0, 1)), RankBox("8", cpus=(1, 4, 5)), RankBox("9", cpus=(5,))]
    root = parse_xml(picture(machine, title="", ranks=boxes_of))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("x2") == 2  # CPUs 1 and 5, parts of the second core
    assert (words.count("7"), words.count("8"), words.count("9")) == (1 + 1, 1 + 1, 1)
    assert "ranks (several ranks share grey cores)" in words


def test_names_in_a_picture_are_text() -> None:
    """Whatever a file calls its devices, the picture stays XML."""
    machine = dataclasses.replace(odd_machine(), gpus=(Gpu(0, "<script>\x01&", domain=0),))
    root = parse_xml(picture(machine, title="]]>&\x00"))
    assert any("<script>\ufffd&" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_rows_of_names_are_drawn_together() -> None:
    """Numbers that follow one another; others stand alone."""
    assert names(["GPU0", "GPU1", "GPU3", "a", "mlx5_9", "mlx5_10"]) == "GPU0-1 GPU3 a mlx5_9-10"
    assert names(["GPU01", "GPU02", "GPU2", "GPU2"]) == "GPU01 GPU02 GPU2 GPU2"
    assert names([]) == ""


def test_help_reads_no_file() -> None:
    """Parsers and pictures are imported where they are needed."""
    code = (
        "import sys; from hpml_orchestrator.cli.main import app; "
        "print([m for m in sys.modules if 'topology' in m or 'topopicture' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
