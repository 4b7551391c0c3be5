#!/bin/bash
#SBATCH --gpus=1 --time=1:00:00 --job-name=loops
cat <<EOF > notes.txt
#SBATCH --time=9:00:00
srun python not_a_launch.py $HOME
EOF
# sbatch --gres=gpu:8 this.sh
train() {
  local lr=$1
  python train.py --lr "$lr" --epochs $((2 * 5))
}
if [ -d data ]; then
  echo there
fi
case "$1" in
  fast) : ;;
esac
for lr in 0.1 0.01 0.001; do
  train $lr
done
python evaluate.py
