#!/bin/bash -l
#SBATCH -J pl
#SBATCH -N 2
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=0-02:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --error=slurm-%j.err
# activate conda env
source ~/miniconda3/etc/profile.d/conda.sh
conda activate lit
# debugging flags (optional)
export NCCL_DEBUG=INFO
export PYTHONFAULTHANDLER=1
echo "start $(date)"
nvidia-smi
# run script from above
srun python3 train.py --trainer.devices 4 --trainer.num_nodes $SLURM_NNODES
echo done
