#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --cpus-per-task=2 --time=30:00
#SBATCH --dependency=afterok:4711
module load openmpi/5.0
mpirun -np 16 -npernode 8 --bind-to core --map-by socket -x OMP_PROC_BIND=true \
  --mca btl tcp,self --mca plm_rsh_agent ssh python solver.py --grid 512
