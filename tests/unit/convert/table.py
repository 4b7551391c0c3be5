"""Batch scripts as machine-learning projects have them, whose draft starts the same program."""

from __future__ import annotations


def script(body: str) -> str:
    return "#!/bin/bash\n" + body.lstrip("\n")


SAME: dict[str, str] = {name: script(body) for name, body in {
    # one process
    "one python": r"""
#SBATCH --job-name=fit -c 4 --mem=8G --time=30
python -u train.py --lr 0.1 --name "two words" --json '{"a": [1, 2]}'
""",
    "constants in arguments": r"""
#SBATCH --gres=gpu:1 --time=1:00:00
EPOCHS=90
OUT=runs/$SLURM_JOB_ID
ARGS=(--epochs $EPOCHS # not "closed
  --out "$OUT"
  --note "it's ok")
MORE="--amp --seed 3"
python train.py "${ARGS[@]}" $MORE
""",
    "software": r"""
#SBATCH --time=10
module purge
module load cuda/12.1 gcc
source env/bin/activate
cd src
export WANDB_MODE=offline HF_HOME=/cache/hf
python ../train.py
""",
    "conda by its hook": r"""
#SBATCH --time=10
eval "$(conda shell.bash hook)"
conda activate vision
srun python train.py
""",
    "conda by its old command": r"""
#SBATCH --time=10
module load anaconda3/2021.05
source activate vision
python train.py
""",
    "conda by a path and a module behind it": r"""
#SBATCH --time=10
. ../etc/profile.d/conda.sh
conda activate /envs/vision
module load cuda
cd src
python ../train.py
""",
    "a function around the program, with options of the shell": r"""
#SBATCH --time=10
set -euo pipefail
note() { echo "note $*"; }
run() {
  note start
  python train.py --seed "$1" --name '{job.id}'
}
run 1
run 2
""",
    "values of the job": r"""
#SBATCH --time=10
RUN=$(uuidgen)
DAY=$(date +%Y)
python train.py --run $RUN --day "$DAY" --home $HOME/x --user=$USER --to $SCRATCH/$SLURM_JOB_ID
""",
    "a directory for one command": r"""
#SBATCH --time=10
LR=0.1
cd src && python ../train.py --lr $LR
""",
    "variables inside words": r"""
#SBATCH --time=10
ROOT=/scratch/models
NAME=big
RUN=$ROOT/$NAME/$SLURM_JOB_ID
export WHERE=$ROOT/$NAME/w CACHE=$TMPDIR/$NAME/cache ID=$SLURM_JOB_ID.x
ARGS=(--out $RUN/$NAME.pt # here
  --x $ROOT/$NAME-a/b)
python train.py ${ARGS[@]} $ROOT/$NAME/c "$ROOT/$NAME/d" a/\$NAME/$NAME/e $ROOT/$NAME/'f g'
""",
    "home directories in a list": r"""
#SBATCH --time=10
DIRS=/data:~/data
A=$(echo x)
python train.py --dirs "$DIRS" "${A}é" "$Aé" 'cost $' "a$"
""",
    "an expression in an argument": r"""
#SBATCH --array=0-3 --time=10
LRS=(0.1 0.01 0.001 0.0001)
python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]} --seed $((SLURM_ARRAY_TASK_ID + 1)) \
  --at=$(hostname)
""",
    "a line of a file": r"""
#SBATCH --array=1-3%2 --time=10
LINE=$(sed -n "${SLURM_ARRAY_TASK_ID}p" params.txt)
echo "task $SLURM_ARRAY_TASK_ID: $LINE"
python train.py --config "$LINE" --index $SLURM_ARRAY_TASK_ID
""",
    "a sourced file changes a variable": r"""
#SBATCH --time=10
LR=0.1
source env.sh
python train.py --lr $LR
""",
    "a condition changes a variable": r"""
#SBATCH --time=10
LR=0.1
if [ -f params.txt ]; then
  LR=0.2
fi
python train.py --lr "$LR"
""",
    "defaults": r"""
#SBATCH --time=10
SEED=${SEED:-7}
X=${X:-"a }b"}
LR=${1:-0.3}
export MOMENTUM=${2:-0.9}
DIR=out/$SLURM_JOB_NAME
echo $LR $DIR
python train.py --seed $SEED --lr=$LR --x "$X" --dir $DIR
""",
    "variables of one line": r"""
#SBATCH --time=10
export PYTHONPATH=$PWD/src:$PYTHONPATH
A=1 B="x y" python train.py > train.log 2>&1
""",
    "functions and arrays": r"""
#SBATCH --time=10
set -a
MODE=5
set +a
f() { cd src; LR=7; }
LR=1
f
declare -A M=([a]=1 [b]=2)
python ../train.py --lr $LR --m ${M[a]} --n ${#M[@]} --mode $MODE
""",
    "software behind other lines": r"""
#SBATCH --time=10
set -e
export MODE=first
python -c 'import sys'
module load cuda
source env/bin/activate
export MODE=last LEVEL=2
python train.py
""",
    "quotes": r"""
#SBATCH --time=10
python train.py 'a b' "c \"d\"" e\ f $'g\th' "" \
  --last # a comment
""",
    "another interpreter and a module": r"""
#SBATCH --time=10
exec python3 -m src.train --x 1
""",
    "prepared on the first node": r"""
#SBATCH --time=10
ulimit -n 1024
mkdir -p out/$SLURM_JOB_ID
cat > out/conf.yaml <<END
lr: 0.1
END
python prepare.py
python train.py --config out/conf.yaml
echo done
""",
    "no python": r"""
#SBATCH -c 4 --time=10
timeout 60 julia fit.jl --n 3
""",
    "a container": r"""
#SBATCH --gres=gpu:2 -c 8 --time=10
apptainer exec --nv -B $PWD image.sif python train.py --x $SLURM_JOB_ID
""",
    # torchrun
    "torchrun on one node": r"""
#SBATCH -N1 --gpus-per-node=4 -c 32 --mem=64G --time=10
torchrun --standalone --nproc_per_node=4 train.py --batch 8
""",
    "torchrun on two nodes": r"""
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:a100:4 --cpus-per-task=32 --time=1-0
nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )
head=${nodes[0]}
export NCCL_DEBUG=INFO
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE \
  --rdzv_id $RANDOM --rdzv_backend c10d --rdzv_endpoint $head:29500 train.py --epochs 3
""",
    "launcher in variables": r"""
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
GPUS_PER_NODE=8
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
DIST=(--nproc_per_node $GPUS_PER_NODE --nnodes $SLURM_NNODES --master_addr $MASTER_ADDR
      --master_port 6000)
srun python -m torch.distributed.run ${DIST[@]} train.py --hidden 1024
""",
    "as many as there are GPUs": r"""
#SBATCH --gpus=2 -N 1 --time=10
torchrun --nproc-per-node=gpu -m src.train
""",
    "a sum is the number of ranks": r"""
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:4 --cpus-per-task=16 --time=10
GPUS=4
accelerate launch --multi_gpu --num_processes $((SLURM_NNODES * GPUS)) \
  --num_machines $SLURM_NNODES --machine_rank $SLURM_PROCID --mixed_precision bf16 train.py
""",
    "deepspeed with numbers": r"""
#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=2 -c 12 --time=10
deepspeed --hostfile hosts --num_gpus 2 --num_nodes 2 train.py --deepspeed ds.json
""",
    # srun
    "one task per rank": r"""
#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4 --cpus-per-task=8 --time=10
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --label --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK python train.py --devices 4
""",
    "all resources are srun's": r"""
#SBATCH --time=10
#GIVEN -N2 --ntasks-per-node=2 --gres=gpu:2 -c 5 --mem=20G
srun --gres=gpu:2 -N 2 --ntasks-per-node=2 -c 5 --mem=20G python train.py --launcher=slurm
""",
    "the header lacks what srun has": r"""
#SBATCH -N 1 -n 2 --time=10
#GIVEN -c 6 --gpus-per-node=2
srun -c 6 --gpus-per-node=2 python train.py
""",
    "MPI as written": r"""
#SBATCH -n 4 -N 1 --time=10
srun --mpi=pmi2 ./solve --grid 512
""",
    "memory of each CPU": r"""
#SBATCH -N1 -n 4 -c 2 --mem-per-cpu=2G --time=10
srun --export=ALL,MODE=fast python train.py
""",
    "a task chooses its argument": r"""
#SBATCH -N1 -n 2 --time=10
srun bash -c 'exec python train.py --shard $SLURM_PROCID'
""",
    "Lightning with all GPUs named": r"""
#SBATCH --nodes=2             # as in Trainer(num_nodes=…)
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --mem=0
#SBATCH --cpus-per-task=6 -t 10
export CUDA_VISIBLE_DEVICES=0,1,2,3
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
start=$(date +%s)
srun --output=log_%t.txt python3 train.py --trainer.num_nodes $SLURM_NNODES
printf "%s" $(($(date +%s) - start))
""",
    "a directory by the date": r"""
#SBATCH --time=10
exp=out/lr-`date "+%Y"`
mkdir -p $exp
cp params.txt $exp/
python train.py --output_dir $exp --name 'seed$SLURM_JOB_ID'
""",
    "a directory that only the job knows": r"""
#SBATCH --time=10
WHERE=$(echo src)
cd "$WHERE" || exit 3
python ../train.py --here $PWD
""",
    # MPI
    "mpirun": r"""
#SBATCH --nodes=2 --ntasks-per-node=8 --cpus-per-task=2 --time=30:00
mpirun -np 16 --bind-to core -x OMP_PROC_BIND=true --mca btl tcp,self python train.py --grid 2
""",
    "a variable of mpirun needs the job's PATH": r"""
#SBATCH -N1 -n 4 --time=30
mpirun -np 4 -x LIBPATH=/opt/x/lib:$PATH -x MODE=1 ./solve
""",
    "horovodrun in a job with tasks": r"""
#SBATCH -N1 --ntasks-per-node=4 --cpus-per-task=6 --gres=gpu:4 --time=30
horovodrun -np 4 -H localhost:4 python train.py --lr 0.1
""",
    "fewer horovod ranks than tasks": r"""
#SBATCH -N1 --ntasks-per-node=4 --cpus-per-task=6 --gres=gpu:2 --time=30
horovodrun -np 2 python train.py
""",
    "a copy from a directory that only the job knows": r"""
#SBATCH --time=10
cd $(echo src)
cp ../params.txt $TMPDIR/
python ../train.py --data $TMPDIR/params.txt
""",
    "copies stay where a line works on them": r"""
#SBATCH --time=10
cp params.txt $TMPDIR/set.txt
sort $TMPDIR/set.txt > $TMPDIR/sorted.txt
python train.py --data $TMPDIR/sorted.txt
""",
    # through a shell
    "words that a condition decides": r"""
#SBATCH --time=10
RESUME=
if [ -f params.txt ]; then RESUME="--resume last.pt"; fi
python train.py $RESUME
""",
    "a list that a condition decides": r"""
#SBATCH --time=10
ARGS=(--lr 0.1 "two words")
[ -f params.txt ] && ARGS+=(--more)
python train.py "${ARGS[@]}" ${#ARGS[@]}
""",
    "a pattern for files, and text with blanks": r"""
#SBATCH --time=10
python train.py param*.txt "$(hostname) x" 'a b' $"t" $((1 + $(echo 2)))
""",
    "several assignments on one line": r"""
#SBATCH --time=10
A=1 B=2
C=3   D=$A # and
python train.py $A $B $C $D
""",
    "a default that the job may replace": r"""
#SBATCH --gres=gpu:4 -c 8 --time=10
DIR=${DIR:-src}
accelerate launch --num_processes 4 ${DIR}/../train.py --x ${MODE:-a b}
""",
    "the order of the GPUs": r"""
#SBATCH --gres=gpu:4 -c 8 --time=10
export CUDA_VISIBLE_DEVICES=3,2,1,0
torchrun --nproc_per_node 4 train.py
""",
    "a launcher in a text": r"""
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 -c 8 --time=10
LAUNCHER="torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES"
CMD="train.py --x 1"
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD"
""",
    "all memory": r"""
#SBATCH --mem=0 -N1 -n 2 --time=10
srun python train.py
""",
    "the arguments that the script sets": r"""
#SBATCH --time=10
set -- --lr 1 "a b"
python train.py "$@"
""",
    "standard input": r"""
#SBATCH --time=10
python train.py < params.txt | cat
""",
}.items()}  # fmt: skip
