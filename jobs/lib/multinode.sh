# shellcheck shell=bash
# The inner part of jobs/torchrun_multinode.sh: settings are checked, and then the machine.
# shellcheck disable=SC2154
# shellcheck source=jobs/lib/batch.sh
source "$(dirname "${BASH_SOURCE[0]}")/batch.sh"      # checks that all job scripts share
# shellcheck source=jobs/lib/by_hand.sh
source "$(dirname "${BASH_SOURCE[0]}")/by_hand.sh"    # threads, log

check_settings() {   # check_settings WORD...: sets `python` and the ranks' environment; NPROC too, if
  # it is empty. The words stood behind the script.
  note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC PREFLIGHT MINUTES MASTER_PORT
  if [[ -z $NNODES || -z $NODE_RANK || -z $MASTER_ADDR ]]; then
    fail "NNODES, NODE_RANK or MASTER_ADDR is not set. Expected such as: NNODES=2 NODE_RANK=0
  MASTER_ADDR=192.168.1.100 bash $0"
  fi
  check_files
  local own='config|work_dir|output_dir|nnodes|node_rank|nproc_per_node|master_addr|master_port'
  refuse_options "$own|fresh|resume" "$ARGS" "$@"
  use_venv
  split_python
  if [ -z "${DRY_RUN:-}" ] && ! command -v "${python[0]}" > /dev/null; then
    fail "there is no PYTHON=$PYTHON. Set VENV or PYTHON."
  fi
  if [ -z "$NPROC" ]; then
    NPROC=$("${python[@]}" -c 'import torch
print(torch.cuda.device_count() or torch.xpu.device_count() or 1)') ||
      fail "PYTHON=$PYTHON cannot import torch. Set VENV, PYTHON or NPROC."
  fi
  check_number NNODES 1
  check_number NODE_RANK 0
  check_number NPROC 1
  check_number MASTER_PORT 1
  if [ "$NODE_RANK" -ge "$NNODES" ]; then
    fail "NODE_RANK=$NODE_RANK of NNODES=$NNODES hosts; expected 0 to $((NNODES - 1))."
  fi
  if [ "$MASTER_PORT" -gt 65534 ]; then
    fail "MASTER_PORT=$MASTER_PORT; expected at most 65534."
  fi
  export WANDB_MODE
  export DDP_WORLD_SIZE=$((NNODES * NPROC))
  if [ -n "$MINUTES" ]; then
    check_number MINUTES 1
    export DDP_DEADLINE=$(($(date +%s) - SECONDS + MINUTES * 60))
  fi
  share_cores "$NPROC"
}

run_preflight_here() {   # check the machine, unless PREFLIGHT is empty; a signal ends this script
  local stopped='' code=0
  if [ -z "$PREFLIGHT" ]; then
    return
  fi
  trap 'stopped=130' INT
  trap 'stopped=143' TERM HUP
  # shellcheck disable=SC2086
  "${python[@]}" test_aurora_ddp.py "${ranks[@]}" --master_port $((MASTER_PORT + 1)) $PREFLIGHT ||
    code=$?
  if [ -n "$stopped" ]; then
    exit "$stopped"
  fi
  case $code in
    0) ;;
    2) exit 2 ;;     # its arguments were refused
    *) exit 3 ;;
  esac
  trap - INT TERM HUP
}
