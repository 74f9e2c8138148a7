#!/bin/bash
# Train on this machine, with nothing prepared: makes .venv (once), installs, starts the ranks.
#   bash jobs/local.sh                                    the built-in demo; one rank per GPU, or 2
#   bash jobs/local.sh 2 --data my.fasta optim.lr=1e-4    2 ranks; the rest goes to the script
#   CONFIG=configs/sedd_cpu.yaml LAUNCHER=mpirun bash jobs/local.sh 2
#   DRY_RUN=1 bash jobs/local.sh 4                        shows what would be started
# Output goes to screen and logs/CONFIG-DATE-PROCESS.log. Exit codes: README.md. It changes to the
# repository's folder, but looks for data files (--data) first in the folder where you called it.
# PYTHON=python3.12 chooses the interpreter. For a smaller download without a GPU: docs/machines.md.
set -euo pipefail

# What you may want to edit; each can also be given in front of the command.
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_demo.yaml}
NPROC=${NPROC:-}                 # ranks, or the first argument; empty: one per NVIDIA GPU, or 2
LAUNCHER=${LAUNCHER:-torchrun}   # torchrun (by the script's own --nproc_per_node) | mpirun
ARGS=${ARGS:-}                   # more arguments of the training script, separated by blanks
LOGS=${LOGS:-1}                  # 0: no log file; a terminal then shows the progress in one line
# The MPI in .venv, which can hold only one. Empty: LAUNCHER=mpirun uses the mpirun of your PATH.
MPI_WHEEL=${MPI_WHEEL-mpich==5.0.2}
MATPLOTLIB=${MATPLOTLIB-matplotlib}   # draws curves.png at the end of a run; empty: no picture
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo   # the ^ form never in GLOO_SOCKET_IFNAME

# shellcheck source=jobs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"           # --help
# shellcheck source=jobs/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"    # makes .venv
# shellcheck source=jobs/lib/local.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/local.sh"          # checks, arguments, threads, log

make_run_env() {
  make_env
  if [ -n "$MATPLOTLIB" ]; then once "$MATPLOTLIB" install_pictures; fi
}

install_pictures() {   # tried once: a run does not need it
  (install .venv/bin/python "$MATPLOTLIB") || echo "Without it, runs draw no curves.png."
}

if [[ ${1:-} =~ ^-?[0-9]+$ ]]; then
  NPROC=$1
  shift
fi
called_from=$PWD
CDPATH='' cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
[ "$called_from" -ef . ] || echo "working in $PWD"
check_settings
read_words "$@"        # sets `words`, those of ARGS and these
if [ "$LAUNCHER" = torchrun ]; then
  command=(.venv/bin/python "$SCRIPT" --nproc_per_node "$NPROC" --config "$CONFIG")
else
  command=("${MPI_WHEEL:+.venv/bin/}mpirun" -n "$NPROC" .venv/bin/python "$SCRIPT" --config "$CONFIG")
fi
command+=(${words[@]+"${words[@]}"})           # in bash 3.2 an empty array is unset
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
locked make_run_env
command -v "${command[0]}" > /dev/null || fail "LAUNCHER=$LAUNCHER, but there is no ${command[0]}."
share_cores "$NPROC"
if [ "$LOGS" = 1 ]; then
  log_and_show "$(basename "${CONFIG%.*}")-$(date +%Y%m%d-%H%M%S)-$$.log"
fi
exec "${command[@]}"   # so that signals reach the launcher, and its exit code is this script's
