#!/bin/bash
# Train under Slurm: one task per GPU, on any number of nodes. More in docs/machines.md.
#   sbatch --nodes=2 jobs/slurm.sh --data my.fasta     (else data/uniref50)
#   CONFIG=configs/sedd_cpu.yaml sbatch --gres=none jobs/slurm.sh --data my.fasta     without GPUs
#   DRY_RUN=2 bash jobs/slurm.sh       anywhere: shows the launch lines for 2 nodes
#   watch      tail -f logs/CONFIG-JOBID.log       (exit codes: docs/runs.md)
#   stop       touch RUN_DIR/STOP; or scancel JOBID, if Slurm's KillWait leaves time to save
#   continue   remove STOP, give the same sbatch. A job with steps left is requeued
# Edit account, GPUs, cores, time, modules. `bash jobs/local.sh 1 --help` makes .venv once.
#SBATCH --account=YOUR_PROJECT
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
# shellcheck disable=SC2046,SC2206,SC2207   # words are split on purpose
if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

# Settings; each can also be given in front of sbatch.
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                       # more arguments of SCRIPT, separated by blanks
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                  # none: the Python of a module or a container
PYTHON=${PYTHON:-python}             # also several words, for a container: docs/machines.md
asked() { sed -n "s/^#SBATCH --$1=\([0-9]*\).*/\1/p" "$0"; }     # by this script's lines
NPROC=${NPROC:-${SLURM_NTASKS_PER_NODE:-$(asked ntasks-per-node)}}    # ranks per node, one per GPU
CORES=${SLURM_CPUS_PER_TASK:-$(asked cpus-per-task)}    # of a rank
SAVE_SECONDS=${SAVE_SECONDS:-300}    # the run saves so long before the end; --signal above: at 180
STARTS=${STARTS:-50}                 # most starts of the job; 1: it is not requeued
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CORES} WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo    # the ^ form never in GLOO_SOCKET_IFNAME

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
cancelled=no
if [ -n "${DRY_RUN:-}" ]; then
  hosts=($(seq -f host%g "$DRY_RUN"))
elif [ -n "${SLURM_JOB_ID:-}" ]; then
  hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
  log=logs/$(basename "${CONFIG%.*}")-$SLURM_JOB_ID.log
  mkdir -p logs && : >> "$log" || exit 2
  echo "output: $PWD/$log"
  exec >> "$log" 2>&1
  # module load cuda || exit 2
  if command -v module > /dev/null; then module list; fi
  echo "$(date) job $SLURM_JOB_ID on ${hosts[*]}"
  git describe --always --dirty 2> /dev/null || echo "the code has no git revision"
  ulimit -c 0                        # no core files
  # The job's end. The last task of an array has the number of the whole array, so name the task.
  job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
  end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$job" --format=%e) || end=''
  ends=$(date -d "${end:-unknown}" +%s) || ends=$(($(date +%s) + 31536000))    # unknown: a year
  export DDP_DEADLINE=$((ends - SAVE_SECONDS))
  trap '[ "$(date +%s)" -ge "$ends" ] || cancelled=yes' TERM     # by scancel; later by the time
else
  echo "submit this with sbatch, or see its first lines: bash $0 --help" >&2
  exit 2
fi
set -euf                             # modules fail with it. -f: no patterns in ARGS
case $VENV in /*) PATH=$VENV/bin:$PATH ;; *) PATH=$PWD/$VENV/bin:$PATH ;; esac

# From Slurm 22.05 on srun may not inherit --cpus-per-task. --gpus-per-task would hide the GPUs of a
# node's tasks from each other. torchrun inside srun would keep signals from the ranks.
# --kill-on-bad-exit would call a run that stops in good order (75) CANCELLED. When a rank fails,
# the rank or its guard cancels the step, and --wait ends what is left a minute after the first end.
launch() {   # launch WORD...: start these words NPROC times on each of `hosts`
  export DDP_WORLD_SIZE=$((${#hosts[@]} * NPROC))
  set -- srun --export=ALL --nodes="${#hosts[@]}" --nodelist="$(IFS=,; echo "${hosts[*]}")" \
    --ntasks="$DDP_WORLD_SIZE" --ntasks-per-node="$NPROC" --cpus-per-task="$CORES" \
    --cpu-bind=cores --kill-on-bad-exit=0 --wait=60 "$@"
  printf '%q ' "$@"; echo
  [ -n "${DRY_RUN:-}" ] || "$@"
}
train=($PYTHON -u "$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" $ARGS "$@")
run() { launch "${train[@]}"; }
# Optional: checks before the run, and a start in this job without a bad host.
more=jobs/lib/again.sh
if [ -f $more ]; then source $more; else echo "without $more: nothing is checked"; fi
state() { stat -c '%i %y' "$RUN_DIR/$1" 2> /dev/null || :; }      # differs after each write
status=$(state status.json)
last=$(state checkpoints/last.pt)
code=0
run || code=$?
[ -z "${DRY_RUN:-}" ] || exit "$code"

# The next start. status.json says more than the launcher's code: 75 stopped with steps left, 70 no
# progress, null killed, 1 with the host of a rank that died. After an exception (1) none follows.
said=''
[ "$(state status.json)" = "$status" ] || said=$(cat "$RUN_DIR/status.json") || :
if [[ $said =~ \"code\":\ ([0-9]+) ]]; then code=${BASH_REMATCH[1]}; fi
if [[ $said =~ \"code\":\ null && $code = 0 ]]; then code=1; fi     # killed without a word
next=yes                             # else the last reason that applies
[ "$(state checkpoints/last.pt)" != "$last" ] || next="no: there is no new checkpoint"
[ $((STARTS - ${SLURM_RESTART_COUNT:-0})) -gt 1 ] || next="no: no start is left of STARTS"
[ ! -e "$RUN_DIR/STOP" ] || next="no: there is a file $RUN_DIR/STOP"
[[ $said =~ \"code\":\ (75|70|null|1,.*\"suspects\":\ \"[^\"]) ]] || next="no: it ended with $code"
[ "$cancelled" = no ] || next="no: the job was cancelled"
echo "$(date) exit code $code; requeued: $next"
if [ "$next" = yes ]; then
  trap '' TERM                       # which Slurm sends to this script then
  scontrol requeue "$job" || echo "Slurm did not requeue it: give the same sbatch again"
fi
exit "$code"
