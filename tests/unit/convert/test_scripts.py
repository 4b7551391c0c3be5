"""Whole scripts become job files that ask for the same and run the same."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.convert import Imported, Place, import_script, read_script
from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.load import load_job

SCRIPTS = Path(__file__).parent / "scripts"
PLACE = Place(
    directory="/home/ada/proj",
    base="/home/ada/proj",
    environment={"HOME": "/home/ada", "USER": "ada", "SCRATCH": "/scratch/ada"},
)
Size = tuple[int, int, int, int, int | None]

# Read off the scripts by hand: nodes, ranks in all, and of each node CPUs, GPUs and memory in MiB
# (None: not asked for); the arguments of Python as each rank gets them.
CASES: dict[str, tuple[Size, str]] = {
    "accelerate": ((1, 4, 32, 4, 163840), "finetune.py --model gpt2 --output_dir out"),
    "apptainer": (
        (1, 1, 16, 2, None),
        (
            "exec --nv --bind /data,/scratch/ada:/work --env LANG=C images/torch.sif "
            "torchrun --standalone --nproc-per-node=gpu train.py --data /data/set"
        ),
    ),
    "array_grid": ((1, 1, 1, 1, None), "train.py --lr 1e-3 --seed 2 --out results/lr1e-3_s2"),
    "array_params": ((1, 1, 1, 0, None), "train.py --lr 0.01 second line"),
    "array_sweep": ((1, 1, 1, 1, None), "train.py --seed 2 --tag=run2"),
    "conda_modules": ((1, 1, 4, 0, 8192), "train.py --name 'two words'"),
    "cpu_only": ((1, 1, 16, 0, None), "work/fit.py --jobs 16 --data /scratch/ada/set.csv"),
    "deepspeed": (
        (2, 4, 12, 2, None),
        "pretrain.py --steps 1000 --deepspeed --deepspeed_config ds.json",
    ),
    "gres_mail": ((1, 4, 4, 4, None), "train.py"),
    "horovodrun": ((1, 4, 4, 4, None), "train_hvd.py --lr 0.1"),
    "lightning": ((2, 8, 32, 4, None), "train.py --trainer.devices 4 --trainer.num_nodes 2"),
    "megatron": (
        (2, 16, 64, 8, None),
        (
            "pretrain_gpt.py --num-layers 24 --hidden-size 1024 --data-path '/data/my text' "
            "--save /run"
        ),
    ),
    "memory_per_cpu": ((1, 8, 16, 0, 24000), "train.py"),
    "mpirun": ((2, 16, 16, 0, None), "solver.py --grid 512"),
    "pyxis": ((2, 16, 8, 8, None), "train.py --data /data"),
    "resumed": ((1, 1, 1, 2, None), "exec --nv image.sif python train.py --fresh"),
    "single_gpu": ((1, 1, 6, 1, 32000), "-m pkg.train --lr=1e-3"),
    "srun_ddp": ((2, 8, 32, 4, None), "main_ddp.py --batch-size 256 --amp"),
    "staging": (
        (1, 2, 4, 2, None),
        (
            "train.py --data=/staged/imagenet/train --vocab /staged/vocab "
            "--labels /staged/labels/labels.csv"
        ),
    ),
    "torchrun_two_nodes": (
        (2, 8, 32, 4, 491520),
        'train.py --data /data/imagenet --epochs 90 --out /run --note "it\'s ok"',
    ),
}
LAUNCHES = {
    "torchrun": r"^  (\S+ )?python\d? -m torch\.distributed\.run ",
    "srun": r"^hpml_run srun --nodes=.* --ntasks=.*\\\n.*--mpi=(none|pmix)",
    "mpirun": r"^  mpirun .*ppr:8:node",
    "horovodrun": r"horovodrun -np 4 -H localhost:4",
}


def imported(name: str) -> Imported:
    path = SCRIPTS / f"{name}.sh"
    return import_script(read_script(path), name=path.name, place=PLACE)


def test_every_script_has_an_expectation() -> None:
    """No script lies there untested."""
    assert sorted(path.stem for path in SCRIPTS.glob("*.sh")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_script_becomes_the_job_file_that_one_would_write(name: str, tmp_path: Path) -> None:
    """`NAME.expected` has the job file and, as comments, all findings; the text is the job."""
    made = imported(name)
    findings = [f"# {found.line} {found.kind}: {found.text}\n" for found in made.findings]
    assert made.text + "".join(findings) == (SCRIPTS / f"{name}.expected").read_text("utf-8")
    assert all(finding.why for finding in made.findings)
    (tmp_path / "job.yaml").write_text(made.text, encoding="utf-8")
    loaded, job = load_job(tmp_path / "job.yaml").job, Job.model_validate(made.job)
    for field in ("args", "command", "module", "resources", "environment"):
        assert field == "environment" or getattr(loaded, field) == getattr(job, field)
    assert loaded.environment.variables == job.environment.variables
    assert loaded.environment.setup == job.environment.setup
    assert [stage.name for stage in loaded.stage] == [stage.name for stage in job.stage]


def job_at_home(made: Imported) -> Job:
    """The job with its paths made absolute, as in the directory of the script."""
    job = Job.model_validate(made.job)
    workdir = str(Path(PLACE.base) / job.workdir)
    changes: dict[str, object] = {"workdir": workdir}
    if job.script is not None:
        changes["script"] = str(Path(workdir) / job.script)
    return job.model_copy(update=changes)


def directives(script: str) -> dict[str, str]:
    header = itertools.takewhile(lambda line: line.startswith("#"), script.split("\n"))
    found = (line.removeprefix("#SBATCH --").partition("=") for line in header if "SBATCH" in line)
    return {name: value for name, _, value in found}


def argv(script: str, setup: str, directory: Path) -> list[str]:
    """The program as bash makes it of the rendered script, started with a recording python."""
    words = script.rpartition('"${hpml_bind[@]}" \\\n')[2]
    (directory / "params.txt").write_text("first line\nsecond line\nthird line\n")
    shows = [(name, f'{name} "$@"') for name in ("python", "apptainer", "singularity")]
    for name, shown in (*shows, ("show", '"$@"')):
        (directory / name).write_text(f'#!/bin/bash\nprintf "%s\\0" {shown}\n')
        (directory / name).chmod(0o755)
    start = f'set -- {words}\nif [[ $1 == bash ]]; then "$@"; else show "$@"; fi'
    stages = ("imagenet", "vocab", "labels")
    done = subprocess.run(
        ["bash", "-c", f"{{ {setup or ':'}\n}} >/dev/null\n{start}"],
        env={
            "PATH": f"{directory}:/usr/bin:/bin",
            "TMPDIR": str(directory),
            "HPML_RUN_DIR": "/run",
            "SLURM_ARRAY_TASK_ID": "2",
            **{f"HPML_STAGE_{name.upper()}": f"/staged/{name}" for name in stages},
        },
        cwd=directory,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", CASES)
def test_the_rendered_script_asks_for_the_same_and_runs_the_same(name: str, tmp_path: Path) -> None:
    """Nodes, ranks, CPUs, GPUs, memory; launcher, program and arguments."""
    (nodes, ranks, cpus, gpus, memory), arguments = CASES[name]
    job = job_at_home(imported(name))
    script = render(job, Capabilities(interpreter="/usr/bin/python3"))
    asked = directives(script)
    assert int(asked["nodes"]) == nodes
    tasks = int(asked["ntasks-per-node"])
    assert int(asked["cpus-per-task"]) * tasks == cpus
    per_type = asked.get("gpus-per-node", "0").split(",")
    assert sum(int(gpu.split(":")[-1]) for gpu in per_type) == gpus
    assert asked.get("mem") == (None if memory is None else f"{memory}M")
    launched = re.search(r"--nproc-per-node=(\d+)", script)
    assert (int(launched[1]) if launched else tasks) * nodes == ranks
    assert re.search(LAUNCHES[job.launcher], script, re.MULTILINE)
    setup = (job.environment.setup or "").replace("export PATH=/opt/tool/bin:$PATH", "")
    _, *got = argv(script, setup, tmp_path)
    assert [word.removeprefix("/home/ada/proj/") for word in got] == shlex.split(arguments)
