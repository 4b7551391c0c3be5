#!/bin/bash
# Language model on two nodes.
#SBATCH --job-name=lm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32   # eight for each rank
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
##SBATCH --partition=debug

set -eo pipefail
echo "started at $(date)"

module purge
module load cuda/12.4
source "$HOME/env/bin/activate"

# rendezvous
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
export NCCL_DEBUG=WARN
export CUDA_VISIBLE_DEVICES=3,2,1,0

LAUNCHER="python -m torch.distributed.run --nproc_per_node 4 --nnodes $SLURM_NNODES \
  --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT"
CMD="pretrain.py --config conf/lm.yaml --seed 3"

# one launcher on each node
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD"

echo "ended at $(date)"
