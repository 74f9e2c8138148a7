# shellcheck shell=bash
# shellcheck disable=SC2120,SC2153,SC2154    # read here what the job scripts set, such as `launch`
# What the job scripts share whatever the batch system. jobs/lib/pbs.sh and jobs/lib/slurm.sh source
# this file, and for its checks torchrun_multinode.sh. It reads their settings (SCRIPT, CONFIG, ARGS,
# ...), `job_number`, and three arrays: `hosts`, `training`, what each rank runs, and `launch`, which
# starts a process per rank on the hosts, and is set by prepare_start and set_launch of theirs.
FAILURES=' 1 3 70 killed '    # outcomes after which a job starts the run again
RESTART=300     # seconds before the run has to save, in which it does not
retry=0         # how often it has done so
left_out=()     # hosts that it has taken out of `hosts`

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

show_launch() {   # show_launch NAMES: for DRY_RUN, the launch line and the variables that begin
  # so, but no keys
  local name
  printf '%q ' "${launch[@]}" "${training[@]}"
  echo
  for name in $(compgen -e); do
    if [[ $name =~ ^($1)_ && ! $name =~ KEY|TOKEN|SECRET|PASSWORD ]]; then
      echo "$name=${!name-}"
    fi
  done
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

train() {   # start the run; if a rank or the pre-flight failed, again in this job, without the hosts
  # at fault. Sets `code`, the job's exit code, `outcome`, how the last start ended, and `saved`, yes
  # if a checkpoint was written.
  local last=$RUN_DIR/checkpoints/last.pt last_before log_before why
  last_before=$(written "$last")
  while true; do
    log_before=$(wc -l < "$log")
    prepare_start
    set_launch
    if ! command -v "${launch[0]}" > /dev/null; then
      fail "there is no ${launch[0]} on PATH. Correct the line with module load, or VENV."
    fi
    run_preflight "$log_before"
    if [ -z "$outcome" ]; then run_training; fi
    find_bad_hosts "$log_before"
    why=$(why_no_restart)
    if [ -n "$why" ]; then break; fi
    retry=$((retry + 1))
    if [ "${#good[@]}" -gt 0 ]; then     # else a rank has failed on the only host
      hosts=("${good[@]}")
      left_out+=(${bad[@]+"${bad[@]}"})
    fi
    echo "$(date) starting again ($retry of $RETRIES) on ${hosts[*]}, without ${left_out[*]:-any}"
  done
  if [ "$outcome" = 3 ]; then left_out+=(${bad[@]+"${bad[@]}"}); fi
  saved=''
  if [ "$(written "$last")" != "$last_before" ]; then saved=yes; fi
  if [[ $FAILURES == *" $outcome "* ]]; then echo "not started again in this job: $why"; fi
}

run_preflight() {   # run_preflight LINE: check the machine, unless PREFLIGHT is empty. Sets `code`, and
  # `outcome`: empty if the run can start. LINE: as find_bad_hosts
  local preflight
  code=0
  outcome=''
  read -r -a preflight <<< "$PREFLIGHT"
  if [ "${#preflight[@]}" = 0 ]; then
    return
  fi
  "${launch[@]}" "${preflight[@]}" --work_dir "$RUN_DIR" || code=$?
  echo "$(date) the pre-flight ended with $code; cancelled: ${cancelled:-no}"
  case ${cancelled:-no},$code in
    no,0) return ;;
    no,2) ;;                            # its arguments were refused
    no,138 | no,140) code=75 ;;         # SIGUSR1 or 2: Slurm tells that the time is nearly over
    no,*)
      code=3
      if [ "$(tail -n "+$(($1 + 1))" "$log" | grep -cE '^(PASS|FAIL)')" = 0 ]; then
        echo "nothing was checked: ${launch[0]} or Python says above why it did not start"
      fi
      ;;
    *) code=143 ;;
  esac
  outcome=$code
}

run_training() {   # sets `code`, and `outcome`: the same, or `killed`
  local status=$RUN_DIR/status.json status_before
  status_before=$(written "$status")
  code=0
  "${launch[@]}" "${training[@]}" || code=$?

  # status.json says more than the launcher's code: PALS ends with 143 after any failure, MPICH with
  # 9 after a SIGKILL. A start that was refused has not written it.
  outcome=$code
  if [ "$(written "$status")" != "$status_before" ]; then
    if [[ $(cat "$status") =~ ^\{\"code\":\ *([0-9]+), ]]; then
      code=${BASH_REMATCH[1]}
      outcome=$code
    else               # null: killed before it could say how it ends
      outcome=killed
      if [ "$code" = 0 ]; then code=1; fi
    fi
  fi
  echo "$(date) ended: exit code $code ($outcome); cancelled: ${cancelled:-no}"
}

find_bad_hosts() {   # find_bad_hosts LINE: sets `bad`, the hosts that the log names behind this line
  # by `suspect hosts: n1,n2` or `FAILED: rank 1 of 4 on n1: ...` (at the start without `of 4`), and
  # `good`, the other hosts
  local named host
  named=$(tail -n "+$(($1 + 1))" "$log" | sed -n -e 's/^suspect hosts: //p' \
    -e 's/^FAILED: rank [0-9]*\( of [0-9]*\)* on \([^:]*\):.*/\2/p' | tail -n 1)
  bad=()
  good=()
  for host in "${hosts[@]}"; do        # with and without a domain
    if [[ ",$named," == *",${host%%.*}"[,.]* ]]; then bad+=("$host"); else good+=("$host"); fi
  done
}

written() {   # written FILE: print what changes with each write of it
  stat -c '%i %y' "$1" 2> /dev/null || echo never
}

count_jobs() {   # count_jobs NUMBER: sets `job_number`, which this job has among those of its chain
  job_number=$1
  check_number job_number 1
  echo "this is job $job_number of at most $MAX_JOBS"
}

why_no_restart() {   # print why this job does not start the run again; nothing if it does
  if [ -n "$cancelled" ]; then
    echo "the job was cancelled"
  elif [ -e "$RUN_DIR/STOP" ]; then
    echo "there is a file $RUN_DIR/STOP"
  elif [[ $FAILURES != *" $outcome "* ]]; then
    echo "it ended with $outcome"
  elif [ "$outcome" = 3 ] && [ "${#bad[@]}" = 0 ]; then
    echo "the pre-flight suspects no single host"
  elif [ "$outcome" = 3 ] && [ "${#good[@]}" = 0 ]; then
    echo "the pre-flight suspects all hosts"
  elif [ "$retry" -ge "$RETRIES" ]; then
    echo "RETRIES is $RETRIES"
  elif [ "$(date +%s)" -gt $((ends - SAVE_SECONDS - RESTART)) ]; then
    echo "the time of the job is nearly over"
  fi
}

why_no_next_start() {   # print why the run is not to be continued; nothing if it is
  if [ -n "$cancelled" ]; then
    echo "the job was cancelled"
  elif [ -e "$RUN_DIR/STOP" ]; then
    echo "there is a file $RUN_DIR/STOP"
  elif [ "$outcome" = 0 ]; then
    echo "the training is finished"
  elif [ "$outcome" = 3 ] && [ "${#left_out[@]}" = 0 ]; then
    echo "the pre-flight failed, and suspects no single host"
  elif [ "$outcome" = 3 ] && [ "$can_exclude" != 1 ]; then
    echo "the pre-flight suspects ${left_out[*]}"
  elif [ "$outcome" != 3 ] && [[ " $AGAIN_ON " != *" $outcome "* ]]; then
    echo "the run ended with $outcome, and AGAIN_ON is '$AGAIN_ON'"
  elif [ "$outcome" != 3 ] && [ -z "$saved" ]; then
    echo "no start in this job wrote a new checkpoint"
  else
    why_no_more_jobs
  fi
}

why_no_more_jobs() {   # print that the chain has as many jobs as it may have; nothing if it has not
  if [ "$job_number" -ge "$MAX_JOBS" ]; then
    echo "this was job $job_number, and MAX_JOBS is $MAX_JOBS. The same command starts a new chain"
  fi
}
