#!/bin/bash
#SBATCH --job-name=probe
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=4
#SBATCH --mem=69632M
#SBATCH --time=01:00:00
#SBATCH --array=0-28:4
#SBATCH --open-mode=append
#
# Written by hpml VERSION. Kept with its submission, to the byte what sbatch was given.
# By hand: `hpml render -o DIR`, then `cd DIR && sbatch job.sh`.

# shellcheck disable=SC2016  # the job's values stand in single quotes: a $ in them is text
set -euo pipefail

# The submission's directory is the job's first working directory. It holds hpml-node.pyz: all that
# the nodes need of hpml, run by hpml's own interpreter, whatever is activated below.
hpml_submission=$PWD
hpml_archive=$hpml_submission/hpml-node.pyz
hpml_interpreter=/opt/hpml/bin/python3.11
[[ -x $hpml_interpreter ]] || hpml_interpreter=python3
hpml_python=("$hpml_interpreter" -I -S "$hpml_archive")
if [[ ! -r $hpml_archive ]]; then
  echo "hpml: no hpml-node.pyz in $PWD: start this script where 'hpml render -o DIR' put both" >&2
  exit 78
fi
# A step without --cpus-per-task has all CPUs of the job on its node; with it, or with one of these
# variables, it has one task's, and nothing in it can have more. So no srun here is told.
unset -v SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
# hpml-bind binds, not srun. On a cluster that cannot bind, srun says so at each --cpu-bind: there it
# is left out. This call prints srun's help on that option and starts nothing.
hpml_unbound=(--cpu-bind=none)
[[ $(srun --cpu-bind=none,help true 2>&1) != *'lacks support for cpu binding'* ]] || hpml_unbound=()

# First act: claim this attempt. A second job of the same run finds it claimed and ends here.
hpml_attempt=$("${hpml_python[@]}" claim "$hpml_submission")
hpml_run=${hpml_attempt%/attempts/*}
hpml_key=${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID
export HPML_ATTEMPT_DIR=$hpml_attempt HPML_RUN_DIR=$hpml_run HPML_JOB_KEY=$hpml_key
# When the job began, and when its time limit ends it, where Slurm does not say so.
: "${SLURM_JOB_START_TIME:=$(date +%s)}"
: "${SLURM_JOB_END_TIME:=$((SLURM_JOB_START_TIME + 3600))}"
export SLURM_JOB_START_TIME SLURM_JOB_END_TIME

# Last act, however it ends: stop the agents, which remove what they staged, and write the end down.
hpml_agent='' hpml_ranks='' hpml_reason='' hpml_at_end=''
# shellcheck disable=SC2317,SC2329  # traps call them
hpml_stop_agents() {
  [[ -n $hpml_agent ]] || return 0
  : >"$hpml_attempt/over"
  kill -USR1 "$hpml_agent" 2>/dev/null || :
  wait "$hpml_agent" || :
}
# shellcheck disable=SC2317,SC2329
hpml_finish() {
  local code=$? own=''
  trap - EXIT
  trap '' TERM INT HUP QUIT USR1 USR2
  [[ $code != 0 || -n $hpml_at_end ]] || code=1 hpml_reason=${hpml_reason:-the script ended before its ranks}
  [[ $code != 0 ]] || hpml_stop_agents
  own=$("${hpml_python[@]}" finish "$hpml_attempt" "$code" "$hpml_reason" torchrun) || :
  [[ $code == 0 ]] || hpml_stop_agents  # after the record: SIGKILL may come soon
  exit "${own:-$code}"
}
# shellcheck disable=SC2317,SC2329
hpml_fail() { # STATUS REASON …: ends the job and records why
  local IFS=' '
  hpml_reason="${*:2}"
  echo "hpml: $hpml_reason" >&2
  exit "$1"
}
# shellcheck disable=SC2317,SC2329
hpml_terminate() {
  hpml_reason="the script got SIG$1"
  [[ -z $hpml_ranks ]] || kill -TERM "$hpml_ranks" 2>/dev/null || :
  exit "$((128 + $(kill -l "$1")))"
}
# Users ask their ranks for a checkpoint by one of these: passed on, and the job goes on.
# shellcheck disable=SC2317,SC2329
hpml_pass_on() {
  hpml_passed=1
  [[ -z $hpml_ranks ]] || kill -s "$1" "$hpml_ranks" 2>/dev/null || :
  "${hpml_python[@]}" note-signal "$hpml_attempt" "$1" || :
}
trap hpml_finish EXIT
trap 'hpml_terminate TERM' TERM
trap 'hpml_terminate INT' INT
trap 'hpml_terminate HUP' HUP
trap 'hpml_terminate QUIT' QUIT
trap '' USR1 USR2  # until the agents listen

# One agent per node, for as long as the job: stages the data, plans where the ranks run and looks
# whether they do, listens to them, cleans up.
hpml_shm=/dev/shm
hpml_local="${LOCAL_SCRATCH:?of the site profile is not set in this job}"
export HPML_STAGE_TRAIN="$hpml_local"/hpml-$UID/$hpml_key/train
# test: target auto is shm here: 4G are at most half of the 436G left.
export HPML_STAGE_TEST="$hpml_shm"/hpml-$UID/$hpml_key/test
export HPML_STAGE_MESH="$hpml_local"/hpml-$UID/$hpml_key/mesh
# Newer sruns take a rank's number of CPUs from the environment; the agent has to see all of the job's.
env --unset=SLURM_CPUS_PER_TASK --unset=SRUN_CPUS_PER_TASK \
  srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
  --ntasks-per-node=1 "${hpml_unbound[@]}" --mpi=none --kill-on-bad-exit=1 --export=ALL \
  bash -c 'trap "" USR1 USR2; exec "$@"' agent "${hpml_python[@]}" agent "$hpml_attempt" \
  --bind '{"ranks": 4, "policy": "gpu-local", "verify": "warn"}' \
  --site '{"opens_per_second": 2000, "opens_per_second_per_job": 16000, "metadata_rate": 50000, "shared_rate": 21474836480, "link_rate": 10737418240, "disk_rate": 2147483648, "array_jitter": 60, "array_tasks": 8}' \
  --shm "$hpml_shm" \
  --local "$hpml_local" \
  --stage '{"name": "train", "source": "/data/train", "target": "local", "kind": "auto", "keep": true}' \
  --stage '{"name": "test", "source": "/data/test.tar", "target": "shm", "kind": "auto", "hash": false}' \
  --stage '{"name": "mesh", "source": "/data/it'"'"'s", "target": "local", "kind": "auto", "distribution": "chain", "outside_links": true}' &
hpml_agent=$!
trap 'hpml_pass_on USR1' USR1
trap 'hpml_pass_on USR2' USR2

# What the ranks find. hpml-bind makes OMP_NUM_THREADS that of each rank's plan, unless the job sets it.
cd -- /home/me
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# A GPU's index is its place on the PCI bus, as for nvidia-smi, Slurm and the plan.
export CUDA_DEVICE_ORDER="${CUDA_DEVICE_ORDER:-PCI_BUS_ID}"

# Ranks start when every node is ready, or not at all.
"${hpml_python[@]}" wait-ready "$hpml_attempt" "$SLURM_NNODES" "$hpml_agent"

# The first node of the allocation, which runs this script; a port below the ephemeral range, free now.
hpml_rendezvous=$("${hpml_python[@]}" rendezvous "$hpml_attempt")
export MASTER_ADDR=${hpml_rendezvous% *} MASTER_PORT=${hpml_rendezvous#* }

hpml_container=()
# hpml-bind binds each rank as the plan of its node says, then becomes it.
hpml_bind=("$hpml_interpreter" -I -S
  -c 'import sys; sys.path.append(sys.argv.pop(1)); from hpml_orchestrator.node.bind import main; sys.exit(main())'
  "$hpml_archive" "$hpml_attempt" --)
hpml_command=(
  python
  /w/train.py
)
hpml_before=$!
# One torchrun per node starts the ranks there; each node's number exists inside its task only. Signals
# to the step reach torchrun and the ranks: those that are for the ranks must not end torchrun.
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
  "${hpml_unbound[@]}" --mpi=none \
  --kill-on-bad-exit=1 --wait=60 --export=ALL \
  bash -c 'trap "" USR1 USR2; export PET_NODE_RANK=$SLURM_NODEID; exec "$@"' torchrun "${hpml_container[@]}" \
  python -m torch.distributed.run \
  --nnodes="$SLURM_NNODES" --nproc-per-node=4 \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python \
  --log-dir="$hpml_attempt/torchrun" \
  "${hpml_bind[@]}" "${hpml_command[@]}" &
hpml_ranks=$!
if [[ $hpml_ranks == "${hpml_before:-$hpml_agent}" ]]; then
  hpml_ranks=''
  hpml_fail 78 "the template's block 'ranks' started nothing in the background: end its command with &"
fi
hpml_passed=1
while [[ -n $hpml_passed ]]; do  # a signal that is passed on ends `wait` early
  hpml_passed='' hpml_code=0
  wait "$hpml_ranks" || hpml_code=$?
done
hpml_ranks='' hpml_at_end=1
exit "$hpml_code"
