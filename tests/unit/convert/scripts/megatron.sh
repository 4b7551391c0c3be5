#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
NNODES=$SLURM_NNODES
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024 # comment
)
CHECKPOINT_PATH=$1
DATA="/data/my text"
srun torchrun ${DISTRIBUTED_ARGS[@]} --node_rank $SLURM_NODEID pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    --data-path "$DATA" --save ckpt/$SLURM_JOB_ID
