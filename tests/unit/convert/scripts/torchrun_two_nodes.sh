#!/bin/bash
#SBATCH --job-name=resnet50
#SBATCH -N2 --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4   # four on each node
#SBATCH --cpus-per-task 32
#SBATCH --mem=480G -t 1-12
#SBATCH -p gpu -A proj42 --output=logs/%x-%j.out
#SBATCH --requeue
set -euo pipefail
module purge
module load cuda/12.4 gcc/12
source ~/envs/train/bin/activate
export NCCL_DEBUG=INFO
nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )
head_node=${nodes[0]}
head_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
EPOCHS=90
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node=$SLURM_GPUS_ON_NODE \
    --rdzv_id $SLURM_JOB_ID --rdzv_backend c10d --rdzv_endpoint $head_ip:29500 \
    train.py --data /data/imagenet --epochs $EPOCHS --out runs/$SLURM_JOB_ID --note "it's ok"
