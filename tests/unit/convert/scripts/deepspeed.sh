#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=12
#SBATCH --time=0-06:30
conda activate ds
deepspeed --num_gpus 2 --num_nodes 2 --hostfile hosts.txt --master_port 29999 \
  pretrain.py --steps 1000 --deepspeed --deepspeed_config ds.json
