#!/bin/bash
#SBATCH --gres=gpu:h100:2 --cpus-per-task=16 --time=12:00:00 --job-name=box
#SBATCH --qos=long --reservation=course
apptainer exec --nv --bind /data,/scratch/ada:/work --env LANG=C images/torch.sif \
  torchrun --standalone --nproc-per-node=gpu train.py --data /data/set
