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
PREFLIGHT=${PREFLIGHT-jobs/preflight.py}   # and its options; empty: no check of the machine
MINUTES=${MINUTES:-}                 # save and stop after so many minutes. Empty: no limit
WANDB_MODE=${WANDB_MODE:-offline}
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo   # the ^ form never in GLOO_SOCKET_IFNAME
# unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT            # Intel GPUs: these need an MPI launcher

# shellcheck source=jobs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"        # --help
# shellcheck source=jobs/lib/multinode.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/multinode.sh"   # checks, threads, log, pre-flight
check_settings "$@"
ranks=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC"
  --master_addr "$MASTER_ADDR")
split_arguments "$@"
training=("${python[@]}" "$SCRIPT" "${ranks[@]}" --master_port "$MASTER_PORT" --config "$CONFIG"
  --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${training[@]}"
  echo
  exit
fi
mkdir -p "$(dirname "$RUN_DIR")"
log_and_show "$(basename "${CONFIG%.*}")-$NODE_RANK-$(date +%Y%m%d-%H%M%S).log"
echo "settings from outside:${given:- none}; all others as in $0"
run_preflight_here
exec "${training[@]}"   # so that signals reach the launcher, and its exit code is this script's
