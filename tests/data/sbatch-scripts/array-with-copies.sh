#!/bin/bash
#SBATCH -J digits -c 4 --mem-per-cpu=2G -t 30
#SBATCH --array=0-3%2
#SBATCH --mail-type=END,ARRAY_TASKS --mail-user=ada
trap 'echo stopped' TERM
LRS=(0.1 0.03 0.01 0.003)
LR=${LRS[$SLURM_ARRAY_TASK_ID]}
OUT=$TMPDIR/out
A=1 B=2
mkdir -p $OUT
cp -r data/digits $TMPDIR/   # the data
tar -xf data/more.tar -C $TMPDIR
python prepare.py --to $TMPDIR/digits
if [ -f last.pt ]; then
  RESUME="--resume last.pt"
fi
srun python train.py --lr $LR --data $TMPDIR/digits --out $OUT $RESUME -n $A$B 2>&1 | tee log.txt
if [ $? -ne 0 ]; then
  echo failed
  scontrol requeue $SLURM_JOB_ID
fi
cp -r $OUT results/
rm -rf $TMPDIR/digits
sbatch next.sh
