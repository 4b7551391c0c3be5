"""`hpml topo --ranks`: where ranks would run on a machine, and wrong options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.topology import parse_list
from hpml_orchestrator.topology.recognise import parse_xml

if TYPE_CHECKING:
    from tests.unit.cli.support import Result, Shell

Hpml = Callable[..., "Result"]
MACHINES = Path(__file__).parents[1] / "topology" / "data"
SVG = "{http://www.w3.org/2000/svg}"
V100 = next(MACHINES.rglob("v100-sxm2-8gpu-2socket.txt"))


def test_every_rank_gets_its_gpu_and_cores_next_to_it(hpml: Hpml) -> None:
    """Eight V100: four on CPUs 0-23,48-71 and four on 24-47,72-95, as the file says."""
    told = hpml("topo", str(V100), "--ranks", "8", "--json").json()
    ranks = told["ranks"]
    assert [one["gpu"] for one in ranks] == [f"GPU{number}" for number in range(8)]
    assert [one["numa"] for one in ranks] == [[0]] * 4 + [[1]] * 4
    cpus = [set(parse_list(one["cpus"])) for one in ranks]
    first, second = set(parse_list("0-23,48-71")), set(parse_list("24-47,72-95"))
    assert all(mine <= first for mine in cpus[:4])
    assert all(mine <= second for mine in cpus[4:])
    assert sum(len(mine) for mine in cpus) == len(set().union(*cpus)) == 96
    assert told["warnings"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "numa"], "--policy: needs --ranks N"),
        (["--allowed-cpus", "0"], "--allowed-cpus: needs --ranks N or --plan JOB_FILE"),
        (["--ranks", "2", "--policy", "sockets"], "--policy: must be one of gpu-local, numa"),
        (["--ranks", "2", "--allowed-cpus", "a-b"], "--allowed-cpus: must be CPU numbers"),
        (["--ranks", "2", "--allowed-cpus", "900"], "--allowed-cpus: names none of the node's"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "2", "--svg", "no/x.svg"], "--svg: cannot be written"),
        (["--ranks", "2", "--plan", "job.yaml"], "--ranks: cannot be given together with --plan"),
        (["--plan", "job.yaml", "--policy", "numa"], "--policy: cannot be given together with"),
        (["--set", "resources.nodes=2"], "--set: needs --plan JOB_FILE"),
        (["--node", "n1"], "--node: needs --run RUN"),
        (["--run", "last"], "FILE: cannot be given together with --run"),
        (["--plan", "bad.yaml"], "script, module and command"),
    ],
)
def test_wrong_options_are_refused(
    shell: Shell, hpml: Hpml, words: list[str], message: str
) -> None:
    """With the option's name, what would be right, and exit status 2."""
    (shell.root / "bad.yaml").write_text("name: bad\n")
    result = hpml("topo", str(V100), *words)
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize("option", ["--policy", "--plan", "--allowed-cpus", "--run", "--node"])
def test_an_empty_option_is_refused(hpml: Hpml, option: str) -> None:
    """As by a variable of the shell that is not set; it is not as if the option were not there."""
    for given in ("", " "):
        told = hpml("topo", option, given, *(["--ranks", "2"] if option[2] in "pa" else []))
        assert (told.code, told.out) == (2, "")
        assert f"{option}: must not be empty" in told.err


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


def test_a_jobs_plan(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Ranks, ranks per GPU, loader workers and policy are those of the job file."""
    resources = {"gpus": 4, "ranks_per_gpu": 2, "cpus_per_rank": 4}
    job = shell.job("whole", resources=resources, binding={"policy": "numa", "loader_workers": 1})
    told = hpml("topo", quad, "--plan", job, "--json")
    assert told.code == 0, told.err
    ranks = told.json()["ranks"]
    assert [one["gpu"] for one in ranks] == ["GPU0", "GPU1", "GPU2", "GPU3"] * 2
    assert [one["cpus"] for one in ranks[:5]] == ["24-27", "16-19", "8-11", "0-3", "28-31"]
    assert {one["threads"] for one in ranks} == {3}
    assert told.json()["policy"] == "numa"
    assert told.json()["notes"] == []
    told = hpml("topo", quad, "--plan", job, "--set", "binding.policy=none", "--json")
    assert {one["cpus"] for one in told.json()["ranks"]} == {"0-31"}


def test_a_job_of_a_part_of_the_node(shell: Shell, hpml: Hpml, quad: str) -> None:
    """A note says which part the plan takes, since Slurm decides which the job gets.

    CPUs next to GPUs of other jobs are not taken, unless the job requests that many.
    """
    job = shell.job("part", resources={"gpus": 2, "cpus_per_rank": 4})
    told = hpml("topo", quad, "--plan", job)
    assert [line.split("\t")[1:3] for line in told.out.splitlines()[1:]] == [
        ["GPU0", "24-31"],
        ["GPU1", "16-23"],
    ]
    assert told.err.endswith(
        "note: the job requests 8 of 32 CPUs and 2 of 4 GPUs: Slurm decides which; "
        "this plan uses the CPUs next to no other GPU and the first 2 GPUs\n"
    )
    told = hpml("topo", quad, "--plan", job, "--set", "resources.cpus_per_rank=12")
    assert [line.split("\t")[2] for line in told.out.splitlines()[1:]] == [
        "8-15,24-31",
        "0-7,16-23",
    ]
    assert "this plan uses all CPUs and the first 2 GPUs\n" in told.err
    told = hpml("topo", quad, "--plan", job, "--allowed-cpus", "20-27", "--json").json()
    assert [one["cpus"] for one in told["ranks"]] == ["24-27", "20-23"]
    assert told["notes"] == [
        "the job requests 2 of 4 GPUs: Slurm decides which; this plan uses the first 2 GPUs"
    ]


def test_a_job_of_whole_nodes_has_no_note(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Nor is there one for a job without GPUs about the node's GPUs."""
    whole = shell.job("exclusive", resources={"gpus": 4, "exclusive": True})
    assert "note:" not in hpml("topo", quad, "--plan", whole).err
    cpus = shell.job("cpus", resources={"ranks_per_node": 4, "exclusive": True})
    told = hpml("topo", quad, "--plan", cpus, "--json").json()
    assert ([one["gpu"] for one in told["ranks"]], told["notes"]) == ([None] * 4, [])
    many = shell.job("many", resources={"gpus": 8, "exclusive": True})
    told = hpml("topo", quad, "--plan", many)
    assert "warning: the job requests 8 GPUs, and this node has 4\n" in told.err


def test_a_partition_of_whole_nodes_has_no_note_on_cpus(
    shell: Shell, hpml: Hpml, quad: str
) -> None:
    """Its jobs get all CPUs without asking; one of several partitions need not give whole nodes."""
    profile = shell.root / "whole.toml"
    profile.write_text(
        f"[partitions.whole]\ndefault = true\nexclusive = true\nnode_types = ['a']\n"
        f"[partitions.shared]\nnode_types = ['a']\n[node_types.a]\ntopology = '{quad}'\n"
    )

    def notes(**resources: object) -> list[str]:
        job = shell.job("at-whole", resources={"cpus_per_rank": 2, **resources})
        told = hpml("--site", str(profile), "topo", "--plan", job, "--json").json()
        found: list[str] = told["notes"]
        return found

    assert notes(gpus=4) == []
    (note,) = notes(gpus=2)
    assert "requests 2 of 4 GPUs: Slurm decides which" in note
    assert "8 of 32 CPUs" in notes(gpus=4, partition="shared")[0]
    assert "8 of 32 CPUs" in notes(gpus=4, partition="shared,whole")[0]
    with profile.open("a") as more:
        more.write("[directives.exclusive]\ndefault = ''\n")
    assert notes(gpus=4, partition="shared") == []


def test_the_site_profile_has_the_jobs_node(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Without FILE the plan is of the node type of the job's partition, else of this machine."""
    profile = shell.root / "cluster.toml"
    profile.write_text(
        f"[partitions.gpu]\ndefault = true\nnode_types = ['a']\n"
        f"[partitions.both]\nnode_types = ['a', 'b']\n"
        f"[partitions.dark]\nnode_types = ['c']\n"
        f"[node_types.a]\ntopology = '{quad}'\n[node_types.b]\ntopology = '{V100}'\n"
        f"[node_types.c]\n"
    )
    job = shell.job("sited", resources={"gpus": 4})
    told = hpml("--site", str(profile), "topo", "--plan", job, "--json").json()
    assert [one["cpus"] for one in told["ranks"]] == ["24-31", "16-23", "8-15", "0-7"]
    told = hpml("--site", str(profile), "topo", str(V100), "--plan", job, "--json").json()
    assert told["ranks"][0]["cpus"] == "0-5,48-53"  # the other GPUs' socket lends none
    shell.job("both", resources={"gpus": 4, "partition": "both"})
    told = hpml("--site", str(profile), "topo", "--plan", "both.yaml")
    assert told.code == 2
    assert "FILE: nodes of several kinds may run this job" in told.err
    shell.job("dark", resources={"partition": "dark"})
    told = hpml("--site", str(profile), "topo", "--plan", "dark.yaml")
    assert (told.code, "the plan is for this machine" in told.err) == (0, True)


def test_the_sites_topology_is_read_as_a_submission_does(
    shell: Shell, hpml: Hpml, quad: str
) -> None:
    """A bad file is an error of the profile's field; a rule may choose the partition."""
    profile = shell.root / "ruled.toml"
    kinds = (
        f"[partitions.gpu]\nnode_types = ['a']\n[partitions.old]\nnode_types = ['b']\n"
        f"[node_types.a]\ntopology = '{quad}'\n[node_types.b]\ntopology = 'dark.json'\n"
    )
    profile.write_text(kinds)
    job = shell.job("ruled", resources={"gpus": 4, "partition": "old"})
    here = hpml("topo", "--json").json()
    empty: dict[str, list[str]] = {"cores": [], "domains": [], "gpus": [], "nics": [], "links": []}
    for text, says in (("", "no such file"), (json.dumps({**here, **empty}), "describes no CPUs")):
        if text:
            (shell.root / "dark.json").write_text(text)
        told = hpml("--site", str(profile), "topo", "--plan", job)
        assert told.code == 2
        assert "node_types.b.topology: " in told.err
        assert says in told.err
        assert f"in {profile}" in told.err
    profile.write_text(f"{kinds}[directives.partition]\ndefault = 'gpu'\n")
    job = shell.job("ruled", resources={"gpus": 4})
    told = hpml("--site", str(profile), "topo", "--plan", job, "--json").json()
    assert [one["cpus"] for one in told["ranks"]] == ["24-31", "16-23", "8-15", "0-7"]


def test_a_distance_that_nobody_told_is_no_number(hpml: Hpml) -> None:
    """A matrix of nvidia-smi tells no distances: not in JSON, table or picture, nor one's own."""
    for more in (("--ranks", "1", "--policy", "spread"), ("--ranks", "8")):
        told = hpml("topo", str(V100), *more, "--json").json()
        assert {rank["distance"] for rank in told["ranks"]} == {None}
    assert "distance" not in hpml("topo", str(V100), "--ranks", "8", "--svg", "-").out
    rows = [line.split() for line in hpml("topo", str(V100), "--ranks", "8").out.splitlines()]
    assert {row[rows[0].index("DISTANCE")] for row in rows[1:]} == {"-"}
    assert hpml("topo", str(V100), "--json").json()["domains"][0]["distances"] == {}


def test_a_plan_as_a_picture(shell: Shell, hpml: Hpml, quad: str) -> None:
    """Each core has the number of its rank in it, and the table is printed all the same."""
    told = hpml("topo", quad, "--ranks", "4", "--svg", "plan.svg")
    assert told.out.startswith("RANK\tGPU\tCPUS")
    root = parse_xml((shell.root / "plan.svg").read_text())
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "quad.txt (nvidia-smi topo -m): plan of 4 ranks (gpu-local)" in words
    assert [words.count(str(rank)) for rank in range(4)] == [8 + 1 + 1] * 4  # cores, GPU, list
    assert "rank 0: GPU0" in words


def test_a_picture_to_standard_output(shell: Shell, hpml: Hpml, quad: str) -> None:
    """`--svg -` prints the picture and no table; JSON beside it is refused."""
    for words in ([quad], [quad, "--ranks", "4"]):
        told = hpml("topo", *words, "--svg", "-")
        assert told.code == 0
        assert parse_xml(told.out).tag == f"{SVG}svg"
    assert "warning: " in told.err
    assert not (shell.root / "-").exists()
    told = hpml("topo", quad, "--svg", "-", "--json")
    assert (told.code, told.out) == (2, "")
    assert "--json: cannot be given together with --svg -" in told.err
