#!/bin/bash
# Train under Slurm: one task per GPU, on any number of nodes. More in docs/machines.md.
#   sbatch -A MyProject --nodes=2 jobs/slurm.sh --data my.fasta     (else data/uniref50)
#   CONFIG=configs/sedd_cpu.yaml sbatch --gres=none jobs/slurm.sh --data my.fasta     without GPUs
#   DRY_RUN=2 bash jobs/slurm.sh       anywhere: settings and launch line for 2 nodes
#   watch      tail -f logs/CONFIG-JOBID.log       (exit codes: README.md)
#   stop       touch RUN_DIR/STOP; or scancel JOBID, if Slurm's KillWait leaves time to save
#   continue   remove STOP, give the same sbatch. Before its time is over a job saves, and is
#              requeued if steps are left and it wrote a new checkpoint.
# Submit from the project's folder: the shared part is read from its jobs/lib/.
# .venv: `bash jobs/local.sh 1 --help` makes it.
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
NPROC=${NPROC:-}                      # ranks per node, one per GPU. Empty: as in the lines above
PREFLIGHT=${PREFLIGHT---preflight}    # or "--preflight --bandwidth"; empty: none
SAVE_SECONDS=${SAVE_SECONDS:-300}     # the run saves and stops so long before the job's end
REQUEUE=${REQUEUE:-1}                 # 0: never requeue
AGAIN_ON=${AGAIN_ON-75 70}            # codes after which it is requeued: docs/faults.md
OMP_NUM_THREADS=${OMP_NUM_THREADS:-}  # empty: the cores of a task
WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo    # the ^ form never in GLOO_SOCKET_IFNAME

[ -n "${SLURM_JOB_ID:-}${DRY_RUN:-}" ] || { echo "submit this with sbatch" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ ! -f jobs/lib/batch.sh ]; then
  echo "there is no jobs/lib/batch.sh in $PWD: submit from the project's folder" >&2
  exit 2
fi
source jobs/lib/batch.sh              # pre-flight, outcome, what the scripts share
# module load cuda
set -euo pipefail

asked() {   # asked NAME: print what the line `#SBATCH --NAME=...` above asks for
  grep -o "^#SBATCH --$1=[0-9]*" "$0" | grep -o '[0-9]*$'
}

note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC PREFLIGHT SAVE_SECONDS REQUEUE AGAIN_ON \
  OMP_NUM_THREADS WANDB_MODE
if [ -z "${SLURM_JOB_ID:-}" ]; then   # DRY_RUN: what Slurm would read from the lines above
  SLURM_CPUS_PER_TASK=$(asked cpus-per-task) || :
  SLURM_NTASKS_PER_NODE=$(asked ntasks-per-node) || :
fi
cores=${SLURM_CPUS_PER_TASK:-1}
nodes=${SLURM_JOB_NUM_NODES:-${DRY_RUN:-}}
NPROC=${NPROC:-${SLURM_NTASKS_PER_NODE:-4}}
check_files
check_number NPROC 1
check_number SAVE_SECONDS 0
if [ -n "${DRY_RUN:-}" ]; then check_number DRY_RUN 1; fi
refuse_options 'config|work_dir|output_dir|fresh|resume' "$ARGS" "$@"
use_venv
split_arguments "$@"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} WANDB_MODE
export DDP_WORLD_SIZE=$((nodes * NPROC))

# From Slurm 22.05 on srun may not inherit --cpus-per-task. --gpus-per-task would hide the GPUs of a
# node's tasks from each other. torchrun inside srun would keep signals from the ranks.
# --kill-on-bad-exit would call a run that stops in good order (75) CANCELLED. When a rank fails,
# the guards end the others, and --wait ends what is left a minute after the first end.
launch=(srun --export=ALL --nodes="$nodes" --ntasks="$DDP_WORLD_SIZE" --ntasks-per-node="$NPROC"
  --cpus-per-task="$cores" --cpu-bind=cores --kill-on-bad-exit=0 --wait=60 "$PYTHON" -u)
training=("$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
if [ -n "${DRY_RUN:-}" ]; then
  show_launch 'DDP|NCCL|OMP|WANDB'
  exit
fi

open_log "$SLURM_JOB_ID"
echo "$(date) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
# The number of an array's last task is that of the whole array. NUMBER_TASK names the task alone.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$job" --format=%e) || end=''
if [[ $end =~ ^[0-9]+-[0-9]+-[0-9]+T ]]; then
  ends=$(date -d "$end" +%s)
  export DDP_DEADLINE=$((ends - SAVE_SECONDS))
  [ "$DDP_DEADLINE" -gt "$(date +%s)" ] || fail "the job's time is not longer than SAVE_SECONDS."
  echo "the run stops and saves at $(date -d "@$DDP_DEADLINE")"
else
  ends=$(($(date +%s) + 31536000))    # unknown: a year
  echo "squeue does not know when the job ends: the run is stopped by --signal alone"
fi

watch_for_sigterm
run_preflight
run_training
why=$(why_no_next_start)
if [ "$REQUEUE" != 1 ]; then why="REQUEUE is $REQUEUE"; fi
if [ -n "$why" ]; then
  echo "not requeued: $why"
else
  echo "requeued, to go on from the last checkpoint"
  scontrol requeue "$job" || echo "Slurm did not requeue it: give the same sbatch again"
fi
finish "$code"
