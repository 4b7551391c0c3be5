"""A script for sbatch and the job made of it run the same on a real Slurm of two nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk, eventually

# What each process of a training finds. Outside of torchrun it asks Slurm, as such programs do.
TRAIN = """\
import json, os, sys

def find(name, of_slurm, alone):
    return os.environ.get(name, os.environ.get(of_slurm, alone))

record = {
    "argv": sys.argv[1:],
    "file": os.path.realpath(sys.argv[0]),
    "cwd": os.getcwd(),
    "rank": find("RANK", "SLURM_PROCID", "0"),
    "local": find("LOCAL_RANK", "SLURM_LOCALID", "0"),
    "world": find("WORLD_SIZE", "SLURM_NTASKS", "1"),
    "task": os.environ.get("SLURM_ARRAY_TASK_ID"),
    "variables": {name: os.environ.get(name) for name in ("NCCL_DEBUG", "GREETING", "OMITTED")},
}
name = f"{record['task'] or 0}-{record['rank']}.json"
path = os.path.join(os.environ["RECORDS_OF"], name)
with open(f"{path}.part", "w") as stream:
    json.dump(record, stream)
os.rename(f"{path}.part", path)
"""

SCRIPTS = {
    "torchrun": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --gres=gpu:2 --mem=1G --time=5
export NCCL_DEBUG=WARN
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
EPOCHS=3
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node=$SLURM_GPUS_ON_NODE \\
  --rdzv_id $SLURM_JOB_ID --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:29417 \\
  train.py --epochs $EPOCHS "two words" '$literal'
""",
    "srun": """\
#!/bin/bash
#SBATCH -N2 --tasks-per-node=2 --mem-per-cpu=200 -t 5
#SBATCH --export=ALL,GREETING=hello
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
OMITTED=1
cd sub
srun --label python ../train.py --ranks $SLURM_NTASKS
""",
    "single": """\
#!/bin/bash
#SBATCH --cpus-per-task=2 --mem=500M --time=5
set -e
GREETING="a 'b' c" python -u train.py --out=$HOME/x -- '{a,b}' "$(echo made by the shell)" > log.txt
""",
    "array": """\
#!/bin/bash
#SBATCH --array=1-3%2 --mem=500M --time=5
LRS=(0.3 0.2 0.1)
python train.py --seed $SLURM_ARRAY_TASK_ID --lr ${LRS[$SLURM_ARRAY_TASK_ID-1]}
""",
}
PROCESSES = {"torchrun": 4, "srun": 4, "single": 1, "array": 3}


@pytest.fixture(scope="module")
def jobs(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Desk]]:
    """Every script and every job made of one, submitted; they run side by side."""
    desks: dict[str, Desk] = {}
    submitted: list[str] = []
    for name, script in SCRIPTS.items():
        desk = Desk(slurm_cluster, tmp_path_factory.mktemp(name))
        (desk.directory / "train.py").write_text(TRAIN)
        (desk.directory / "sub").mkdir()
        (desk.directory / "job.sh").write_text(script)
        for kind in ("script", "job"):
            (desk.directory / kind).mkdir()
        desk.more["RECORDS_OF"] = str(desk.directory / "script")
        submitted.append(desk.call("sbatch", "--parsable", "job.sh").stdout.strip())
        desk.more["RECORDS_OF"] = str(desk.directory / "job")
        desk.hpml("import", "job.sh", "--output", "job.yaml")
        submitted.append(desk.json("submit", "job.yaml")["job_id"])
        desks[name] = desk
    yield desks
    slurm_cluster.run("scancel", *submitted)


def records(directory: Path, count: int) -> list[dict[str, Any]]:
    """What each process wrote down, once all have."""
    eventually(
        lambda: len(list(directory.glob("*.json"))) >= count,
        what=f"{count} records in {directory}",
    )
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_and_the_job_made_of_it_run_the_same(jobs: dict[str, Desk], name: str) -> None:
    """Every process finds the same program, arguments, directory, rank and variables."""
    desk = jobs[name]
    original = records(desk.directory / "script", PROCESSES[name])
    imported = records(desk.directory / "job", PROCESSES[name])
    assert len(original) == PROCESSES[name]
    assert imported == original
