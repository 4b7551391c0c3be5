#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=8:00:00 --exclusive
srun --container-image=nvcr.io#nvidia/pytorch:24.05-py3 \
     --container-mounts=/lustre/data:/data,/home/ada:/home/ada --mpi=none \
     bash -c 'python train.py --data /data'
