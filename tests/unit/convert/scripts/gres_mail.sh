#!/bin/bash
#SBATCH --gres=gpu:a100:4,lustre:1
#SBATCH --exclusive --constraint="nvlink&a100"
#SBATCH --mail-user=ada@example.org --mail-type=BEGIN,END,TIME_LIMIT_90
#SBATCH --part=gpu --accou=proj --nodel=node[1-2] --tasks-per-node=4
#SBATCH --time=1:00:00 --time=2:00:00 --lic=matlab:1
#SBATCH --hold --unheard-of=1
srun python train.py
