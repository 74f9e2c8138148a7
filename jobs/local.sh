#!/bin/bash
# Train on this machine, with nothing prepared: makes .venv (once), installs, starts the ranks.
#   bash jobs/local.sh                                    the built-in demo; one rank per GPU, or 2
#   bash jobs/local.sh --data my.fasta optim.lr=1e-4      these words go to the script
#   CONFIG=configs/sedd_cpu.yaml LAUNCHER=mpirun bash jobs/local.sh 2 --data my.fasta    2 ranks
#   DRY_RUN=1 bash jobs/local.sh 4                        shows what would be started
# Output goes to screen and logs/CONFIG-DATE-PROCESS.log. Exit codes: docs/runs.md. All paths are
# seen from the folder where you call it; SCRIPT and CONFIG are found in the project's folder too.
# PYTHON=python3.12 chooses the interpreter. For a smaller download without a GPU: docs/machines.md.
set -euo pipefail
if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

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

# shellcheck source=jobs/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"    # makes .venv in the folder $root

make_run_env() {
  make_env
  [ -z "$MATPLOTLIB" ] || once "$MATPLOTLIB" install_pictures
}

install_pictures() {   # tried once: a run does not need it
  (install "$root/.venv" "$MATPLOTLIB") || echo "Without it, runs draw no curves.png."
}

# The number of ranks, and the words of the training script.
if [[ ${1:-} =~ ^-?[0-9]+$ ]]; then
  NPROC=$1
  shift
elif [ -z "$NPROC" ]; then
  gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2> /dev/null | grep -o ^GPU || :)}
  NPROC=$(tr , '\n' <<< "$gpus" | grep -c '^[^-]') || NPROC=2
fi
read -r -d '' -a words <<< "$ARGS" || :    # ARGS may have several lines
words+=("$@")                           # in bash 3.2 an empty array is unset

# All is checked before anything is installed.
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC is '$NPROC', expected a number of ranks, 1 or more."
for name in SCRIPT CONFIG; do
  [ -f "${!name}" ] || [ ! -f "$root/${!name}" ] || printf -v "$name" %s "$root/${!name}"
  [ -f "${!name}" ] || fail "$name=${!name} is not a file in $PWD"
done
if [[ ${words[0]:-} =~ ^(-[^-h]|[0-9]+$) ]]; then
  fail "'${words[0]}' is no option of $SCRIPT. The number of ranks comes first: $0 2 --data FILE"
fi
option=
for word in ${words[@]+"${words[@]}"}; do
  case $word,$option in
    --config* | --nproc_per_node*) fail "$word: give the config as CONFIG=..., ranks first" ;;
    --data=* | --datafile=* | --train_data=* | --structures=* | --init_from=*) path=${word#*=} ;;
    --*,* | *=*,*) path=. ;;
    *,--data | *,--datafile | *,--train_data | *,--structures | *,--init_from) path=$word ;;
    *) path=. ;;
  esac
  [ -e "$path" ] || fail "there is no file or folder $path, seen from $PWD"
  if [[ $word = --* ]]; then option=$word; elif [[ $word = *=* ]]; then option=; fi
done
python=$root/.venv/bin/python
case $LAUNCHER in
  torchrun) command=("$python" "$SCRIPT" --nproc_per_node "$NPROC") ;;
  mpirun) command=("${MPI_WHEEL:+$root/.venv/bin/}mpirun" -n "$NPROC" "$python" "$SCRIPT") ;;
  *) fail "LAUNCHER is '$LAUNCHER', expected torchrun or mpirun." ;;
esac
command+=(--config "$CONFIG" ${words[@]+"${words[@]}"})
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi

locked make_run_env
command -v "${command[0]}" > /dev/null || fail "LAUNCHER=$LAUNCHER, but there is no ${command[0]}."
# Unset, every rank would use all cores, and the ranks would slow each other down.
cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
if [ "$LOGS" = 1 ]; then
  log=logs/$(basename "${CONFIG%.*}")-$(date +%Y%m%d-%H%M%S)-$$.log
  mkdir -p logs
  # Ctrl-C must not kill tee, which still has to write the last lines to the log.
  exec > >(trap '' INT TERM HUP PIPE; exec tee -a "$log") 2>&1
  echo "output: $PWD/$log"
fi
exec "${command[@]}"   # so that signals reach the launcher, and its exit code is this script's
