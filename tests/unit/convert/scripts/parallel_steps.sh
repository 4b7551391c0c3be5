#!/bin/bash
#SBATCH --ntasks=3 --cpus-per-task=2 --time=15
for seed in 1 2 3; do
  srun --exact -n1 -c2 python train.py --seed $seed &
done
wait
