"""Binding on a real Slurm of two nodes that look like DGX A100s: plans, proof, and what breaks it.

The machine is virtual (deploy/devcluster): Slurm, hpml and its ranks are real, the 256 CPUs of a
node are not. The development cluster records each rank's affinity when it is set, and shows it
in /proc as the kernel would.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.hpml_on_slurm import MPIRUN_AS_ROOT, PYTHON, Desk

# Each GPU's NUMA domain, as binding.md's table has it for the DGX A100; each domain has 16 cores,
# whose second hardware threads are 128 higher.
GPU_DOMAINS = (3, 3, 1, 1, 7, 7, 5, 5)
# By hand: with policy numa both ranks of a domain share its 16 cores, the first gets the lower 8.
BY_HAND = (
    "48-55,176-183",
    "56-63,184-191",
    "16-23,144-151",
    "24-31,152-159",
    "112-119,240-247",
    "120-127,248-255",
    "80-87,208-215",
    "88-95,216-223",
)

DGX = Path(__file__).parents[2] / "docs/machines/dgx-a100.json"

# What each rank sees of itself; it lives for some seconds, or until it was looked at.
RANK = """\
import json, os, sys, time
child = os.fork()
if child == 0:
    seconds, _, wanted = sys.argv[2].partition(" until ")
    proof = os.path.expandvars("$HPML_ATTEMPT_DIR/binding/$SLURMD_NODENAME.proof.json")
    end, text = time.time() + float(seconds), ""
    while time.time() < end and not (wanted and wanted in text):
        time.sleep(0.1)
        text = open(proof).read() if os.path.exists(proof) else ""
    os._exit(0)
with open("/proc/self/status") as stream:
    cpus = [line.split()[1] for line in stream if line.startswith("Cpus_allowed_list")][0]
with open(f"/proc/{child}/status") as stream:
    of_child = [line.split()[1] for line in stream if line.startswith("Cpus_allowed_list")][0]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS",
         "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK")
record = {name: os.environ.get(name) for name in names}
record.update(cpus=cpus, of_child=of_child)
with open(os.path.join(sys.argv[1], record["RANK"] + ".json"), "w") as stream:
    json.dump(record, stream)
os.waitpid(child, 0)
"""
SECONDS = "2.5"
LOOKED_AT = '60 until "live": true'


@pytest.fixture(scope="module")
def dgx() -> Iterator[SlurmCluster]:
    """Two nodes like DGX A100s."""
    with booted("--nodes", "2", "--machine", "dgx-a100", "--no-accounting") as cluster:
        yield cluster


@pytest.fixture
def desk(dgx: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk with the program of the ranks, and a place for what they write."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "seen").mkdir()
    return Desk(dgx, tmp_path, dict(MPIRUN_AS_ROOT))


def needs(launcher: str) -> None:
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("NO MPIRUN TESTS: openmpi-bin is not installed")


def job(desk: Desk, launcher: str, **fields: Any) -> Path:
    """A job with all GPUs of both nodes, and half of the CPUs unless `fields` differ."""
    resources = {"nodes": 2, "gpus": 8, "cpus_per_rank": 32, "time": "5", "exclusive": True}
    resources |= fields.pop("resources", {})
    whole = {"command": rank_command(desk, SECONDS), "resources": resources, **fields}
    return desk.job(f"binding-{launcher}", launcher=launcher, **whole)


def rank_command(desk: Desk, seconds: str) -> list[str]:
    """The ranks' command."""
    return [PYTHON, str(desk.directory / "rank.py"), str(desk.directory / "seen"), seconds]


def seen(desk: Desk) -> list[dict[str, Any]]:
    """What the ranks wrote of themselves, by rank."""
    ranks = [json.loads(path.read_text()) for path in (desk.directory / "seen").glob("*.json")]
    return sorted(ranks, key=lambda rank: int(rank["RANK"]))


def proofs(desk: Desk) -> list[dict[str, Any]]:
    """The nodes' proofs of the last run, by node."""
    paths = sorted(desk.records.glob("runs/*/attempts/0/binding/*.proof.json"))
    return [json.loads(path.read_text()) for path in paths]


def bound(desk: Desk) -> list[dict[str, Any]]:
    """What each rank's hpml-bind wrote down."""
    paths = desk.records.glob("runs/*/attempts/0/binding/*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun"])
def test_every_rank_is_where_the_plan_says(desk: Desk, launcher: str) -> None:
    """Sixteen ranks on two nodes: /proc of each, the proof and the plan by hand are one."""
    needs(launcher)
    command, strict = rank_command(desk, LOOKED_AT), {"policy": "numa", "verify": "strict"}
    done = desk.hpml("run", job(desk, launcher, command=command, binding=strict))
    ranks = seen(desk)
    assert len(ranks) == 16
    for number, seen_by in enumerate(ranks):
        assert seen_by == {
            "RANK": str(number),
            "LOCAL_RANK": str(number % 8),
            "WORLD_SIZE": "16",
            "LOCAL_WORLD_SIZE": "8",
            "GROUP_RANK": str(number // 8),
            "OMP_NUM_THREADS": "8",
            "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
            "SLURMD_NODENAME": f"node{number // 8 + 1}",
            "SLURM_CPUS_PER_TASK": "256" if launcher == "torchrun" else "32",
            "cpus": BY_HAND[number % 8],
            "of_child": BY_HAND[number % 8],
        }
    assert [proof["node"] for proof in proofs(desk)] == ["node1", "node2"]
    for proof in proofs(desk):
        assert proof["looks"] >= 1
        for place, rank in enumerate(proof["ranks"]):
            assert (rank["live"], rank["wrong"]) == (True, [])
            assert (rank["cpus"], rank["cores"]) == (BY_HAND[place], 8)
            assert rank["numa"] == [GPU_DOMAINS[place]]
            assert rank["distance"] == 10
            assert rank["memory"] == f"prefer:{GPU_DOMAINS[place]}"
    assert "16 of 16 ranks" in done.stdout + done.stderr


def test_lent_cores_are_right(desk: Desk) -> None:
    """By default the domains without a GPU lend their cores; strict accepts that, too."""
    desk.hpml("run", job(desk, "srun", binding={"verify": "strict"}))
    for proof in proofs(desk):
        for place, rank in enumerate(proof["ranks"]):
            assert rank["wrong"] == []
            assert rank["cores"] == 16
            assert GPU_DOMAINS[place] in rank["numa"]
            assert rank["distance"] == 12  # of one socket's domains


def test_a_part_of_a_node(desk: Desk) -> None:
    """Where Slurm gives some of the CPUs, ranks get those nearest to their GPU of these alone."""
    resources = {"nodes": 1, "gpus": 4, "cpus_per_rank": 8, "exclusive": False}
    desk.hpml("run", job(desk, "srun", resources=resources, binding={"verify": "warn"}))
    (proof,) = proofs(desk)
    plan = next(desk.records.glob("runs/*/attempts/0/plan/node1.txt")).read_text()
    allowed = re.search(r" allowed=(\S+)", plan.splitlines()[0])
    assert allowed
    assert "256" not in allowed[1]
    assert [rank["cores"] for rank in proof["ranks"]] == [4, 4, 4, 4]
    assert all(rank["wrong"] == [] for rank in proof["ranks"])


@pytest.mark.parametrize("option", ["--hint=nomultithread", "--threads-per-core=1"])
def test_one_hardware_thread_per_core_as_slurm_is_asked(desk: Desk, option: str) -> None:
    """Slurm allocates whole cores, with both threads in the job's mask: ranks get the first."""
    resources = {"nodes": 1, "cpus_per_rank": 8, "extra": [option]}
    made = job(desk, "srun", resources=resources, binding={"policy": "numa", "verify": "strict"})
    desk.hpml("run", made)
    assert [rank["cpus"] for rank in seen(desk)] == [cpus.split(",")[0] for cpus in BY_HAND]
    plan = desk.json("topo", DGX, "--plan", made)
    assert [rank["cpus"] for rank in plan["ranks"]] == [cpus.split(",")[0] for cpus in BY_HAND]


def in_a_shell(desk: Desk, before: str) -> list[str]:
    """The ranks' command behind some words of a shell."""
    return ["bash", "-c", f'{before} "$@"', "rank", *rank_command(desk, "20")]


SABOTAGE = {
    "taskset": ('[[ $LOCAL_RANK != 3 ]] || exec taskset -c 24 "$@"; exec', "24"),
    "hidden": ("exec env CUDA_VISIBLE_DEVICES=0", "its list of visible devices is '0'"),
}


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("taskset", "srun"),
        ("hidden", "torchrun"),
        pytest.param("hidden", "srun", marks=pytest.mark.slow),
        pytest.param("taskset", "torchrun", marks=pytest.mark.slow),
        pytest.param("taskset", "mpirun", marks=pytest.mark.slow),
        pytest.param("hidden", "mpirun", marks=pytest.mark.slow),
    ],
)
def test_a_sabotaged_program_fails_in_strict_mode(desk: Desk, kind: str, launcher: str) -> None:
    """A program that narrows itself, or hides GPUs, is caught while it runs, and named."""
    needs(launcher)
    before, told = SABOTAGE[kind]
    strict = {"policy": "numa", "verify": "strict"}
    made = job(desk, launcher, command=in_a_shell(desk, before), binding=strict)
    done = desk.hpml("run", made, code=6)
    shown = desk.hpml("show", "last", code=None)
    wrong = {
        (proof["node"], rank["local_rank"])
        for proof in proofs(desk)
        for rank in proof["ranks"]
        if rank["wrong"]
    }
    ranks = {3} if kind == "taskset" else set(range(8))
    # the first node that is seen to be wrong ends the job, perhaps before the other has looked
    assert wrong <= {(node, rank) for node in ("node1", "node2") for rank in ranks}
    assert wrong >= {(min(wrong)[0], rank) for rank in ranks}
    assert told in shown.stdout
    assert "79" in done.stdout + done.stderr + shown.stdout


BY_SLURM = {
    # without --cpus-per-task, `cores` gives every task one core
    "one core": "--cpu-bind=cores",
    "another domain": "--cpu-bind=map_ldom:0,0,0,0,0,0,0,0",
    # on srun it means --exact: the step has fewer CPUs than the plan was made of
    "fewer CPUs": "--cpus-per-task=2 --cpu-bind=none",
}


@pytest.mark.parametrize("kind", BY_SLURM)
def test_a_launcher_that_binds_as_well_is_caught(desk: Desk, kind: str) -> None:
    """A script that was edited by hand: Slurm binds the tasks, and hpml-bind binds them again."""
    made = job(desk, "srun", binding={"verify": "strict"}, resources={"nodes": 1})
    directory = desk.directory / "by-hand"
    desk.hpml("render", made, "-o", directory)
    text = (directory / "job.sh").read_text()
    old = '"${hpml_unbound[@]}"'
    assert old in text, text
    (directory / "job.sh").write_text(text.replace(old, BY_SLURM[kind]))
    done = desk.call("sbatch", "--wait", "--output=job.out", "job.sh", cwd=directory, code=None)
    output = (directory / "job.out").read_text()
    assert done.returncode == 79, output
    assert "binding: 8 of 8 ranks WRONG" in output
    assert len(re.findall(r"^hpml: \d +node1 .* was bound twice: ", output, re.MULTILINE)) == 8


def test_a_job_that_is_only_warned_goes_on(desk: Desk) -> None:
    """With `warn`, the output and `hpml show` report the same fault; the job completes."""
    command = in_a_shell(desk, '[[ $LOCAL_RANK != 3 ]] || exec taskset -c 24 "$@"; exec')
    made = job(
        desk,
        "srun",
        command=[*command[:-1], LOOKED_AT],
        resources={"nodes": 1},
        binding={"policy": "numa", "verify": "warn"},
    )
    ran = desk.json("run", made)
    assert ran["state"] == "COMPLETED"
    shown = desk.hpml("show", ran["id"]).stdout
    assert "1 of 8 ranks WRONG" in shown
    logs = desk.hpml("logs", ran["id"]).stdout
    sentence = "runs on CPUs 24 alone, not on its own 24-31,152-159"
    assert logs.count(sentence) == 1, "reported while the ranks ran, and not again at the end"
    assert sentence in shown
