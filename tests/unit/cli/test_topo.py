"""`hpml topo`: a node as tables and JSON, and where ranks would run on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.topology.cpulist import parse_list
from tests.unit.cli.support import Hpml, Shell
from tests.unit.topology.machines import two_sockets, write_sysfs

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
    """The kernel's CPUs; a plan has none that this process may not use, and a note says so."""
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
        ("notes.txt", 2, "notes.txt: describes no machine"),
        ("cut.xml", 2, "cut.xml: the XML is cut off"),
        ("{v100} --policy numa", 2, "--policy: needs --ranks"),
        ("{v100} --ranks 2 --policy sockets", 2, "'sockets' is not one of 'gpu-local', "),
        ("{v100} --ranks 0", 2, "--ranks"),
        ("{v100} --ranks 2 --plan job.yaml", 2, "--ranks: cannot be given together with --plan"),
        ("{v100} --plan job.yaml --policy numa", 2, "--policy: cannot be given together with"),
        ("{v100} --set resources.nodes=2", 2, "--set: needs --plan"),
        ("{v100} --plan bad.yaml", 2, "script, module and command"),
        *((f"{option} {{empty}}", 2, "must not be empty") for option in ("--plan", "")),
    ],
)
def test_what_is_wrong(shell: Shell, hpml: Hpml, words: str, code: int, message: str) -> None:
    """One error, a status, and nothing on standard output."""
    (shell.root / "notes.txt").write_text("Remember the milk.\n")
    (shell.root / "cut.xml").write_text("<topology><object type='Machine'>\n")
    (shell.root / "bad.yaml").write_text("name: bad\n")
    places = {"{v100}": str(V100), "{empty}": " "}
    assert hpml("topo", *(places.get(word, word) for word in words.split())).refuses(code, message)


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
    """A note says which part is planned."""
    job = shell.job("part", resources={"gpus": 2, "cpus_per_rank": 4})
    shown = hpml("topo", quad, "--plan", job)
    cells = [line.split("\t")[1:3] for line in shown.out.splitlines()[1:]]
    assert cells == [["GPU0", "8-15,24-31"], ["GPU1", "0-7,16-23"]]
    assert shown.err.endswith(
        "note: the job requests 8 of 32 CPUs and 2 of 4 GPUs, and Slurm decides which: this plan "
        "uses the first GPUs and all CPUs\n"
    )
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
    assert topo(str(V100), gpus=4).json()["ranks"][0]["cpus"] == "0-5,24-29,48-53,72-77"
    assert topo(partition="both").refuses(2, "FILE: this job may run on several kinds of nodes: ")
    dark = topo(partition="dark")
    assert (dark.code, "the plan is for this machine" in dark.err) == (0, True)
    assert topo(partition="bad").refuses(2, "node_types.d.topology: ", f"in {profile}")
