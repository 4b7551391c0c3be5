#!/bin/bash
#SBATCH -a 1-3 -t 10 -J params
LRS=(0.1 0.01 0.001)
PARAMS=params.txt
LINE=$(sed -n "${SLURM_ARRAY_TASK_ID}p" $PARAMS)
python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID-1]} $LINE
