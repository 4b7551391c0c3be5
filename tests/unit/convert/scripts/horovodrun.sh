#!/bin/bash
#SBATCH -N 1 -n 4 --gpus-per-node=v100:4 -t 60
horovodrun -np 4 -H localhost:4 --start-timeout 60 python train_hvd.py --lr 0.1
