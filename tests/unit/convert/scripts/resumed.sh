#!/bin/bash
#SBATCH --gres=gpu:2 --time=3:00:00
RESUME=""
if [ -f ckpt.pt ]; then
  RESUME="--resume ckpt.pt"
else
  RESUME="--fresh"
fi
singularity exec --nv image.sif python train.py $RESUME
python evaluate.py
