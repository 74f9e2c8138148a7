#!/bin/bash -l
# Train at any site with PBS (OpenPBS or Professional), by its mpirun. An earlier form of this
# script has run under a real OpenPBS.
# Change three lines for your site: `-l select` (nodes, what each has, and its ranks: mpiprocs, one
# per GPU), `-l walltime`, and the line with `module load`.
#   qsub -A MyProject -v ARGS="--data my.fasta" jobs/pbs.sh     (else data/uniref50)
#   DRY_RUN=4 bash jobs/pbs.sh      anywhere: settings and launch line for 4 nodes
#   watch      tail -f logs/CONFIG-JOBID.log          (exit codes: README.md)
#   stop       touch RUN_DIR/STOP: the run saves and ends, and no job follows. So does qdel JOBID, but
#              Open MPI kills the ranks before they can save.
#   continue   remove STOP, give the same qsub. A job that ends with steps left and a new checkpoint
#              submits the next job itself, but not in a queue whose name holds `debug`.
# Submit from the project's folder: the shared part is read from its jobs/lib/.
#PBS -N sedd
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=12:00:00
#PBS -r y
#PBS -j oe

# What you may want to edit; each can also be given by qsub -v.
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                       # with commas: -v ARGS="'optim.betas=[0.9,0.95]'"
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                  # used if it exists, with its mpirun if it has one
PYTHON=${PYTHON:-python}             # also several words, for a container: docs/machines.md
NPROC=${NPROC:-}                     # ranks per node. Empty: mpiprocs of `select`
THREADS=${THREADS:-8}                # the cores of a rank
DDP_MPI4PY=${DDP_MPI4PY:-0}          # 1: rank 0's address by mpi4py, built for this mpirun
PREFLIGHT=${PREFLIGHT-jobs/preflight.py}   # and its options; empty: no check of the machine
SAVE_SECONDS=${SAVE_SECONDS:-600}    # the run saves and stops so long before the walltime
RETRIES=${RETRIES:-1}                # starts in the same job, without a host at fault
CHAIN=${CHAIN:-1}                    # 0: submit no next job
MAX_JOBS=${MAX_JOBS:-50}             # a chain ends after so many jobs
AGAIN_ON=${AGAIN_ON-75 70 1 killed}  # codes after which a next job follows: docs/faults.md
WALLTIME=${WALLTIME:-}               # such as 12:00:00, where qstat does not answer on compute nodes

if [ -z "${PBS_NODEFILE:-}${DRY_RUN:-}" ]; then
  source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"    # --help
  echo "submit this with qsub, or see its first lines: bash $0 --help" >&2
  exit 2
fi
cd "${PBS_O_WORKDIR:-.}" || exit 2   # PBS starts a copy of this script, in the home folder
if [ ! -f jobs/lib/pbs.sh ]; then
  echo "there is no jobs/lib/pbs.sh in $PWD: submit from the project's folder" >&2
  exit 2
fi
source jobs/lib/pbs.sh               # deadline, pre-flight, outcome, next job
# module load openmpi cuda || exit 2
set -euo pipefail                    # not earlier: modules fail under these options

prepare_job                          # checks, log, hosts, deadline
# Open MPI, MPICH and Intel MPI understand this line. Open MPI by itself would bind ranks to single
# cores, and pass no variables to other hosts. They come in a file that only you can read: any user
# of a host reads command lines, and some variables are keys.
set_launch() {
  list_slots                         # `hostfile` with each host NPROC times
  write_environment 'CCL|CUDA|DDP|FI|GLOO|HF|MASTER|NCCL|OMP|ONEAPI|TORCH|UCX|WANDB|ZE'
  export I_MPI_PERHOST=$NPROC        # else Intel MPI under PBS deals ranks to the hosts in turn
  launch=(mpirun -n "$DDP_WORLD_SIZE" --hostfile "$hostfile" --bind-to none
    bash -c 'source "$0" && exec "$@"' "$environment" "${python[@]}" -u)
}
run_job                              # to its end, with the next job
