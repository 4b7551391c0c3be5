#!/bin/sh
#SBATCH --ntasks=2 --mem=64G --mem-per-cpu=4G
#SBATCH hetjob
#SBATCH --ntasks=1 --gpus=1
ulimit -n 4096
run() {
  # one fold
  nnUNetv2_train 1 3d_fullres "$1" --npz
}
for fold in 0 1 2; do
  nsys profile -o out$fold python train_fold.py $fold
done
[ -d results ] && tar czf results.tgz results
scp results.tgz login1:
unset fold
