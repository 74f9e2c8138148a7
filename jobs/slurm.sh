#!/bin/bash
# Train under Slurm: one task per GPU, on any number of nodes.
#   sbatch -A MyProject jobs/slurm.sh --data my.fasta                   1 node with 4 GPUs, SEDD; what follows the
#                       script goes to the training script; without --data: data/uniref50 (python prepare_uniref50.py data/uniref50)
#   sbatch -A MyProject --nodes=4 jobs/slurm.sh --data my.fasta
#   CONFIG=configs/sedd_cpu.yaml RUN_DIR=runs/mine sbatch --gres=none jobs/slurm.sh      without GPUs
#   SCRIPT=train_dpo_ddp.py CONFIG=configs/dpo.yaml sbatch jobs/slurm.sh
# Submit from the repository's folder, where .venv is (`bash jobs/local.sh 1 --help` makes it), or set VENV below, or
# load a module.
#   watch      tail -f logs/sedd-JOBID.out logs/sedd-JOBID.err (slurm-JOBID.out: what Slurm itself has to say)
#   stop       touch RUN_DIR/STOP (saves and ends); scancel JOBID saves too, where Slurm leaves the time (KillWait)
#   continue   the same sbatch again (after STOP: remove that file). At the end of its time a job does so by itself:
#              it saves, and is requeued, until the training is finished (RUN_DIR/DONE) or brings nothing new.
# The exit code is that of the training, see README.md; 3: the pre-flight failed.
#SBATCH --job-name=sedd
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

# What you may want to edit; each can also be given in front of sbatch.
# module load cuda
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                            # more arguments of the training script, separated by blanks
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                       # used where it exists
PYTHON=${PYTHON:-python}
NODES=${NODES:-${SLURM_JOB_NUM_NODES:-1}} # to train on; what is allocated beyond replaces nodes that fail
NPROC=${NPROC:-${SLURM_NTASKS_PER_NODE:-4}} # ranks per node, one per GPU
PREFLIGHT=${PREFLIGHT---preflight}        # or "--preflight --bandwidth"; empty: none
REQUEUE=${REQUEUE:-1}                     # 0: one job, no more
MAX_IDLE=${MAX_IDLE:-3}                   # runs in a row without a new checkpoint that end the chain
SAVE_SECONDS=${SAVE_SECONDS:-300}         # the run stops this long before the job's time is over
AGAIN_ON=${AGAIN_ON:-75 70}               # exit codes after which the job is requeued: stopped in order, watchdog
export WANDB_MODE=${WANDB_MODE:-offline} OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# For debugging:
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=^docker0,lo   # never this form in GLOO_SOCKET_IFNAME, which wants one name
# export CUDA_DEVICE_ORDER=PCI_BUS_ID

set -euo pipefail
# Slurm runs a copy of this script from its own folder, so nothing is read from beside it.

# >>> run: the same lines in aurora.pbs, polaris.pbs, slurm.sh and torchrun_multinode.sh >>>
leave() { set +eu; exit "$1"; }   # in a login shell ~/.bash_logout runs now, and is not written for them

fail() { printf 'job script: %s\n' "$*" >&2; leave 2; }

check_settings() {
  local word
  RUN_DIR=${RUN_DIR%/}
  [ -f "$SCRIPT" ] || fail "SCRIPT=$SCRIPT is not a file in $PWD. Start this from the folder that holds it."
  [ -f "$CONFIG" ] || fail "CONFIG=$CONFIG is not a file in $PWD. Start this from the folder that holds it."
  [[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC is '$NPROC', expected a number of ranks per node, 1 or more."
  [[ $NODES =~ ^[1-9][0-9]*$ ]] || fail "the number of nodes is '$NODES', expected 1 or more."
  command -v "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON is not a program. Load a module, set VENV or PYTHON."
  for word in ${arguments[@]+"${arguments[@]}"}; do   # bash before 4.4 calls an empty array unset
    case $word in
      --fresh) fail "--fresh would start over at every continuation. Move $RUN_DIR away instead." ;;
      --work_dir | --work_dir=* | --output_dir | --output_dir=*)
        fail "give the run folder as RUN_DIR=..., this script looks into it." ;;
      --resume | --resume=*) fail "--resume would be refused at the first continuation. Start from it once by hand." ;;
    esac
  done
  mkdir -p "$(dirname "$RUN_DIR")"
}

guard() {   # ends what should not start (again)
  local mark before='' idle=0 rest=''
  if [ -e "$RUN_DIR/DONE" ]; then
    echo "$RUN_DIR/DONE exists: this run is finished. Remove the file to train longer."
    leave 0
  fi
  [ ! -e "$RUN_DIR/STOP" ] || fail "$RUN_DIR/STOP exists: this run was asked to stop. Remove the file to go on."
  # The file lies beside the run folder, so that a first start finds that folder as it was.
  if [ -e "$RUN_DIR.chain" ]; then read -r before idle rest < "$RUN_DIR.chain" || true; fi
  mark=$(stat -c %i-%Y-%s "$RUN_DIR/checkpoints/last.pt" 2> /dev/null || echo none)
  if [ "$CHAINED" = 1 ] && [ "$mark" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  printf '%s %s %s\n' "$mark" "$idle" "$rest" > "$RUN_DIR.chain"
  [ "$idle" -lt "$MAX_IDLE" ] || fail "the last $idle runs in a row left no new checkpoint in $RUN_DIR: their output
  is in logs/. A start by hand counts anew."
}

train() {   # sets code: what the training says in status.json, else the launcher's; again: 1 where work is left
  local status=$RUN_DIR/status.json told launcher=0
  # An earlier start must not speak for this one. Not removed: a refusal is recorded only where there is such a file.
  if [ -e "$status" ]; then
    printf '{"code": null, "reason": "starting", "step": null}\n' > "$status.$HOSTNAME.$$"
    mv "$status.$HOSTNAME.$$" "$status"
  fi
  launch "$PYTHON" -u "$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"} || launcher=$?
  told=$(sed -n 's/^{"code": *\([^,]*\),.*/\1/p' "$status" 2> /dev/null || true)
  case $told in
    '') conclude "$launcher" "$launcher" ;;                    # a script that writes no status.json
    null) if [ "$launcher" = 2 ]; then conclude 2 2; else conclude "$((launcher ? launcher : 1))" killed; fi ;;
    *) conclude "$told" "$told" ;;
  esac
  echo "$(date '+%F %T') ended: launcher's exit code $launcher, status.json $(cat "$status" 2> /dev/null || echo none)"
}

conclude() {   # conclude CODE OUTCOME: OUTCOME is CODE, or "killed"
  code=$1 again=0
  if [ "$2" = 0 ] && [ -d "$RUN_DIR" ]; then date > "$RUN_DIR/DONE"; fi
  if [[ " $AGAIN_ON " == *" $2 "* ]] && [ ! -e "$RUN_DIR/STOP" ]; then again=1; fi
}
# <<< run <<<

# >>> preflight: the same lines in aurora.pbs, polaris.pbs and slurm.sh >>>
check_hosts() {
  local n
  n=$(wc -l < "$HOSTS")
  [ "$NODES" -le "$n" ] || fail "NODES=$NODES, but the job has $n: $(paste -sd ' ' "$HOSTS")"
}

preflight() {   # leaves in the file HOSTS the NODES hosts to train on, without those that failed
  local suspects=$LOG.suspects words try
  read -r -a words <<< "$PREFLIGHT"
  if [ -n "$PREFLIGHT" ] && ! [ -f test_aurora_ddp.py ]; then
    echo "no pre-flight: there is no test_aurora_ddp.py in $PWD" >&2
    PREFLIGHT=''
  fi
  for try in 1 2; do
    if [ -z "$PREFLIGHT" ]; then break; fi
    echo "pre-flight, try $try, on $(paste -sd ' ' "$HOSTS")"
    rm -f "$suspects"
    if launch "$PYTHON" -u test_aurora_ddp.py "${words[@]}" --work_dir "$RUN_DIR" --suspects "$suspects"; then
      break
    elif [ "$try" = 2 ]; then
      echo "the pre-flight failed twice: nothing is trained here. Suspect hosts: $(paste -sd, "$suspects" 2> /dev/null)" >&2
      return 3
    elif [ -s "$suspects" ]; then
      # By the name's first part: a node file may give more of it than a host itself.
      awk -F. 'NR == FNR { bad[$1]; next } !($1 in bad)' "$suspects" "$HOSTS" > "$HOSTS.left"
      if [ "$(wc -l < "$HOSTS.left")" -ge "$NODES" ]; then
        echo "leaving out $(paste -sd ' ' "$suspects")"
        mv "$HOSTS.left" "$HOSTS"
      else   # it may have been a passing fault: start-ups of oneCCL time out now and then
        rm "$HOSTS.left"
        echo "no node to spare for $(paste -sd ' ' "$suspects"): trying the same ones again. Ask for more nodes than NODES"
      fi
    fi
  done
  head -n "$NODES" "$HOSTS" > "$HOSTS.used"
  mv "$HOSTS.used" "$HOSTS"
}
# <<< preflight <<<

launch() {   # launch COMMAND...: NPROC ranks on each host in the file HOSTS
  local nodes
  nodes=$(wc -l < "$HOSTS")
  export DDP_WORLD_SIZE=$((nodes * NPROC))
  # From Slurm 22.05 on srun may not inherit --cpus-per-task. No --gpus-per-task: it hides the GPUs of a node's tasks
  # from each other. No torchrun inside: it would keep Slurm's signals from the ranks.
  srun --nodes="$nodes" --ntasks="$DDP_WORLD_SIZE" --ntasks-per-node="$NPROC" --nodelist="$(paste -sd, "$HOSTS")" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores --kill-on-bad-exit=1 --wait=60 "$@"
}

set_deadline() {
  local end
  end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) || end=''
  if ! [[ $end =~ ^[0-9]+-[0-9]+-[0-9]+T ]]; then
    echo "squeue tells no end of the job's time ($end): no DDP_DEADLINE, the run is stopped by --signal alone" >&2
    return
  fi
  DDP_DEADLINE=$(($(date -d "$end" +%s) - SAVE_SECONDS))
  export DDP_DEADLINE
  [ "$DDP_DEADLINE" -gt "$(date +%s)" ] || fail "the job's time is not longer than SAVE_SECONDS=$SAVE_SECONDS."
  echo "the run stops and saves at $(date -d "@$DDP_DEADLINE" '+%F %T')"
}

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"
mkdir -p logs
LOG=logs/${SLURM_JOB_NAME}-${SLURM_JOB_ID} HOSTS=$LOG.hosts CHAINED=$((${SLURM_RESTART_COUNT:-0} > 0))
echo "output: $PWD/$LOG.out and .err"
exec >> "$LOG.out" 2>> "$LOG.err"
# shellcheck disable=SC1091
if [ -f "$VENV/bin/activate" ]; then source "$VENV/bin/activate"; fi
read -r -a arguments <<< "$ARGS"
arguments+=("$@")
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$HOSTS"
check_settings
check_hosts
guard
echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST;" \
  "code $(git rev-parse --short HEAD 2> /dev/null || echo not from git); modules ${LOADEDMODULES:-none}"
set_deadline

# scancel, preemption and the end of the time send SIGTERM to this shell too, then it is not for us to requeue.
cancelled=0
trap 'cancelled=1' TERM
trap : USR1
if preflight; then train; else conclude 3 3; fi
if [ "$again" = 1 ] && [ "$REQUEUE" = 1 ] && [ "$cancelled" = 0 ]; then
  echo "exit code $code: requeued, to go on from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID" || echo "Slurm did not requeue it: give the same sbatch again" >&2
fi
exit "$code"
