"""What each script of `scripts/` becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Expected:
    """A script's job.

    Attributes:
        job: the fields of the job file.
        size: nodes, ranks in all, and of each node CPUs, GPUs and memory in MiB (None: not asked).
        argv: the program as each rank gets it.
        lost: line and text of what is not carried over.
        changed: line and text of what is carried over in another way.
    """

    job: dict[str, Any]
    size: tuple[int, int, int, int, int | None]
    argv: list[str]
    lost: set[tuple[int, str]] = field(default_factory=set)
    changed: set[tuple[int, str]] = field(default_factory=set)


EXPECTED = {
    "accelerate": Expected(
        {
            "name": "llm-tune",
            "script": "finetune.py",
            "args": ["--model", "gpt2", "--output_dir", "out"],
            "resources": {"gpus": 4, "cpus_per_rank": 8, "memory": "160G", "time": "02:00:00"},
            "environment": {
                "variables": {"HF_HOME": "/scratch/ada/hf", "ACCELERATE_MIXED_PRECISION": "bf16"}
            },
        },
        (1, 4, 32, 4, 163840),
        ["python", "/home/ada/proj/finetune.py", "--model", "gpt2", "--output_dir", "out"],
        lost={(5, "accelerate --config_file cfg.yaml")},
        changed={(0, "${OUT:-out}"), (2, "--mem-per-gpu=40G"), (3, "--job-name=llm tune")},
    ),
    "apptainer": Expected(
        {
            "name": "box",
            "script": "train.py",
            "args": ["--data", "/data/set"],
            "resources": {
                "gpus": "h100:2",
                "cpus_per_rank": 8,
                "time": "12:00:00",
                "qos": "long",
                "extra": ["--reservation=course"],
            },
            "environment": {
                "variables": {"LANG": "C"},
                "container": {
                    "engine": "apptainer",
                    "image": "images/torch.sif",
                    "mounts": ["/data", "/scratch/ada:/work"],
                },
            },
        },
        (1, 2, 16, 2, None),
        ["python", "/home/ada/proj/train.py", "--data", "/data/set"],
    ),
    "array_params": Expected(
        {
            "name": "params",
            "array": "1-3",
            "launcher": "srun",
            "command": ["bash", "-c", 'eval "exec $IMPORTED_COMMAND"'],
            "resources": {"time": "00:10:00"},
            "environment": {
                "setup": "LRS=(0.1 0.01 0.001)\n"
                "PARAMS=params.txt\n"
                'LINE=$(sed -n "${SLURM_ARRAY_TASK_ID}p" $PARAMS)\n'
                "printf -v IMPORTED_COMMAND '%q ' python train.py --lr "
                "${LRS[$SLURM_ARRAY_TASK_ID-1]} $LINE\n"
                "export IMPORTED_COMMAND\n"
            },
        },
        (1, 1, 1, 0, None),
        ["python", "train.py", "--lr", "0.01", "second", "line"],
        changed={
            (3, "LRS=(0.1 0.01 0.001)"),
            (4, "PARAMS=params.txt"),
            (5, 'LINE=$(sed -n "${SLURM_ARRAY_TASK_ID}p"'),
            (6, "python train.py --lr ${LRS[$SLURM_ARRAY_"),
        },
    ),
    "array_sweep": Expected(
        {
            "name": "sweep",
            "array": "0-9%2",
            "launcher": "srun",
            "script": "train.py",
            "args": ["--seed", "{array.index}", "--tag=run{array.index}"],
            "resources": {"gpus": 1},
        },
        (1, 1, 1, 1, None),
        ["python", "/home/ada/proj/train.py", "--seed", "2", "--tag=run2"],
        changed={(4, "--output=logs/%A_%a.out")},
    ),
    "conda_modules": Expected(
        {
            "name": "conda_modules",
            "launcher": "srun",
            "script": "train.py",
            "args": ["--name", "two words"],
            "resources": {"cpus_per_rank": 4, "memory": "8G", "time": "00:45:00"},
            "environment": {
                "modules": ["cuda/12.1"],
                "variables": {"WANDB_MODE": "offline"},
                "setup": ". /opt/conda/etc/profile.d/conda.sh\n"
                "module swap gcc gcc/13\n"
                'eval "$(conda shell.bash hook)"\n'
                "conda activate vision\n"
                "export A=\"two words\" B='$literal' C=$HOME/cache\n"
                "export PYTHONPATH=$PWD/src:$PYTHONPATH\n"
                "export PATH=/opt/tool/bin:$PATH\n",
            },
        },
        (1, 1, 4, 0, 8192),
        ["python", "/home/ada/proj/train.py", "--name", "two words"],
        changed={
            (1, "#!/bin/bash -l"),
            (4, ". /opt/conda/etc/profile.d/conda.sh"),
            (6, "module swap gcc gcc/13"),
            (7, 'eval "$(conda shell.bash hook)"'),
            (8, "conda activate vision"),
            (9, "export A=\"two words\" B='$literal' C=$HOM"),
            (10, "export PYTHONPATH=$PWD/src:$PYTHONPATH"),
            (11, "export PATH=/opt/tool/bin:$PATH"),
        },
    ),
    "cpu_only": Expected(
        {
            "name": "cpu_only",
            "launcher": "srun",
            "script": "fit.py",
            "args": ["--jobs", "16", "--data", "/scratch/ada/set.csv"],
            "workdir": "work",
            "resources": {"cpus_per_rank": 16, "time": "00:30:00"},
            "environment": {"setup": "ulimit -n 4096\n"},
        },
        (1, 1, 16, 0, None),
        ["python", "/home/ada/proj/work/fit.py", "--jobs", "16", "--data", "/scratch/ada/set.csv"],
        lost={(6, "numactl --interleave=all")},
        changed={(5, "ulimit -n 4096"), (6, "$SCRATCH"), (6, "$SLURM_CPUS_PER_TASK"), (6, "| tee")},
    ),
    "deepspeed": Expected(
        {
            "name": "deepspeed",
            "script": "pretrain.py",
            "args": ["--steps", "1000", "--deepspeed", "--deepspeed_config", "ds.json"],
            "resources": {"nodes": 2, "gpus": 2, "cpus_per_rank": 6, "time": "06:30:00"},
            "environment": {"conda": "ds"},
        },
        (2, 4, 12, 2, None),
        [
            "python",
            "/home/ada/proj/pretrain.py",
            "--steps",
            "1000",
            "--deepspeed",
            "--deepspeed_config",
            "ds.json",
        ],
        changed={(8, "deepspeed --num_gpus 2 --num_nodes 2 --h")},
    ),
    "functions_loops": Expected(
        {
            "name": "loops",
            "launcher": "srun",
            "script": "train.py",
            "args": ["--lr", "$lr", "--epochs", "$((2 * 5))"],
            "resources": {"gpus": 1},
            "environment": {
                "setup": "cat <<EOF > notes.txt\n"
                "#SBATCH --time=9:00:00\n"
                "srun python not_a_launch.py $HOME\n"
                "EOF\n"
                "if [ -d data ]; then\n"
                "  echo there\n"
                "fi\n"
                'case "$1" in\n'
                "  fast) : ;;\n"
                "esac\n"
            },
        },
        (1, 1, 1, 1, None),
        ["python", "/home/ada/proj/train.py", "--lr", "$lr", "--epochs", "$((2 * 5))"],
        lost={
            (10, "$lr, $((2 * 5))"),
            (18, "for lr in 0.1 0.01 0.001; do"),
            (21, "python evaluate.py"),
        },
        changed={
            (3, "cat <<EOF > notes.txt #SBATCH --time=9:0"),
            (12, "if [ -d data ]; then echo there fi"),
            (15, 'case "$1" in fast) : ;; esac'),
        },
    ),
    "gres_mail": Expected(
        {
            "name": "gres_mail",
            "launcher": "srun",
            "script": "train.py",
            "resources": {
                "gpus": "a100:4",
                "time": "02:00:00",
                "constraint": "nvlink&a100",
                "partition": "gpu",
                "account": "proj",
                "exclusive": True,
                "mail": {"to": "ada@example.org", "on": ["begin", "end", "time_limit_90"]},
                "extra": [
                    "--gres=lustre:1",
                    "--nodelist=node[1-2]",
                    "--licenses=matlab:1",
                    "--hold",
                ],
            },
        },
        (1, 4, 4, 4, None),
        ["python", "/home/ada/proj/train.py"],
        lost={(7, "--unheard-of=1")},
    ),
    "horovodrun": Expected(
        {
            "name": "horovodrun",
            "launcher": "horovodrun",
            "script": "train_hvd.py",
            "args": ["--lr", "0.1"],
            "resources": {"gpus": "v100:4"},
        },
        (1, 4, 4, 4, None),
        ["python", "/home/ada/proj/train_hvd.py", "--lr", "0.1"],
    ),
    "memory_per_cpu": Expected(
        {
            "name": "memory_per_cpu",
            "launcher": "srun",
            "script": "train.py",
            "resources": {
                "ranks_per_node": 8,
                "cpus_per_rank": 2,
                "memory": "24000M",
                "time": "00:20:00",
            },
        },
        (1, 8, 16, 0, 24000),
        ["python", "/home/ada/proj/train.py"],
        changed={(2, "--ntasks=8"), (4, "--mem-per-cpu=1500M")},
    ),
    "mpirun": Expected(
        {
            "name": "mpirun",
            "launcher": "mpirun",
            "script": "solver.py",
            "args": ["--grid", "512"],
            "resources": {"nodes": 2, "ranks_per_node": 8, "cpus_per_rank": 2, "time": "00:30:00"},
            "environment": {
                "modules": ["openmpi/5.0"],
                "variables": {"OMPI_MCA_btl": "tcp,self", "OMP_PROC_BIND": "true"},
            },
        },
        (2, 16, 16, 0, None),
        ["python", "/home/ada/proj/solver.py", "--grid", "512"],
        lost={
            (3, "--dependency=afterok:4711"),
            (5, "mpirun --bind-to core"),
            (5, "mpirun --map-by socket"),
        },
    ),
    "parallel_steps": Expected(
        {
            "name": "parallel_steps",
            "launcher": "srun",
            "script": "train.py",
            "args": ["--seed", "$seed"],
            "resources": {"cpus_per_rank": 2, "time": "00:15:00"},
        },
        (1, 1, 2, 0, None),
        ["python", "/home/ada/proj/train.py", "--seed", "$seed"],
        lost={(3, "for seed in 1 2 3; do"), (4, "$seed")},
        changed={(2, "--ntasks=3")},
    ),
    "pyxis": Expected(
        {
            "name": "pyxis",
            "launcher": "srun",
            "script": "train.py",
            "args": ["--data", "/data"],
            "resources": {"nodes": 2, "gpus": 8, "time": "08:00:00", "exclusive": True},
            "environment": {
                "container": {
                    "engine": "pyxis",
                    "image": "nvcr.io#nvidia/pytorch:24.05-py3",
                    "mounts": ["/lustre/data:/data", "/home/ada"],
                }
            },
        },
        (2, 16, 8, 8, None),
        ["python", "/home/ada/proj/train.py", "--data", "/data"],
    ),
    "single_gpu": Expected(
        {
            "name": "single",
            "launcher": "srun",
            "module": "pkg.train",
            "args": ["--lr=1e-3"],
            "workdir": "src",
            "resources": {"gpus": 1, "cpus_per_rank": 6, "memory": "32000M", "time": "01:30:00"},
            "environment": {"python": "python3", "variables": {"CUDA_LAUNCH_BLOCKING": "0"}},
        },
        (1, 1, 6, 1, 32000),
        ["python3", "-m", "pkg.train", "--lr=1e-3"],
        changed={(7, "> train.log")},
    ),
    "srun_ddp": Expected(
        {
            "name": "ddp",
            "launcher": "srun",
            "script": "main_ddp.py",
            "args": ["--batch-size", "256", "--amp"],
            "resources": {
                "nodes": 2,
                "gpus": 4,
                "cpus_per_rank": 8,
                "time": "04:00:00",
                "extra": ["--signal=SIGUSR1@90"],
            },
            "environment": {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}},
        },
        (2, 8, 32, 4, None),
        ["python", "/home/ada/proj/main_ddp.py", "--batch-size", "256", "--amp"],
        lost={(17, "srun --cpu-bind=cores")},
    ),
    "staging": Expected(
        {
            "name": "stage",
            "script": "train.py",
            "args": [
                "--data={stage.imagenet}/train",
                "--vocab",
                "{stage.vocab}",
                "--labels",
                "{stage.labels}/labels.csv",
            ],
            "resources": {"gpus": 2, "cpus_per_rank": 2, "time": "03:00:00"},
            "environment": {"setup": "mkdir -p $TMPDIR/imagenet results\n"},
            "stage": [
                {"name": "imagenet", "source": "/data/imagenet.tar"},
                {"name": "vocab", "source": "~/data/vocab"},
                {"name": "labels", "source": "labels.csv", "target": "shm"},
            ],
        },
        (1, 2, 4, 2, None),
        [
            "python",
            "/home/ada/proj/train.py",
            "--data=/staged/imagenet/train",
            "--vocab",
            "/staged/vocab",
            "--labels",
            "/staged/labels/labels.csv",
        ],
        lost={(9, "cp -r $TMPDIR/out results/"), (10, "rm -rf $TMPDIR/imagenet")},
        changed={(3, "mkdir")},
    ),
    "torchrun_two_nodes": Expected(
        {
            "name": "resnet50",
            "script": "train.py",
            "args": [
                "--data",
                "/data/imagenet",
                "--epochs",
                "90",
                "--out",
                "{run.dir}",
                "--note",
                "it's ok",
            ],
            "resources": {
                "nodes": 2,
                "gpus": "a100:4",
                "cpus_per_rank": 8,
                "memory": "480G",
                "time": "1-12:00:00",
                "partition": "gpu",
                "account": "proj42",
            },
            "environment": {
                "modules": ["cuda/12.4", "gcc/12"],
                "venv": "~/envs/train",
                "variables": {"NCCL_DEBUG": "INFO"},
            },
        },
        (2, 8, 32, 4, 491520),
        [
            "python",
            "/home/ada/proj/train.py",
            "--data",
            "/data/imagenet",
            "--epochs",
            "90",
            "--out",
            "/run",
            "--note",
            "it's ok",
        ],
        lost={(8, "--requeue")},
        changed={(7, "--output=logs/%x-%j.out"), (10, "module purge"), (18, "runs/$SLURM_JOB_ID")},
    ),
}
