#!/bin/bash
#SBATCH -p gpu
#SBATCH --gres=gpu:1
cd "$(dirname "$0")/.."
conf=$(ls conf | head -1); export CONF=$conf
CONFIG=$1
IFS=,
kernprof -l train.py --conf conf/$conf --of $CONFIG
