# shellcheck shell=bash
# The inner part of jobs/torchrun_multinode.sh: settings are checked, and then the machine.
# shellcheck disable=SC2154
# shellcheck source=jobs/lib/batch.sh
source "$(dirname "${BASH_SOURCE[0]}")/batch.sh"      # checks that all job scripts share
# shellcheck source=jobs/lib/by_hand.sh
source "$(dirname "${BASH_SOURCE[0]}")/by_hand.sh"    # threads, log

check_settings() {   # check_settings WORD...: sets `python` and the ranks' environment; NPROC too, if
  # it is empty. The words stood behind the script. The training script checks the place of the host.
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
  if [ -z "$NPROC" ]; then
    NPROC=$("${python[@]}" -c 'import torch; print(torch.accelerator.device_count() or 1)' \
      2> /dev/null) ||
      fail "PYTHON=$PYTHON cannot import torch. Set VENV, PYTHON or NPROC."
  fi
  check_number NPROC 1
  check_number MASTER_PORT 1
  if [ -n "$MINUTES" ]; then
    check_number MINUTES 1
    export DDP_DEADLINE=$(($(date +%s) - SECONDS + MINUTES * 60))
  fi
  export WANDB_MODE
  share_cores "$NPROC"
}

run_preflight_here() {   # check the machine, unless PREFLIGHT is empty; end with 3 if that fails
  local preflight
  read -r -a preflight <<< "$PREFLIGHT"
  if [ "${#preflight[@]}" = 0 ]; then
    return
  fi
  trap 'exit 130' INT       # torchrun ends with 1 after a signal, as after all else
  trap 'exit 143' TERM
  "${python[@]}" -m torch.distributed.run "${ranks[@]}" --master_port $((MASTER_PORT + 1)) \
    "${preflight[@]}" || exit 3
  trap - INT TERM
}
