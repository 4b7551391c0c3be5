"""A script and the job made of it start the same program: both are run, by bash, and compared."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator import assets
from hpml_orchestrator.convert.draft import ImportContext, Imported, import_script
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.script.render import Capabilities, render
from tests.unit.convert import fakes
from tests.unit.convert.table import SAME
from tests.unit.local_runs import Desk

# What hpml sets itself, or Slurm, or bash; all else that the script's program got is compared.
OWN = re.compile(
    r"(SLURM|SRUN|HPML|FAKE|BASH|MASTER|PMI)_?\w*|WORLD_SIZE|RANK|LOCAL_RANK|PWD|OLDPWD|SHLVL|_|"
    r"PYTHONUNBUFFERED|CUDA_\w+|hpml_\w+|LINENO|NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME|"
    r"OMP_PROC_BIND"  # hpml binds the ranks
)
STUB = """\
# A fake of the frame around a job: it claims nothing, starts no agent and waits for nobody.
source {real}
hpml_begin() {{ hpml_submission=$PWD hpml_python=(true) hpml_bind=() hpml_unbound=(); }}
hpml_agents() {{ hpml_shield=() hpml_wait=60; }}
hpml_wait_ready() {{ :; }}
hpml_rendezvous() {{ export MASTER_ADDR=node1 MASTER_PORT=12345; }}
hpml_need_mpirun() {{ :; }}
hpml_module_init() {{ echo /dev/null; }}
hpml_agent=''
export HPML_JOB_KEY=slurm-4711 HPML_ATTEMPT_DIR={attempt} HPML_RUN_DIR={attempt}
"""
SHELL = """\
module() {{
  [ $1 = load ] || MODULES=''
  shift
  for name; do export MODULES="${{MODULES-}}:$name"; done
}}
conda() {{ if [ "$1" = info ]; then echo {root}; else export CONDA="$*"; fi; }}
scontrol() {{ echo node1; }}
uuidgen() {{ echo 12-34; }}
nvidia-smi() {{ :; }}
hostname() {{ echo node1; }}
"""


@dataclass(frozen=True)
class Allocation:
    """What sbatch would give by a header, of each node."""

    nodes: int
    cpus: int
    gpus: int
    memory: str
    environment: dict[str, str]


def number(text: str | None) -> int:
    return int((text or "0").rpartition(":")[2].partition("(")[0])


def sbatch(script: str, mark: str = "SBATCH") -> Allocation:
    """Read a header as sbatch does; only the options of the table."""
    parser = argparse.ArgumentParser(add_help=False)
    for names in (
        "-N --nodes", "-n --ntasks", "--ntasks-per-node", "-c --cpus-per-task", "--gres",
        "-G --gpus", "--gpus-per-node", "--gpus-per-task", "--mem", "--mem-per-cpu", "-a --array",
        "-J --job-name",
    ):  # fmt: skip
        parser.add_argument(*names.split())
    header = re.findall(rf"^#(?:{mark}) (.*)$", script, re.MULTILINE)
    words = [word for line in header for word in shlex.split(line, comments=True)]
    got = vars(parser.parse_known_args(words)[0])
    nodes, per_node = number(got["nodes"]) or 1, number(got["ntasks_per_node"])
    ntasks = number(got["ntasks"]) or per_node * nodes
    tasks = -(-ntasks // nodes) or 1
    each = max(map(number, (got["gres"], got["gpus_per_node"])))
    gpus = each or number(got["gpus"]) // nodes or number(got["gpus_per_task"]) * tasks
    cpus = tasks * (number(got["cpus_per_task"]) or 1)
    by_cpu = got["mem_per_cpu"] or ""
    memory = got["mem"] or (f"{int(by_cpu[:-1]) * cpus}{by_cpu[-1]}" if by_cpu else "")
    environment = {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NODELIST": "node1",
        "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node1",
        "SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_CPUS_ON_NODE": str(cpus), "SLURM_JOB_NAME": got["job_name"] or "job.sh",
    }  # fmt: skip
    given = {
        "SLURM_NTASKS": ntasks, "SLURM_NTASKS_PER_NODE": per_node, "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_CPUS_PER_TASK": number(got["cpus_per_task"]),
        "SLURM_GPUS_PER_NODE": number(got["gpus_per_node"]), "SLURM_GPUS": number(got["gpus"]),
    }  # fmt: skip
    environment |= {name: str(value) for name, value in given.items() if value}
    if got["array"]:
        environment |= {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "4711"}
    return Allocation(nodes, cpus, gpus, memory, environment)


class Cluster:
    """A directory with a project, fakes on PATH, and a shell that runs scripts there."""

    def __init__(self, root: Path) -> None:
        self.root, self.project = root, root / "proj"
        for name in ("bin", "proj/src", "proj/env/bin", "node/data", "etc/profile.d", "home"):
            (root / name).mkdir(parents=True, exist_ok=True)
        fakes.install(root / "bin")
        fakes.install(self.project)
        (root / "shell").write_text(SHELL.format(root=root))
        (root / "etc/profile.d/conda.sh").touch()
        (root / "bin/activate").write_text('conda activate "$1"\n')
        (self.project / "env/bin/activate").write_text("export VIRTUAL_ENV=here\n")
        (self.project / "env.sh").write_text("export FROM_FILE=1 LR=0.5\n")
        (self.project / "params.txt").write_text("first\nsecond\nthird\n")
        self.environment = {
            "PATH": f"{root}/bin:/usr/bin:/bin", "HOME": f"{root}/home", "USER": "ada",
            "SCRATCH": "/scratch/ada", "LANG": "C.UTF-8",
        }  # fmt: skip

    def context(self) -> ImportContext:
        return ImportContext(str(self.project), str(self.project), self.environment)

    def run(self, script: Path, directory: Path, given: Allocation) -> list[dict[str, Any]]:
        """Run a batch script; return what its programs got."""
        record = self.root / f"{script.parent.name}.record"
        own = {
            "FAKE_RECORD": str(record), "FAKE_RANKS": "1", "FAKE_NODES": "1",
            "TMPDIR": f"{self.root}/node", "BASH_ENV": f"{self.root}/shell",
            "SLURM_SUBMIT_DIR": str(directory),
        }  # fmt: skip
        done = subprocess.run(
            ["bash", str(script)],
            cwd=directory,
            env=self.environment | given.environment | own,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert record.exists(), done.stdout + done.stderr
        return [json.loads(line) for line in record.read_text().splitlines()]

    def run_imported(self, made: Imported) -> tuple[dict[str, Any], Allocation]:
        """Render a job file and run its batch script; return what the program got."""
        path = self.project / "job.yaml"
        path.write_text(made.text)
        job = load_job(str(path)).job
        assert job == made.job
        text = render(job, Capabilities(interpreter="/usr/bin/python3"))
        submission = self.root / "submission"
        submission.mkdir()
        (submission / "job.sh").write_text(text)
        real = assets.path("templates/sbatch/hpml-job.sh")
        stub = STUB.format(real=real, attempt=submission)
        (submission / "hpml-job.sh").write_text(stub)
        given = sbatch(text)
        return self.run(submission / "job.sh", submission, given)[-1], given


def program(got: dict[str, Any], project: Path) -> list[str]:
    """The program's words, a script in the project by its path."""
    words = [re.sub(r"^.*/", "", got["argv"][0]), *got["argv"][1:]]
    cwd = Path(got["cwd"])
    for place, word in enumerate(words[:3]):
        if word.endswith(".py"):
            words[place] = os.path.normpath(cwd / word)
            break
    return words


@pytest.mark.parametrize("name", SAME)
def test_the_job_starts_the_same_program(name: str, tmp_path: Path) -> None:
    """Words, directory, variables, ranks, nodes, CPUs, GPUs and memory are those of the script."""
    cluster = Cluster(tmp_path)
    script = tmp_path / "original" / "job.sh"
    script.parent.mkdir()
    script.write_text(SAME[name])
    given = sbatch(SAME[name])
    wanted = cluster.run(script, cluster.project, given)
    made = import_script(SAME[name], name="job.sh", context=cluster.context())
    got, asked = cluster.run_imported(made)
    # Of several programs the imported job starts the one before its last, too: in setup.
    same = [one for one in wanted if program(one, tmp_path) == program(got, tmp_path)]
    assert same, f"{[w['argv'] for w in wanted]} became {got['argv']}\n{made.text}"
    want = same[-1]
    assert got["cwd"] == want["cwd"]
    for variable in ("FAKE_RANKS", "FAKE_NODES"):
        assert got["env"][variable] == want["env"][variable], made.text
    if want["env"].get("FAKE_MPI"):
        assert got["env"]["FAKE_MPI"] == want["env"]["FAKE_MPI"]
    for variable, value in want["env"].items():
        if not OWN.fullmatch(variable):
            assert got["env"].get(variable) == value, (variable, made.text)
    given = sbatch(SAME[name], "SBATCH|GIVEN")  # with what the script's srun asks for
    lost = " ".join(f"{found.text} {found.why}" for found in made.notes)
    assert (asked.nodes, asked.gpus) == (given.nodes, given.gpus), made.text
    assert asked.cpus == given.cpus or f"ranks share {given.cpus} CPU" in lost
    assert megabytes(asked.memory) == megabytes(given.memory)


def megabytes(text: str) -> str:
    if not text:
        return ""
    value, unit = re.fullmatch(r"(\d+)([GMT]?)", text).groups()  # type: ignore[union-attr]
    return str(int(value) * {"": 1, "M": 1, "G": 1024, "T": 1024**2}[unit])


# Programs on data that the script copies to the node: `train.py OUT FILE…` writes what it found.
COPIES = {
    "staged": r"""
mkdir -p $LOCAL_SCRATCH/data $LOCAL_SCRATCH/out
cp -r set $LOCAL_SCRATCH/data/
tar -xf more.tar -C $LOCAL_SCRATCH/data
ls $LOCAL_SCRATCH/data
python train.py --output_dir=$LOCAL_SCRATCH/out $LOCAL_SCRATCH/data/set $LOCAL_SCRATCH/data/m.txt
cp -r $LOCAL_SCRATCH/out/. results/$SLURM_JOB_ID/
rm -rf $LOCAL_SCRATCH/data
""",
    "another directory, and all of its results by a pattern": r"""
WORK=$LOCAL_SCRATCH/work
mkdir -p $WORK/out
cp -r set $WORK/
cp c.txt $WORK/
cd $WORK
python $SLURM_SUBMIT_DIR/train.py --output_dir=$WORK/out $WORK/set c.txt
cp -r $WORK/out/* $SLURM_SUBMIT_DIR/results/
""",
    "paths from a directory on the node": r"""
mkdir -p ${LOCAL_SCRATCH}/job/out
cd ${LOCAL_SCRATCH}/job
cp $SLURM_SUBMIT_DIR/c.txt .
python $SLURM_SUBMIT_DIR/train.py --output_dir=out c.txt
cp out/found.txt $SLURM_SUBMIT_DIR/results/
cd $SLURM_SUBMIT_DIR
echo done
""",
    "data in the results' directory": r"""
OUT=$LOCAL_SCRATCH/out
mkdir -p $OUT
cp c.txt $OUT/
python train.py --output_dir=$OUT $OUT $OUT/c.txt
rsync -a $OUT results/
""",
    "a directory that no argument names": r"""
mkdir $LOCAL_SCRATCH/out
python train.py c.txt
mv $LOCAL_SCRATCH/out results/
""",
}
TRAIN = """\
import os, pathlib, sys
out = pathlib.Path(os.environ["LOCAL_SCRATCH"], "out")
if sys.argv[1].startswith("-"):
    out = pathlib.Path(sys.argv.pop(1).partition("=")[2])
found = [
    sorted(one.name for one in path.iterdir()) if path.is_dir() else path.read_text()
    for path in map(pathlib.Path, sys.argv[1:])
]
(out / "found.txt").write_text(str(found))
"""


@pytest.mark.parametrize("name", COPIES)
def test_copies_to_the_node_and_back_do_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program finds the same data, and its results come back, in a real job."""
    if "rsync" in COPIES[name] and not shutil.which("rsync"):
        pytest.skip("no rsync")
    desk = Desk(tmp_path)
    for directory in ("set", "node", "original", "results/4711"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "set/a.txt").write_text("a")
    (tmp_path / "c.txt").write_text("config")
    (tmp_path / "m.txt").write_text("more")
    subprocess.run(["tar", "-cf", "more.tar", "m.txt"], cwd=tmp_path, check=True)
    (tmp_path / "m.txt").unlink()
    (tmp_path / "train.py").write_text(TRAIN)
    header = "#!/bin/bash\n#SBATCH -c 1 --time=5\nset -e"
    (tmp_path / "job.sh").write_text(header + COPIES[name].replace("python", sys.executable))
    own = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(tmp_path)}
    own["LOCAL_SCRATCH"] = f"{tmp_path}/original"
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=os.environ | own, check=True, timeout=60)
    (wanted,) = (tmp_path / "results").rglob("found.txt")
    text = wanted.read_text()
    wanted.unlink()
    monkeypatch.setenv("LOCAL_SCRATCH", f"{tmp_path}/node")
    desk.hpml("import", "job.sh", "-o", "job.yaml")
    assert ("stage:" in (tmp_path / "job.yaml").read_text()) == (name == "staged")
    desk.hpml("run", "--local", "job.yaml")
    (found,) = (tmp_path / "results").rglob("found.txt")
    assert found.read_text() == text
