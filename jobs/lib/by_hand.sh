# shellcheck shell=bash
# What jobs/local.sh and jobs/torchrun_multinode.sh share: threads of a rank, the log. It runs on
# macOS too, with bash 3.2.

share_cores() {   # share_cores RANKS: sets OMP_NUM_THREADS, unless it is set
  # Unset, every rank would use all cores, and the ranks would slow each other down.
  local cores
  cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
}

log_and_show() {   # log_and_show NAME: from here on, what is printed goes to logs/NAME too
  local log=logs/$1
  mkdir -p logs
  # Ctrl-C must not kill tee, which still has to write the last lines to the log.
  exec > >(trap '' INT TERM HUP PIPE; exec tee -a "$log") 2>&1
  echo "output: $PWD/$log"
}
