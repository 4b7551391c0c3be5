#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=0-11%4
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
module purge
module load python/3.11 cuda
source $HOME/venv/bin/activate
cd $SLURM_SUBMIT_DIR
lrs=(1e-3 1e-4 1e-5)
seeds=(0 1 2 3)
lr=${lrs[$((SLURM_ARRAY_TASK_ID / 4))]}
seed=${seeds[$((SLURM_ARRAY_TASK_ID % 4))]}
echo "lr $lr seed $seed"
python train.py --lr $lr --seed $seed --out results/lr${lr}_s${seed}
