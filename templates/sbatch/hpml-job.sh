# shellcheck shell=bash
# The functions of a batch script of hpml. `job.sh` sources this file from the directory of its
# submission, under `set -euo pipefail`, and calls them in this order:
#
#   hpml_begin        claim this attempt; from here on the end of the script is recorded
#   hpml_checkpoints  name the directory of checkpoints: this run saves and continues
#   hpml_agents       start one agent per node, which stages the data and plans the ranks
#   hpml_module_init  find the `module` command; hpml_load_module, hpml_activate_conda
#   hpml_setup_begin  … hpml_setup_end: around the lines of `environment.setup`
#   hpml_wait_ready   wait until every node is ready, and export where it has the data
#   hpml_rendezvous   choose address and port of the process group
#   hpml_run          start the ranks, wait for them, and end the script with their status
#
# hpml_fail ends the script with a reason at any time.

# Code of hpml-bind, which binds a rank and then becomes it. Running the archive itself would import
# `runpy`, a third of a rank's start.
hpml_bind_code='import sys; sys.path.append(sys.argv.pop(1)); from hpml_orchestrator.node.bind import main; sys.exit(main())'

# Code of each node's task of the agents' step. An agent that is killed while the ranks run, as when memory
# runs out, is started again: without it nobody would ask them to save, watch them, or remove their data.
# shellcheck disable=SC2016  # the task expands it
hpml_agent_code='
trap "" USR1 USR2
trap : TERM INT HUP QUIT
for pause in {0..5}; do
  status=0
  "$@" || status=$?
  [[ $status -gt 128 && -e $HPML_ATTEMPT_DIR/nodes/${SLURMD_NODENAME:-}.ready.json ]] || exit "$status"
  echo "hpml: $SLURMD_NODENAME: the agent was killed (status $status); the ranks continue" >&2
  sleep "$pause"
done
echo "hpml: $SLURMD_NODENAME: the agent is not started again: no rank is asked to save any more" >&2
exit "$status"'

# hpml_begin PYTHON SECONDS: claim this attempt. Of two jobs of one run the second ends here.
#   PYTHON   runs hpml's own parts, whatever the script activates later; else python3
#   SECONDS  the time limit
# Sets hpml_submission, hpml_python (a command of hpml-node.pyz follows), hpml_bind (a rank's command
# follows) and hpml_unbound (for each srun); exports HPML_ATTEMPT_DIR, HPML_RUN_DIR and HPML_JOB_KEY.
hpml_begin() {
  local archive=$PWD/hpml-node.pyz python=$1 name
  hpml_submission=$PWD hpml_saves='' hpml_agent='' hpml_ranks='' hpml_passed='' hpml_reason='' hpml_over=''
  for name in hpml-node.pyz agent.json; do
    if [[ ! -r $PWD/$name ]]; then
      echo "hpml: no $name in $PWD: start job.sh in the directory that 'hpml render -o DIR' wrote" >&2
      exit 78
    fi
  done
  [[ -x $python ]] || python=python3
  hpml_python=("$python" -I -S "$archive")

  # A step without --cpus-per-task has all CPUs of the job on its node. With it, or with one of these
  # variables, it has one task's, and nothing in it can have more: so no srun here has it.
  unset -v SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
  # hpml-bind binds, not srun. On a cluster that cannot bind, srun complains about each --cpu-bind: there
  # it is left out. This call prints srun's help on that option and starts nothing.
  hpml_unbound=(--cpu-bind=none)
  [[ $(srun --cpu-bind=none,help true 2>&1) != *'lacks support for cpu binding'* ]] || hpml_unbound=()

  HPML_ATTEMPT_DIR=$("${hpml_python[@]}" claim "$hpml_submission")
  export HPML_ATTEMPT_DIR HPML_RUN_DIR=${HPML_ATTEMPT_DIR%/attempts/*}
  export HPML_JOB_KEY=${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID
  # When the job began, and when its time limit ends it, if Slurm does not set them.
  export SLURM_JOB_START_TIME=${SLURM_JOB_START_TIME:-$(date +%s)}
  export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$((SLURM_JOB_START_TIME + $2))}
  # shellcheck disable=SC2034  # job.sh uses it
  hpml_bind=("$python" -I -S -c "$hpml_bind_code" "$archive" "$HPML_ATTEMPT_DIR" --)

  trap hpml_finish EXIT
  trap 'hpml_terminate TERM' TERM
  trap 'hpml_terminate INT' INT
  trap 'hpml_terminate HUP' HUP
  trap 'hpml_terminate QUIT' QUIT
  trap '' USR1 USR2  # until the agents listen
}

# hpml_checkpoints DIRECTORY: make and export the directory of checkpoints. A run that has one continues after
# the ends that agent.json lists.
hpml_checkpoints() {
  hpml_saves=1
  export HPML_CHECKPOINT_DIR=$1
  mkdir -p -- "$1" || hpml_fail 78 'cannot make the directory of checkpoints' "$1"
}

# hpml_fail STATUS REASON …: end the script with that status, and record the reason.
hpml_fail() {
  local IFS=' '
  hpml_reason="${*:2}"
  echo "hpml: $hpml_reason" >&2
  exit "$1"
}

# Trap of EXIT: stop the agents and record how the job ended.
hpml_finish() {
  local code=$? own=''
  trap - EXIT
  trap '' TERM INT HUP QUIT USR1 USR2
  if [[ $code == 0 && -z $hpml_over ]]; then
    code=1 hpml_reason=${hpml_reason:-the script ended before its ranks: hpml_run has to start them}
    echo "hpml: $hpml_reason" >&2
  fi
  [[ $code != 0 ]] || hpml_stop_agents
  own=$("${hpml_python[@]}" finish "$HPML_ATTEMPT_DIR" "$hpml_submission" "$code" "$hpml_reason") || :
  [[ $code == 0 ]] || hpml_stop_agents  # after the record: SIGKILL may come soon
  # If the run continues, this job is requeued, or another one is submitted that continues it.
  [[ -z $hpml_saves ]] ||
    own=$("${hpml_python[@]}" go-on "$HPML_ATTEMPT_DIR" "$hpml_submission" "${own:-$code}") || own=75
  exit "${own:-$code}"
}

# Stop the agents, which remove what they staged.
hpml_stop_agents() {
  [[ -n $hpml_agent ]] || return 0
  : >|"$HPML_ATTEMPT_DIR/over"
  kill -USR1 "$hpml_agent" 2>/dev/null || :
  wait "$hpml_agent" || :
}

# hpml_terminate SIGNAL: trap of the signals that end the job; hpml_finish follows.
hpml_terminate() {
  hpml_reason="the script got SIG$1"
  if [[ $1 == TERM && -n $hpml_saves && -n $hpml_ranks ]] && kill -0 "$hpml_agent" 2>/dev/null; then
    # The agents find out why: they let the ranks save, or end them at once if the job is cancelled. Without
    # them the ranks would run until SIGKILL, which this script would not survive either.
    # No `return` here: in a trap it would end `wait` and the function around it, too (bash 5.2).
    hpml_passed=1
    "${hpml_python[@]}" terminated "$HPML_ATTEMPT_DIR" || :
  else
    [[ -z $hpml_ranks ]] || kill -TERM "$hpml_ranks" 2>/dev/null || :
    exit "$((128 + $(kill -l "$1")))"
  fi
}

# hpml_pass_on SIGNAL: trap of USR1 and USR2, by which users ask their ranks for something; the job continues.
hpml_pass_on() {
  hpml_passed=1
  [[ -z $hpml_ranks ]] || kill -s "$1" "$hpml_ranks" 2>/dev/null || :
  "${hpml_python[@]}" note-signal "$HPML_ATTEMPT_DIR" "$1" || :
}

# hpml_agents [--shm DIRECTORY] [--local DIRECTORY] [--job-directory shm|local]… [--collect SOURCE TARGET]…:
# start one agent per node in the background, for as long as the job. All else is in agent.json.
# Sets hpml_shield (a launcher follows) and hpml_wait, for srun's --wait.
hpml_agents() {
  # shellcheck disable=SC2034  # job.sh uses both
  if [[ -z $hpml_saves ]]; then
    hpml_shield=() hpml_wait=60
  else
    # SIGTERM may mean that the ranks save and stop, so it must end no launcher. They need not end together.
    hpml_shield=("${hpml_python[@]}" shield) hpml_wait=0
  fi
  # Newer sruns take a rank's number of CPUs from the environment; the agent has to see all of the job's.
  env --unset=SLURM_CPUS_PER_TASK --unset=SRUN_CPUS_PER_TASK \
    srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    "${hpml_unbound[@]}" --mpi=none --kill-on-bad-exit=1 --export=ALL \
    bash -c "$hpml_agent_code" agent "${hpml_python[@]}" agent "$HPML_ATTEMPT_DIR" "$hpml_submission" "$@" &
  hpml_agent=$!
  trap 'hpml_pass_on USR1' USR1
  trap 'hpml_pass_on USR2' USR2
}

# Print the file that defines the `module` command; /dev/null if the shell has it or none is found.
hpml_module_init() {
  local file
  if ! type module >/dev/null 2>&1; then
    for file in "${MODULESHOME:+$MODULESHOME/init/bash}" "${LMOD_PKG:+$LMOD_PKG/init/bash}" \
      /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/modules/init/bash; do
      [[ -z $file || ! -r $file ]] || { echo "$file" && return; }
    done
  fi
  echo /dev/null
}

# hpml_load_module NAME: load a module or end the job. Version 3 of Modules prints an error and returns 0.
hpml_load_module() {
  local hpml_said=$HPML_ATTEMPT_DIR/module.err hpml_status=0
  module load "$1" 2>"$hpml_said" || hpml_status=$?
  if [[ $hpml_status == 0 && ":${LOADEDMODULES-}:" != *":$1"[:/]* ]] && grep -q ERROR "$hpml_said"; then
    hpml_status=1
  fi
  cat "$hpml_said" >&2
  rm -f "$hpml_said"
  [[ $hpml_status == 0 ]] || hpml_fail "$hpml_status" 'cannot load the module' "$1"
}

# hpml_activate_conda NAME|PREFIX: activate a conda environment or end the job. A PREFIX, as micromamba or
# pixi makes them, needs no conda: then do what `conda activate` does.
hpml_activate_conda() {
  local hpml_base hpml_file
  if type "${CONDA_EXE:-conda}" >/dev/null 2>&1; then
    # shellcheck source=/dev/null
    { hpml_base=$("${CONDA_EXE:-conda}" info --base) && source "$hpml_base/etc/profile.d/conda.sh" &&
      conda activate "$1"; } || hpml_fail 78 'cannot activate the conda environment' "$1"
    return
  fi
  [[ $1 == /* ]] || hpml_fail 78 "no conda on PATH: load its module first, or give the environment's path"
  [[ -d $1/conda-meta ]] || hpml_fail 78 'not a conda environment:' "$1"
  export CONDA_PREFIX=$1 CONDA_DEFAULT_ENV=$1 CONDA_SHLVL=1 PATH=$1/bin:$PATH
  for hpml_file in "$1"/etc/conda/activate.d/*.sh; do
    # shellcheck source=/dev/null
    [[ ! -r $hpml_file ]] || source "$hpml_file"
  done
}

# hpml_setup_begin "$LINENO": the lines of environment.setup follow. One that fails ends the job; of a file
# that is sourced its status counts. Traps stay hpml's, and `wait` does not wait for hpml's agents.
hpml_setup_begin() {
  hpml_first=$1 hpml_reason='environment.setup ended the script'
  # shellcheck disable=SC2064  # the caller has quoted it
  trap() { ((BASH_SUBSHELL == 0)) || builtin trap "$@"; }
  # shellcheck disable=SC2329  # the lines call it
  wait() {
    if (($#)); then builtin wait "$@"; return; fi
    local pid
    for pid in $(jobs -p); do [[ $pid == "$hpml_agent" ]] || builtin wait "$pid" || :; done
  }
  set +eu -E
  builtin trap 'hpml_setup_failed "$?" "$LINENO" "${BASH_SOURCE[0]}" "$BASH_SUBSHELL"' ERR
}

# hpml_setup_failed STATUS LINE FILE SUBSHELL: trap of ERR, ends the job with the line of environment.setup
# that failed. What fails inside a sourced file or a subshell is not such a line.
hpml_setup_failed() {
  [[ $3 == "$0" && $4 == 0 ]] || return 0
  hpml_reason="environment.setup, line $(($2 - hpml_first)), exited with $1"
  echo "hpml: ${hpml_reason/, exited/: exited}: $(sed -n "${2}s/^[[:blank:]]*//p" "$0")" >&2
  exit "$1"
}

# Undo hpml_setup_begin, and the shell options that the lines set.
hpml_setup_end() {
  unset -f trap wait
  trap - ERR
  set +Exv
  set -euo pipefail
  IFS=$' \t\n' hpml_reason=''
}

# Wait until every node is ready: then the ranks start, or none does.
hpml_wait_ready() {
  local paths
  paths=$("${hpml_python[@]}" wait-ready "$HPML_ATTEMPT_DIR" "$SLURM_NNODES" "$hpml_agent")
  eval "$paths"
}

# Export MASTER_ADDR, the first node of the job, and MASTER_PORT, one below the ephemeral range that is free now.
hpml_rendezvous() {
  local both
  both=$("${hpml_python[@]}" rendezvous "$HPML_ATTEMPT_DIR")
  export MASTER_ADDR=${both% *} MASTER_PORT=${both#* }
}

# hpml_container_python PYTHON: the container's Python runs what of hpml the container runs.
hpml_container_python() {
  # shellcheck disable=SC2034  # job.sh uses it
  hpml_bind[0]=$1
  [[ -z ${hpml_shield[*]} ]] || hpml_shield[0]=$1
}

# hpml_enroot NAME …: write the file for `enroot start --conf`, whose functions enroot calls. Without them a
# container has no variable of the job. The NAMEs are the job's also if the image sets them.
hpml_enroot() {
  {
    printf 'hpml_own=" %s "\n' "$*"
    cat <<'CONF'
environ() {
  local name
  sed -n 's/^PATH=/HPML_IMAGE_PATH=/p' "$ENROOT_ENVIRON"
  for name in $(compgen -e); do
    if [[ $hpml_own != *" $name "* ]]; then
      [[ ! $name =~ ^(PATH|LD_.*|HOME|SHELL|PWD|OLDPWD|SHLVL|_)$ ]] || continue
      ! grep -q "^$name=" "$ENROOT_ENVIRON" || continue
    fi
    [[ ${!name} == *$'\n'* ]] || printf '%s="%s"\n' "$name" "${!name}"  # enroot reads lines
  done
}
# In place of the image's entry point, by its login shell, whose profile may have replaced PATH.
rc() {
  PATH=${HPML_IMAGE_PATH:-$PATH}
  cd -- "$1" && shift && exec "$@"
}
CONF
  } >"$HPML_ATTEMPT_DIR/enroot.conf"
}

# End the job unless Open MPI's mpirun is on PATH; shield its daemons.
hpml_need_mpirun() {
  local version
  version=$(timeout 60 mpirun --version 2>&1) || :
  [[ $version == *'Open MPI'* ]] ||
    hpml_fail 78 'no mpirun of Open MPI on PATH that answers within 60 s: load its module in environment.modules'
  # Its daemons are tasks of an srun, which get Slurm's SIGTERM. Versions before 5 read the first variable.
  # The value is split at each space.
  if [[ -n $hpml_saves && ${hpml_python[0]}${hpml_python[3]} != *[[:space:]]* ]]; then
    export OMPI_MCA_orte_launch_agent="${OMPI_MCA_orte_launch_agent:-${hpml_python[*]} shield orted}"
    export PRTE_MCA_prte_launch_agent="${PRTE_MCA_prte_launch_agent:-${hpml_python[*]} shield prted}"
  fi
}

# hpml_run COMMAND …: start the ranks by this command, wait for them, and end the script with its status.
hpml_run() {
  local code=0
  ${hpml_saves:+"${hpml_python[@]}" shield} "$@" &
  hpml_ranks=$!
  hpml_passed=1
  while [[ -n $hpml_passed ]]; do  # a signal that is passed on ends `wait` early
    hpml_passed='' code=0
    wait "$hpml_ranks" || code=$?
  done
  hpml_ranks='' hpml_over=1
  exit "$code"
}
