#!/bin/bash
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
#SBATCH --chdir=work
ulimit -n 4096
numactl --interleave=all python fit.py --jobs $SLURM_CPUS_PER_TASK --data $SCRATCH/set.csv | tee log.txt
