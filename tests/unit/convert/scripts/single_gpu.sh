#!/bin/sh
#SBATCH -J single
#SBATCH -G 1 -c 6
#SBATCH --mem 32000
#SBATCH -t 90
cd src
CUDA_LAUNCH_BLOCKING=0 python3 -m pkg.train --lr=1e-3 > train.log 2>&1
