#!/bin/bash
# Train on several hosts without a batch system: start this on each, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
# MASTER_ADDR: address at which the others reach node 0. Arguments go to the training script.
# The hosts need the same files; RUN_DIR is written on node 0. DRY_RUN=1 shows the launch line.
#   watch      here, or tail -f logs/CONFIG-NODE_RANK-DATE.log
#   stop       Ctrl-C or kill of this on one host, or touch RUN_DIR/STOP on node 0: all save and end
#   continue   remove STOP, give the same commands again
# The exit code is that of the training, see docs/runs.md; 3: the pre-flight failed.
set -euo pipefail
if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

# What you may want to edit; each can also be given in front of the command.
NNODES=${NNODES:-}                   # the number of hosts
NODE_RANK=${NODE_RANK:-}             # this host, 0 to NNODES - 1
MASTER_ADDR=${MASTER_ADDR:-}         # address at which the others reach host 0
MASTER_PORT=${MASTER_PORT:-29500}    # free on host 0, and the one after it for the pre-flight
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                       # more arguments of the training script, separated by blanks
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                  # used if it exists
PYTHON=${PYTHON:-python}             # also several words, for a container: docs/machines.md
NPROC=${NPROC:-}                     # ranks per host, the same on all. Empty: one per GPU, or one
PREFLIGHT=${PREFLIGHT-jobs/preflight.py}   # and its options; empty: no check of the machine
MINUTES=${MINUTES:-}                 # save and stop after so many minutes. Empty: no limit
export WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo   # the ^ form never in GLOO_SOCKET_IFNAME
# unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT            # Intel GPUs: these need an MPI launcher

fail() {   # fail MESSAGE: end with code 2, which asks for a correction
  printf '%s: %s\n' "$0" "$*" >&2
  exit 2
}

# Checks. The training script checks the place of this host.
if [[ -z $NNODES || -z $NODE_RANK || -z $MASTER_ADDR ]]; then
  fail "NNODES, NODE_RANK or MASTER_ADDR is not set. Expected such as: NNODES=2 NODE_RANK=0
  MASTER_ADDR=192.168.1.100 bash $0"
fi
[[ -f $SCRIPT && -f $CONFIG ]] || fail "SCRIPT=$SCRIPT or CONFIG=$CONFIG is not a file in $PWD"
ours='config|work_dir|output_dir|nnodes|node_rank|nproc_per_node|master_addr|master_port'
if [[ " $ARGS $* " =~ [[:space:]](--($ours))[=[:space:]] ]]; then
  fail "found ${BASH_REMATCH[1]}; expected CONFIG=..., RUN_DIR=... and so on instead"
fi
for name in MASTER_PORT MINUTES NPROC; do
  [[ ${!name} =~ ^([1-9][0-9]*)?$ ]] || fail "$name=${!name} is not a number of 1 or more"
done

# Python: that of VENV if it is there; one path, which may hold blanks, or several words.
[ ! -d "$VENV/bin" ] || PATH=$(cd "$VENV/bin" && pwd):$PATH
python=("$PYTHON")
command -v "$PYTHON" > /dev/null || read -r -a python <<< "$PYTHON"
if [ -z "$NPROC" ]; then
  NPROC=$("${python[@]}" -c 'import torch; print(torch.accelerator.device_count() or 1)') ||
    fail "PYTHON=$PYTHON cannot import torch.
  If there is no VENV=$VENV: bash jobs/local.sh 1 --help makes .venv"
fi
cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
[ -z "$MINUTES" ] || export DDP_DEADLINE=$(($(date +%s) + MINUTES * 60))

ranks=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC"
  --master_addr "$MASTER_ADDR")
read -r -d '' -a words <<< "$ARGS" || :        # ARGS may have several lines
training=("${python[@]}" "$SCRIPT" "${ranks[@]}" --master_port "$MASTER_PORT" --config "$CONFIG"
  --work_dir "$RUN_DIR" ${words[@]+"${words[@]}"} "$@")
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${training[@]}"
  echo
  exit
fi

# The log. Ctrl-C must not kill tee, which still has to write the last lines to it.
log=logs/$(basename "${CONFIG%.*}")-$NODE_RANK-$(date +%Y%m%d-%H%M%S).log
mkdir -p logs "$(dirname "$RUN_DIR")"
exec > >(trap '' INT TERM HUP PIPE; exec tee -a "$log") 2>&1
echo "output: $PWD/$log"
git log -1 --format='revision %h of %ad' 2> /dev/null || :
printf '%q ' "${training[@]}"
echo

# The pre-flight. torchrun ends with 1 after a signal, as after all else.
read -r -a preflight <<< "$PREFLIGHT"
if [ "${#preflight[@]}" -gt 0 ]; then
  trap 'exit 130' INT
  trap 'exit 143' TERM
  "${python[@]}" -m torch.distributed.run "${ranks[@]}" --master_port $((MASTER_PORT + 1)) \
    "${preflight[@]}" || exit 3
  trap - INT TERM
fi
exec "${training[@]}"   # so that signals reach the launcher, and its exit code is this script's
