"""Batch scripts as machine-learning projects have them: SAME import, REFUSED name a line.

REFUSED has the number of the line and a part of the reason. Each script that once became another
program without a word has a place here.
"""

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
}.items()}  # fmt: skip

_REFUSED = {
    "srun options in a variable that the job sets": (r"""
#SBATCH -N2 --ntasks-per-node=1
if [ -f auto ]; then AUTO_RESUME="--requeue"; fi
ARGS=(--mpi=none)
srun ${AUTO_RESUME} -l "${ARGS[@]}" torchrun --nproc_per_node=4 train.py
""", 5, "may be options of srun"),
    "torchrun options from a file": (
        "torchrun $(cat options) train.py", 2, "may be options of torchrun"),
    "a blank behind a backslash": ("""
python train.py \\ \n  --lr 0.1
""", 2, "a blank after a \\"),
    "words that come only if a variable is set": (
        "python train.py ${RESUME:+--resume $RESUME}", 2, "which words it becomes"
    ),
    "words that a variable is set to": ("python train.py ${MORE:---lr 1}", 2, "which words"),
    "two programs at once": ("srun -n 2 python a.py : -n 1 python b.py", 2, "heterogeneous"),
    "a quote that is open": ("python train.py 'a", 2, "not valid bash"),
    "a number of ranks that only the job knows": (r"""
#SBATCH --gres=gpu:4
N=$(nvidia-smi -L | wc -l)
torchrun --nproc_per_node=$N train.py
""", 4, "needs this number"),
    "a number of processes that only the job knows": (r"""
#SBATCH -N2 --gres=gpu:4
accelerate launch --num_processes $((SLURM_NNODES * $(cat gpus))) --num_machines 2 train.py
""", 3, "needs this number"),
    "the hosts say how many": (r"""
#SBATCH -N2 --gpus-per-node=4
deepspeed --hostfile=hosts.txt train.py
""", 3, "decides the number of ranks"),
    "an mpirun by hosts": ("mpirun --hostfile hosts ./solve", 2, "decides the number of ranks"),
    "a configuration of accelerate": (
        "accelerate launch --config_file fsdp.yaml train.py", 2, "no counterpart"),
    "elastic nodes": ("torchrun --nnodes=1:2 --nproc_per_node=4 train.py", 2, "needs this number"),
    "a separate training on each node": (r"""
#SBATCH -N2 --ntasks-per-node=1 --gpus-per-node=4
srun torchrun --standalone --nproc_per_node=4 train.py
""", 3, "on 1 of the header's 2 nodes"),
    "srun with other GPUs than the header": (r"""
#SBATCH -N1 --gres=gpu:4
srun --gres=gpu:1 python train.py
""", 3, "all of the job"),
    "srun with other CPUs than the header": (r"""
#SBATCH -N1 -n4 -c 8
srun -c 2 python train.py
""", 3, "all of the job"),
    "a script that parses options": (r"""
while getopts "l:" name; do
  case $name in l) LR=$OPTARG;; esac
done
python train.py --lr $LR
""", 2, "the arguments of the script"),
    "an argument of the script": ("python train.py --lr $1", 2, "passes the script no arguments"),
    "a shifted argument": (r"""
CONFIG=$1
shift
python train.py --config $CONFIG
""", 2, "the arguments of the script"),
    "a place next to the script": ("""
cd "$(dirname "$0")/.."
python train.py
""", 2, "the name or the arguments"),
    "another MPI": ("mpiexec.hydra -n 4 ./solve", 2, "Open MPI's mpirun only"),
    "another MPI by its module": (r"""
module load intel-mpi/2021
mpirun -np 4 ./solve
""", 3, "another MPI"),
    "an MPI plug-in of the cluster": ("srun --mpi=cray_shasta ./solve", 2, "no counterpart"),
    "several words that a condition decides": (r"""
RESUME=
[ -f last.pt ] && RESUME="--resume last.pt"
python train.py $RESUME
""", 4, "how many words"),
    "several words for a variable": ("""
A="$A $B"
srun --export=ALL,Z=$A python train.py
""", 3, "how many words"),
    "a pattern for files": ("python train.py data/*.png", 2, "which words it becomes"),
    "a loop": (r"""
for seed in 1 2; do
  python train.py --seed $seed
done
""", 3, "in a loop"),
    "two trainings": (r"""
python train.py --seed 1
python train.py --seed 2
""", 3, "line 2 also starts a program"),
    "side by side": (r"""
python train.py --seed 1 &
python train.py --seed 2 &
wait
""", 3, "line 2 also starts a program"),
    "results by a trap": (r"""
trap 'rsync -a $TMPDIR/out/ results/' EXIT
python train.py --out $TMPDIR/out
""", 2, "nothing after the program"),
    "results among all else on the disk": (r"""
python train.py --out $TMPDIR/out
cp $TMPDIR/*.pt results/
""", 3, "cannot copy back"),
    "results of another directory than at the start": (r"""
TMPDIR=$(mktemp -d)
python train.py --out $TMPDIR/out
cp -r $TMPDIR/out results/
""", 4, "cannot copy back"),
    "results that other jobs may write to": (r"""
python train.py
cp -r $TMPDIR/out results
""", 3, "other jobs may also write there"),
    "results by a relative path": (r"""
cd /tmp
python train.py --out out
cp -r out /results
""", 4, "other jobs may also write there"),
    "results in a text and in an argument": (r"""
srun python -c 'train("/tmp/out")' --out /tmp/out
cp -r /tmp/out /results
""", 3, "other jobs may also write there"),
    "results in a job's directory with others that the script makes": (r"""
WORK=/tmp/$USER/$SLURM_JOB_ID
mkdir -p $WORK/out
python train.py --out $WORK/out
cp -r $WORK/out results
""", 5, "lines before the launch also work there"),
    "a text that ends at no character": (r"""
read -r -d '' TEXT <<END
python train.py
END
srun bash -c "$TEXT"
""", 2, "ends with status 1"),
    "results in a directory that only the job knows": (r"""
OUT=$(mktemp -d)
python train.py --out $OUT
mv $OUT results
""", 4, "cannot copy back"),
    "results to another machine": (r"""
python train.py --out $TMPDIR/out
rsync -a $TMPDIR/out/ login1:results/
""", 3, "cannot copy back"),
    "results to a directory that only the job knows": ("""
cd $(cat where)
python train.py --out $TMPDIR/out
cp -r $TMPDIR/out results
""", 4, "cannot copy back"),
    "results in an archive": (r"""
python train.py --out $TMPDIR/out
tar czf out.tgz -C $TMPDIR out
""", 3, "cannot copy back"),
    "results in a condition": (r"""
python train.py --out $TMPDIR/out
if [ -f $TMPDIR/out/best.pt ]; then cp $TMPDIR/out/best.pt .; fi
""", 3, "cannot copy back"),
    "results in a condition, by a variable": (r"""
OUT=$TMPDIR/out
python train.py --out $OUT
if [ -f $OUT/best.pt ]; then cp $OUT/best.pt .; fi
""", 4, "cannot copy back"),
    "fewer GPUs by a variable": (r"""
#SBATCH --gres=gpu:4
export CUDA_VISIBLE_DEVICES=0,1
python train.py
""", 3, "the header asks for 4"),
    "another size of the job in setup": (r"""
#SBATCH --gres=gpu:4 -c 32
WORKERS=$(expr $SLURM_CPUS_PER_TASK - 2)
torchrun --nproc_per_node=4 train.py --workers $WORKERS
""", 3, "SLURM_CPUS_PER_TASK is 32"),
    "an index without an array": (
        "python train.py --seed $SLURM_ARRAY_TASK_ID", 2, "no --array"),
    "standard input": ("python train.py < conf.yaml", 2, "no standard input"),
    "a wrapper around the launcher": ("timeout 60 srun python train.py", 2, "hpml starts itself"),
    "a text that starts the launcher": (
        "bash -c 'cd src && srun python train.py'", 2, "hpml starts itself"),
    "a launcher in a text": (r"""
LAUNCHER="python -m torch.distributed.run --nproc_per_node 8"
srun bash -c "$LAUNCHER train.py"
""", 3, "hpml starts itself"),
    "threads that only the job knows": (r"""
export OMP_NUM_THREADS=$(expr 2 + 1)
python train.py
""", 2, "after environment.setup"),
    "threads that a condition decides": (r"""
if [ -f x ]; then export OMP_NUM_THREADS=3; fi
python train.py
""", 2, "after environment.setup"),
    "arguments that the script sets": (r"""
set -- --lr 1
python train.py "$@"
""", 2, "the arguments of the script"),
    "assignments that the grammar joins to the next line": ("""
A=1 B=2
python train.py $A
""", 2, "cannot read this command"),
    "a translated text": ('python train.py $"x"', 2, "cannot read this command"),
    "the id of the shell": ("python train.py a$$", 2, "which words it becomes"),
    "a translated part": ('python train.py a$"x"', 2, "which words it becomes"),
    "a blank as an argument": ("python train.py \\ & wait", 2, "a blank after a"),
    "a pattern around an expansion": ("python train.py ${A[0]}{1,2}", 2, "which words it becomes"),
    "the home of another user": ("python train.py ~ada/x", 2, "which words it becomes"),
    "output for another program": (
        "srun python train.py | python plot.py", 2, "another program reads"),
}  # fmt: skip
REFUSED: dict[str, tuple[str, int, str]] = {
    name: (script(body), line, part) for name, (body, line, part) in _REFUSED.items()
}
