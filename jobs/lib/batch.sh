# shellcheck shell=bash
# shellcheck disable=SC2120,SC2153,SC2154    # read here what the job scripts set, such as `launch`
# What the job scripts share whatever the batch system. jobs/lib/pbs.sh and jobs/lib/slurm.sh source
# this file, and for its checks torchrun_multinode.sh. It reads their settings (SCRIPT, CONFIG, ARGS,
# ...), `job_number`, and two arrays: `launch` starts one process per rank, `training` is what each
# of these runs.

finish() {   # finish CODE: end the job script
  # A login shell now runs the user's ~/.bash_logout, which may fail under these options.
  set +eu
  exit "$1"
}

fail() {   # fail MESSAGE: end with code 2, which asks for a correction
  printf 'job script: %s\n' "$*" >&2
  finish 2
}

check_files() {
  if [ ! -f "$SCRIPT" ] || [ ! -f "$CONFIG" ]; then
    fail "SCRIPT=$SCRIPT or CONFIG=$CONFIG is not a file in $PWD.
  Start from the folder that holds them."
  fi
}

check_number() {   # check_number NAME LEAST: the variable NAME holds a number, LEAST or more
  local value=${!1}
  if ! [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || [ "$value" -lt "$2" ]; then
    fail "$1=$value is not a number of $2 or more."
  fi
}

refuse_options() {   # refuse_options NAMES WORD...: none of the options NAMES (a|b) is given
  local names=$1
  shift
  if [[ " $* " =~ [[:space:]](--($names))[=[:space:]] ]]; then
    fail "ARGS holds ${BASH_REMATCH[1]}. Give CONFIG=..., RUN_DIR=... and so on; what no next start
  may repeat, --fresh and --resume, once by hand."
  fi
}

note_settings() {   # note_settings NAME...: sets `given`, those settings that came from the
  # environment. A script's own default is not exported. So call this before a script exports one.
  local name
  given=''
  for name in "$@"; do
    if [[ $(declare -p "$name" 2> /dev/null) == "declare -x"* ]]; then
      given+=" $name=$(printf '%q' "${!name}")"
    fi
  done
}

split_arguments() {   # split_arguments WORD...: sets `arguments`, the words of ARGS and then these
  read -r -d '' -a arguments <<< "$ARGS" || :    # fails at the end of the text: ARGS may have lines
  arguments+=("$@")
}

split_python() {   # sets `python`, the words of PYTHON, such as: shifter --image=IMAGE python
  python=("$PYTHON")
  if ! command -v "$PYTHON" > /dev/null; then    # not one path, which may hold blanks
    read -r -a python <<< "$PYTHON"
  fi
  if [ "${#python[@]}" = 0 ]; then fail "PYTHON=$PYTHON holds no word."; fi
}

use_venv() {
  case $VENV in
    /*) PATH=$VENV/bin:$PATH ;;
    *) PATH=$PWD/$VENV/bin:$PATH ;;
  esac
}

check_torch() {   # a module that was not found may load nothing, and end with 0
  if ! "${python[@]}" -c 'import sys, importlib.util as i; sys.exit(not i.find_spec("torch"))'; then
    fail "PYTHON=$PYTHON does not run here, or has no torch. Correct the modules, VENV or PYTHON."
  fi
}

show_launch() {   # show_launch NAMES: for DRY_RUN, the launch line and variables that begin so
  printf '%q ' "${launch[@]}" "${training[@]}"
  echo
  env | grep -E "^($1)_" | sort
}

open_log() {   # open_log ID: from here on, everything printed goes to `log`, logs/CONFIG-ID.log
  log=logs/$(basename "${CONFIG%.*}")-$1.log
  mkdir -p logs "$(dirname "$RUN_DIR")"
  echo "output: $PWD/$log"
  exec >> "$log" 2>&1
  echo "settings from outside:${given:- none}; all others as in the job script"
}

watch_for_sigterm() {   # sets `cancelled` when SIGTERM comes before `ends`, a Unix time
  # It is how a user cancels a job (qdel, scancel), after which no job may follow. At the end of a
  # job's time the batch system sends it too, while the run is still saving.
  cancelled=''
  trap 'if [ "$(date +%s)" -lt "$ends" ]; then cancelled=yes; fi' TERM
}

run_preflight() {   # check the machine, unless PREFLIGHT is empty; end the job if that fails
  local checks code=0 before
  read -r -a checks <<< "$PREFLIGHT"
  if [ "${#checks[@]}" = 0 ]; then
    return
  fi
  before=$(wc -l < "$log")
  "${launch[@]}" test_aurora_ddp.py "${checks[@]}" --work_dir "$RUN_DIR" || code=$?
  if [ -n "$cancelled" ]; then
    echo "cancelled during the pre-flight: nothing was trained"
    finish 143
  fi
  case $code in
    0) return ;;
    2) finish 2 ;;     # its arguments were refused
    138 | 140)         # 128 + SIGUSR1 or SIGUSR2, by which Slurm tells that the time is nearly over
      echo "stopped by signal $((code - 128)) during the pre-flight: nothing was trained"
      finish 75 ;;
  esac
  # Its last line, if single hosts are to blame: `suspect hosts: n1,n2`
  after_bad_preflight "$(tail -n "+$((before + 1))" "$log" | sed -n 's/^suspect hosts: //p')"
  finish 3
}

written() {   # written FILE: print what changes with each write of it
  stat -c '%i %y' "$1" 2> /dev/null || echo never
}

run_training() {   # sets `code`, the job's exit code; `outcome`, how the run ended; `saved`, yes
  # if it wrote a checkpoint
  local status=$RUN_DIR/status.json last=$RUN_DIR/checkpoints/last.pt
  local status_before last_before
  status_before=$(written "$status")
  last_before=$(written "$last")

  code=0
  "${launch[@]}" "${training[@]}" || code=$?

  outcome=$code
  if [ "$code" = 9 ] || [ "$code" -gt 128 ]; then   # MPICH: 9 after a SIGKILL, PALS: 143 after any
    outcome=killed                                  # failure of a rank. It is no sign of the walltime
  fi
  # status.json says more than the launcher's code. A start that was refused has not written it.
  if [ "$(written "$status")" != "$status_before" ]; then
    if [[ $(cat "$status") =~ ^\{\"code\":\ *([0-9]+), ]]; then
      code=${BASH_REMATCH[1]}
      outcome=$code
    else               # null: killed before it could say how it ends
      outcome=killed
      if [ "$code" = 0 ]; then code=1; fi
    fi
  fi
  saved=''
  if [ "$(written "$last")" != "$last_before" ]; then saved=yes; fi
  echo "$(date) ended: exit code $code ($outcome); cancelled: ${cancelled:-no}"
}

count_jobs() {   # count_jobs NUMBER: sets `job_number`, which this job has among those of its chain
  job_number=$1
  check_number job_number 1
  echo "this is job $job_number of at most $MAX_JOBS"
}

why_no_next_start() {   # print why the run is not to be continued; nothing if it is
  if [ -n "$cancelled" ]; then
    echo "the job was cancelled"
  elif [ -e "$RUN_DIR/STOP" ]; then
    echo "there is a file $RUN_DIR/STOP"
  elif [ "$outcome" = 0 ]; then
    echo "the training is finished"
  elif [[ " $AGAIN_ON " != *" $outcome "* ]]; then
    echo "the run ended with $outcome, and AGAIN_ON is '$AGAIN_ON'"
  elif [ -z "$saved" ]; then
    echo "this start wrote no new checkpoint"
  else
    why_no_more_jobs
  fi
}

why_no_more_jobs() {   # print that the chain has as many jobs as it may have; nothing if it has not
  if [ "$job_number" -ge "$MAX_JOBS" ]; then
    echo "this was job $job_number, and MAX_JOBS is $MAX_JOBS. The same command starts a new chain"
  fi
}
