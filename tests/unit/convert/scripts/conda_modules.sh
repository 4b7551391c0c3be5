#!/bin/bash -l
#SBATCH --time=0:45:00 --ntasks=1 --cpus-per-task=4 --mem=8G
#SBATCH --export=ALL,WANDB_MODE=offline
. /opt/conda/etc/profile.d/conda.sh
module load cuda/12.1
module swap gcc gcc/13
eval "$(conda shell.bash hook)"
conda activate vision
export A="two words" B='$literal' C=$HOME/cache
export PYTHONPATH=$PWD/src:$PYTHONPATH
export PATH=/opt/tool/bin:$PATH
NOT_EXPORTED=1
time python train.py --name "$A"
