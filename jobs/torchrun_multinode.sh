#!/bin/bash
# Train on several hosts without a batch system: start this on each, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
# MASTER_ADDR: address at which the others reach node 0. Arguments go to the training script.
# The hosts need the same files; RUN_DIR is written on node 0. DRY_RUN=1 shows the launch line.
#   watch      here, or tail -f logs/CONFIG-NODE_RANK-DATE.log
#   stop       Ctrl-C or kill of this on one host, or touch RUN_DIR/STOP on node 0: all save and end
#   continue   remove STOP, give the same commands again
# The exit code is that of the training, see README.md; 3: the pre-flight failed.
# The folder jobs/lib/ belongs to this script: copy both.
set -euo pipefail

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
PREFLIGHT=${PREFLIGHT---preflight}   # or "--preflight --bandwidth"; empty: none
MINUTES=${MINUTES:-}                 # save and stop after so many minutes. Empty: no limit
export WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo   # the ^ form never in GLOO_SOCKET_IFNAME
# unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT            # Intel GPUs: these need an MPI launcher

# shellcheck source=jobs/lib/batch.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/batch.sh"     # checks
# shellcheck source=jobs/lib/by_hand.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/by_hand.sh"   # threads, log
note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC PREFLIGHT MINUTES MASTER_PORT
[[ $NNODES && $NODE_RANK && $MASTER_ADDR ]] ||
  fail "NNODES, NODE_RANK or MASTER_ADDR is not set. Expected such as: NNODES=2 NODE_RANK=0
  MASTER_ADDR=192.168.1.100 bash $0"
check_files
own='config|work_dir|output_dir|nnodes|node_rank|nproc_per_node|master_addr|master_port'
refuse_options "$own|fresh|resume" "$ARGS" "$@"
use_venv
split_python
[[ ${DRY_RUN:-} ]] || command -v "${python[0]}" > /dev/null ||
  fail "there is no PYTHON=$PYTHON. Set VENV or PYTHON."
if [ -z "$NPROC" ]; then
  NPROC=$("${python[@]}" -c 'import torch
print(torch.cuda.device_count() or torch.xpu.device_count() or 1)') ||
    fail "PYTHON=$PYTHON cannot import torch. Set VENV, PYTHON or NPROC."
fi
check_number NNODES 1
check_number NODE_RANK 0
check_number NPROC 1
check_number MASTER_PORT 1
[ "$NODE_RANK" -lt "$NNODES" ] ||
  fail "NODE_RANK=$NODE_RANK of NNODES=$NNODES hosts; expected 0 to $((NNODES - 1))."
[ "$MASTER_PORT" -lt 65535 ] || fail "MASTER_PORT=$MASTER_PORT; expected at most 65534."
export DDP_WORLD_SIZE=$((NNODES * NPROC))
if [ -n "$MINUTES" ]; then
  check_number MINUTES 1
  export DDP_DEADLINE=$(($(date +%s) - SECONDS + MINUTES * 60))
fi
share_cores "$NPROC"

ranks=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC"
  --master_addr "$MASTER_ADDR")
split_arguments "$@"
training=("${python[@]}" "$SCRIPT" "${ranks[@]}" --master_port "$MASTER_PORT" --config "$CONFIG"
  --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "${training[@]}"; echo; exit; fi
mkdir -p "$(dirname "$RUN_DIR")"
log_and_show "$(basename "${CONFIG%.*}")-$NODE_RANK-$(date +%Y%m%d-%H%M%S).log"
echo "settings from outside:${given:- none}; all others as in $0"
if [ -n "$PREFLIGHT" ]; then         # a signal during it ends this script
  stopped=''
  trap 'stopped=130' INT
  trap 'stopped=143' TERM HUP
  # shellcheck disable=SC2086
  "${python[@]}" test_aurora_ddp.py "${ranks[@]}" --master_port $((MASTER_PORT + 1)) $PREFLIGHT ||
    exit "${stopped:-$(($? == 2 ? 2 : 3))}"
  [ -z "$stopped" ] || exit "$stopped"
  trap - INT TERM HUP
fi
exec "${training[@]}"   # so that signals reach the launcher, and its exit code is this script's
