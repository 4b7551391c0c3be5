#!/bin/bash -l
#SBATCH --gres=gpu:a100:4,shard:1 --constraint=a100 --exclusive --signal=B:USR1@120
#SBATCH --time=2-00 --dependency=singleton --gpu-bind=closest --qos=long
#SBATCH --wckey=x --unheard-of=1 --nodes=two
while getopts "c:s:" option; do
  case $option in
    c) CONFIG=$OPTARG ;;
    s) SEED=$OPTARG ;;
  esac
done
DIR=${DIR:-/project/code}
export OMP_NUM_THREADS=$(nproc)
export WANDB_API_KEY=secret HF_HOME=$SCRATCH/hf
conda activate tune
cat > conf.yaml <<END
lr: 0.1
A=1 B=2
END
accelerate launch --num_processes 4 --mixed_precision bf16 \
  ${DIR}/train.py --config "$CONFIG" --seed ${SEED:-1} \
  --note "it's $(hostname)"
python evaluate.py &
wait
