#!/bin/bash
#SBATCH --array=0-9%2
#SBATCH --job-name=sweep
#SBATCH --output=logs/%A_%a.out
#SBATCH --gpus=1
#SBATCH --time=1:00:00
python train.py --seed $SLURM_ARRAY_TASK_ID --tag=run${SLURM_ARRAY_TASK_ID}
