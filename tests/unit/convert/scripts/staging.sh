#!/bin/bash
#SBATCH --gpus-per-node=2 --cpus-per-task=4 --time=3:00:00 --job-name=stage
mkdir -p $TMPDIR/imagenet results
tar -xf /data/imagenet.tar -C $TMPDIR/imagenet
cp -r ~/data/vocab $TMPDIR/
cp labels.csv /dev/shm/
torchrun --nproc_per_node 2 train.py --data=$TMPDIR/imagenet/train --vocab "$TMPDIR/vocab" \
  --labels /dev/shm/labels.csv
cp -r $TMPDIR/out results/
rm -rf $TMPDIR/imagenet
