#!/bin/bash
# Train under Slurm: one task per GPU, on any number of nodes. More in docs/machines.md.
#   sbatch -A MyProject --nodes=2 jobs/slurm.sh --data my.fasta     (else data/uniref50)
#   CONFIG=configs/sedd_cpu.yaml sbatch --gres=none jobs/slurm.sh --data my.fasta     without GPUs
#   DRY_RUN=2 bash jobs/slurm.sh       anywhere: settings and launch line for 2 nodes
#   watch      tail -f logs/CONFIG-JOBID.log       (exit codes: README.md)
#   stop       touch RUN_DIR/STOP; or scancel JOBID, if Slurm's KillWait leaves time to save
#   continue   remove STOP, give the same sbatch. Before its time is over a job saves, and is
#              requeued if steps are left and it wrote a new checkpoint.
# Submit from the repository's folder. .venv: `bash jobs/local.sh 1 --help` makes it.
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
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                        # more arguments of SCRIPT, separated by blanks
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                   # used if it exists
PYTHON=${PYTHON:-python}
NPROC=${NPROC:-${SLURM_NTASKS_PER_NODE:-4}}   # ranks per node, one per GPU
PREFLIGHT=${PREFLIGHT---preflight}    # or "--preflight --bandwidth"; empty: none
SAVE_SECONDS=${SAVE_SECONDS:-300}     # the run saves and stops so long before the job's end
REQUEUE=${REQUEUE:-1}                 # 0: never requeue
AGAIN_ON=${AGAIN_ON-75 70}            # codes after which it is requeued: docs/faults.md
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo    # the ^ form never in GLOO_SOCKET_IFNAME

[ -n "${SLURM_JOB_ID:-}${DRY_RUN:-}" ] || { echo "submit this with sbatch" >&2; exit 2; }
# module load cuda
set -euo pipefail
fail() { printf 'job script: %s\n' "$*" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f $SCRIPT && -f $CONFIG ]] || fail "SCRIPT=$SCRIPT or CONFIG=$CONFIG is not a file in $PWD.
  Submit from the folder that holds them."
[[ $NPROC,${DRY_RUN:-1},$SAVE_SECONDS =~ ^[1-9][0-9]*,[1-9][0-9]*,(0|[1-9][0-9]*)$ ]] ||
  fail "NPROC=$NPROC, SAVE_SECONDS=$SAVE_SECONDS or DRY_RUN=${DRY_RUN:-} is not a number."
[[ ! " $ARGS $* " =~ [[:space:]](--(config|work_dir|output_dir|fresh|resume))[=[:space:]] ]] ||
  fail "ARGS holds ${BASH_REMATCH[1]}. Give CONFIG=... and RUN_DIR=...; what no next start may
  repeat, --fresh and --resume, once by hand."
case $VENV in /*) PATH=$VENV/bin:$PATH ;; *) PATH=$PWD/$VENV/bin:$PATH ;; esac
nodes=${SLURM_JOB_NUM_NODES:-$DRY_RUN}
export DDP_WORLD_SIZE=$((nodes * NPROC))

# From Slurm 22.05 on srun may not inherit --cpus-per-task. --gpus-per-task would hide the GPUs of a
# node's tasks from each other. torchrun inside srun would keep signals from the ranks.
launch=(srun --export=ALL --nodes="$nodes" --ntasks="$DDP_WORLD_SIZE" --ntasks-per-node="$NPROC"
  --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores --kill-on-bad-exit=1 --wait=60
  "$PYTHON" -u)
read -r -d '' -a arguments <<< "$ARGS" || :    # also if it has several lines
arguments+=("$@")
training=("$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${launch[@]}" "${training[@]}"
  echo; env | grep -E '^(DDP|NCCL|OMP|WANDB)_' | sort; exit
fi
mkdir -p logs "$(dirname "$RUN_DIR")"
log=logs/$(basename "${CONFIG%.*}")-$SLURM_JOB_ID.log
echo "output: $PWD/$log"
exec >> "$log" 2>&1
echo "$(date) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) || end=''
if [[ $end =~ ^[0-9]+-[0-9]+-[0-9]+T ]]; then
  DDP_DEADLINE=$(($(date -d "$end" +%s) - SAVE_SECONDS))
  [ "$DDP_DEADLINE" -gt "$(date +%s)" ] || fail "the job's time is not longer than SAVE_SECONDS."
  export DDP_DEADLINE
  echo "the run stops and saves at $(date -d "@$DDP_DEADLINE")"
else
  echo "squeue does not know when the job ends: the run is stopped by --signal alone"
fi

if [ -n "$PREFLIGHT" ]; then          # shellcheck disable=SC2086
  "${launch[@]}" test_aurora_ddp.py $PREFLIGHT --work_dir "$RUN_DIR" || exit $(($? == 2 ? 2 : 3))
fi
written() { stat -c '%i %y' "$1" 2> /dev/null || echo never; }   # changes with each write
status=$RUN_DIR/status.json last=$RUN_DIR/checkpoints/last.pt cancelled='' code=0
status_before=$(written "$status") last_before=$(written "$last")
finished=$(grep -s '^{"code": 0,' "$status") || :    # a refused start restores this line
trap 'cancelled=yes' TERM             # scancel or preemption: do not requeue here
"${launch[@]}" "${training[@]}" || code=$?
outcome=$code                         # status.json, if the run wrote it, says more than srun
if [ "$(written "$status")" != "$status_before" ] && [ "$(cat "$status")" != "$finished" ]; then
  outcome=$(sed -n 's/^{"code": *\([0-9]*\),.*/\1/p' "$status")      # empty for null: killed
  code=${outcome:-$((code ? code : 1))} outcome=${outcome:-killed}
fi
echo "$(date) ended: exit code $code ($outcome); cancelled: ${cancelled:-no}"
if [[ " $AGAIN_ON " == *" $outcome "* && $REQUEUE == 1 && -z $cancelled && ! -e $RUN_DIR/STOP &&
      $(written "$last") != "$last_before" ]]; then
  echo "requeued, to go on from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID" || echo "Slurm did not requeue it: give the same sbatch again"
fi
exit "$code"
