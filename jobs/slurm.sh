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
PYTHON=${PYTHON:-python}              # also several words, for a container: docs/machines.md
NPROC=${NPROC:-}                      # ranks per node, one per GPU. Empty: as in the lines above
PREFLIGHT=${PREFLIGHT-jobs/preflight.py}   # and its options; empty: no check of the machine
SAVE_SECONDS=${SAVE_SECONDS:-300}     # the run saves and stops so long before the job's end
RETRIES=${RETRIES:-1}                 # starts in the same job, without a host at fault
REQUEUE=${REQUEUE:-1}                 # 0: never requeue
MAX_JOBS=${MAX_JOBS:-50}              # starts, after which it is not requeued
AGAIN_ON=${AGAIN_ON-75 70}            # codes after which it is requeued: docs/faults.md
EXCLUDE=${EXCLUDE:-0}                 # 1: requeued without the hosts that it has left out
OMP_NUM_THREADS=${OMP_NUM_THREADS:-}  # empty: the cores of a task
WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo    # the ^ form never in GLOO_SOCKET_IFNAME

if [ -z "${SLURM_JOB_ID:-}${DRY_RUN:-}" ]; then
  source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"    # --help
  echo "submit this with sbatch, or see its first lines: bash $0 --help" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ ! -f jobs/lib/slurm.sh ]; then
  echo "there is no jobs/lib/slurm.sh in $PWD: submit from the project's folder" >&2
  exit 2
fi
source jobs/lib/slurm.sh              # deadline, pre-flight, outcome, requeue
# module load cuda
set -euo pipefail

prepare_job "$@"                      # checks, log, deadline, the number of ranks
# From Slurm 22.05 on srun may not inherit --cpus-per-task. --gpus-per-task would hide the GPUs of a
# node's tasks from each other. torchrun inside srun would keep signals from the ranks.
# --kill-on-bad-exit would call a run that stops in good order (75) CANCELLED. When a rank fails,
# the rank or its guard cancels the step, and --wait ends what is left a minute after the first end.
set_launch() {
  launch=(srun --export=ALL "${on_hosts[@]}" --ntasks="$DDP_WORLD_SIZE"
    --ntasks-per-node="$NPROC" --cpus-per-task="$cores" --cpu-bind=cores --kill-on-bad-exit=0
    --wait=60 "${python[@]}" -u)
}
run_job                               # to its end, or to its next start
