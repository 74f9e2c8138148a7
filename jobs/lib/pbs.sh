# shellcheck shell=bash
# shellcheck disable=SC2154,SC2120    # read here what the job scripts set, such as `launch`
# What jobs/aurora.pbs, jobs/polaris.pbs and jobs/pbs.sh share: hosts, deadline, the next job of a
# chain. They source this file from the folder they were submitted in, call prepare_job, set
# `launch`, and call run_job.
# A job's attributes, as `qstat -f` prints them, are in `job`, one a line.
source jobs/lib/batch.sh
A_YEAR=8760:00:00    # in place of a walltime that is not known

prepare_job() {   # sets `hosts`, the file of host names, `python`, `training`, the ranks' environment
  note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC CPU_BIND THREADS NCCL_PLUGIN_DIR \
    DDP_MPI4PY PREFLIGHT SAVE_SECONDS WALLTIME CHAIN MAX_JOBS AGAIN_ON NEXT_QSUB
  check_settings
  if [ -z "${DRY_RUN:-}" ]; then
    open_log "${PBS_JOBID%%.*}"
    count_jobs "${CHAIN_JOB:-1}"
    read_attributes
    check_submission
    set_deadline
  fi

  # PBS sets a TMPDIR too long for sockets of multiprocessing, and OMP_NUM_THREADS for a whole node.
  export TMPDIR=/tmp
  export OMP_NUM_THREADS=$THREADS
  export WANDB_MODE=${WANDB_MODE:-offline}
  use_venv
  split_python

  hosts=$(mktemp)
  trap 'rm -f "$hosts"' EXIT
  list_hosts > "$hosts"
  PBS_JOBID=${PBS_JOBID:-0}                                         # with DRY_RUN, elsewhere
  export DDP_WORLD_SIZE=$(($(wc -l < "$hosts") * NPROC))            # PALS sets no world size
  export DDP_MPI4PY
  if [ "$DDP_MPI4PY" = 0 ]; then      # else rank 0 sends its address by MPI
    local digits=${PBS_JOBID%%[!0-9]*}
    read -r MASTER_ADDR < "$hosts"
    MASTER_PORT=$((20000 + 10#0$digits % 10000))
    export MASTER_ADDR MASTER_PORT
  fi
  # shellcheck disable=SC2119         # qsub passes no words to a script
  split_arguments
  training=("$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
}

check_settings() {
  check_files
  check_number NPROC 1
  check_number SAVE_SECONDS 0
  check_number MAX_JOBS 1
  if [ -n "${DRY_RUN:-}" ]; then check_number DRY_RUN 1; fi
  refuse_options 'config|work_dir|output_dir|fresh|resume' "$ARGS"
  if ! [[ $WALLTIME =~ ^([0-9]+:){0,2}[0-9]+$|^$ ]]; then
    fail "WALLTIME=$WALLTIME is not a time such as 12:00:00."
  fi
  local bound=${CPU_BIND:-} spans
  if [[ $bound == list:* ]]; then
    IFS=: read -r -a spans <<< "${bound#list:}"
    if [ "${#spans[@]}" != "$NPROC" ]; then
      fail "NPROC=$NPROC, but CPU_BIND=$bound
  has the cores of ${#spans[@]} ranks. Give CPU_BIND too, a list for $NPROC or none."
    fi
  fi
}

list_hosts() {   # print each host of the job once; with DRY_RUN, so many made-up ones
  if [ -n "${DRY_RUN:-}" ]; then
    seq -f host%g "$DRY_RUN"
  else
    awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE"    # with mpiprocs a host stands there many times
  fi
}

list_slots() {   # sets `slots`, a file in which each host stands NPROC times, one after the other
  slots=$hosts.slots
  trap 'rm -f "$hosts" "$slots"' EXIT
  awk -v times="$NPROC" '{ for (k = 0; k < times; k++) print }' "$hosts" > "$slots"
}

list_environment() {   # list_environment NAMES: sets `environment`, NAME=VALUE of the variables that
  # begin so, and of those in which programs and libraries are looked for
  local name
  environment=()
  for name in $(compgen -e); do
    if [[ $name =~ ^((PATH|LD_LIBRARY_PATH|PYTHONPATH|TMPDIR)$|($1)_) ]]; then
      environment+=("$name=${!name}")
    fi
  done
}

run_job() {   # the job, from the pre-flight to the next job
  if [ -n "${DRY_RUN:-}" ]; then
    show_launch 'CCL|DDP|FI|NCCL|OMP|ONEAPI|ZE'
    finish 0
  fi
  echo "job $PBS_JOBID on $(paste -sd ' ' "$hosts") stops and saves at $(date -d "@$DDP_DEADLINE")"
  if [[ $(umask) == *77 ]]; then
    echo "umask $(umask): nobody else can read what this job writes; change it by -W umask=022"
  fi
  watch_for_sigterm
  run_preflight
  run_training
  submit_next_job
  finish "$code"
}

read_attributes() {   # sets `job`, and `submitted`: the words that stood behind qsub
  # The server may be busy: it is asked twice.
  if ! job=$(qstat -f "$PBS_JOBID") && sleep 10 && ! job=$(qstat -f "$PBS_JOBID"); then
    job=''
  fi
  job=${job//$'\n\t'/}     # join the lines that qstat has wrapped
  submitted=$(attribute Submit_arguments)
  if [ -z "$job" ]; then
    submitted=$NEXT_QSUB
    echo "qstat does not know this job: the deadline comes from WALLTIME (${WALLTIME:-unset: none}),"
    echo "the next job from NEXT_QSUB (${NEXT_QSUB:-unset: none})"
  fi
}

attribute() {   # attribute NAME: print its value; nothing if the job has none
  local line
  while read -r line; do
    if [[ $line == "$1 = "* ]]; then
      printf '%s\n' "${line#"$1 = "}"
      return
    fi
  done <<< "$job"
}

may_submit() {   # could a next job follow at all? In the debug queues a user may have one job
  [[ $CHAIN == 1 && -n $job$NEXT_QSUB && ${PBS_QUEUE:-} != *debug* &&
    ${PBS_ENVIRONMENT:-} != PBS_INTERACTIVE ]]
}

check_submission() {   # refuse at the start what would be found out at the end, by submit_next_job
  if [[ " $submitted" =~ \ -v.*\ -v ]]; then
    fail "-v was given twice, and PBS knows the last one only. Write all in one:
  -v CONFIG=...,ARGS=\"...\""
  fi
  if [[ -z $job && " $submitted" =~ \ -v ]]; then
    fail "NEXT_QSUB holds -v. The next job gets the settings of this one without it."
  fi
  if ! may_submit; then
    return
  fi
  local one_only="Or let no next job follow: -v CHAIN=0."
  if [ -n "${PBS_ARRAY_INDEX:-}" ]; then
    fail "the members of a job array (-J) cannot submit next jobs. $one_only
  Give each member its own RUN_DIR, such as runs/\$PBS_ARRAY_INDEX, in the script."
  fi
  # PBS runs a copy. The path of the script itself is the last of the words behind qsub, which
  # keep no quotes, so that a path with a blank looks like two words.
  local path=$submitted
  while [[ $path == *" "* ]]; do
    if [ -f "$path" ]; then fail "the path '$path' of the script has a blank. $one_only"; fi
    path=${path#* }
  done
  if ! grep -qs jobs/lib/pbs.sh "$path"; then
    fail "the last word behind qsub, '$path', is not the path of this script, from which the next
  job is made. Give it so, without blanks, and not by 'qsub < FILE'. $one_only"
  fi
}

set_deadline() {   # sets DDP_DEADLINE, when the run saves and stops, and `ends`, the job's end
  local seconds began told
  began=$(($(date +%s) - SECONDS))         # SECONDS have passed since this script's start
  told=$(attribute Resource_List.walltime)
  told=${told:-$WALLTIME}
  seconds=$(seconds_of "${told:-$A_YEAR}")
  # An interactive job began before its user started this script. A time at which the job would
  # already be over is not believed.
  told=$(attribute stime)
  if [ -n "$told" ] && told=$(date -d "$told" +%s) &&
    [ "$told" -lt "$began" ] && [ $((told + seconds)) -gt "$(date +%s)" ]; then
    began=$told
  fi
  ends=$((began + seconds))
  export DDP_DEADLINE=$((ends - SAVE_SECONDS))
  if [ "$seconds" -le "$SAVE_SECONDS" ]; then
    fail "the walltime is not longer than SAVE_SECONDS."
  fi
}

seconds_of() {   # seconds_of TIME: print the seconds of 12:00:00, 30:00 or 90
  local part total=0
  for part in ${1//:/ }; do
    total=$((total * 60 + 10#$part))
  done
  echo "$total"
}

submit_next_job() {   # if steps are left and this start got further
  local why
  if [ -z "$job$NEXT_QSUB" ]; then
    why="qstat did not know this job, and there is no NEXT_QSUB"
  elif ! may_submit; then
    why="CHAIN is $CHAIN, the queue ${PBS_QUEUE:-unknown}, the job ${PBS_ENVIRONMENT:-PBS_BATCH}"
  else
    why=$(why_no_next_start)
  fi
  if [ -n "$why" ]; then
    echo "no next job: $why"
    return
  fi
  local options=(-W "depend=afterany:$PBS_JOBID")
  local variables
  if [ -n "$job" ]; then
    options+=(-N "$PBS_JOBNAME" -q "$PBS_O_QUEUE")
    add_options
    add_resources
    options+=("${submitted##* }")
  else
    local words
    read -r -a words <<< "$NEXT_QSUB"
    options+=("${words[@]}")
  fi
  export CHAIN_JOB=$((job_number + 1))
  list_variables
  qsub -v "$variables" "${options[@]}" || echo "not submitted: give the same qsub again"
}

after_bad_preflight() {   # after_bad_preflight SUSPECTS: say how to have the other hosts alone
  local host chunk others=''
  if [ -z "$1" ]; then
    return
  fi
  chunk=$(attribute Resource_List.select)
  chunk=${chunk#"${chunk%%:*}"}                  # without its number
  if [[ $chunk == *+* ]]; then chunk=''; fi      # several kinds of chunks: the user knows which
  while read -r host; do
    host=${host%%.*}
    if [[ ",$1," != *",$host"[,.]* ]]; then
      others+=" 1$chunk:host=$host"
    fi
  done < "$hosts"
  others=${others# }
  echo "PBS cannot leave out a host, and no next job follows. To have the others alone:"
  echo "  -l select=${others// /+}"
}

add_options() {   # add to `options` those of this job
  add_attribute Account_Name -A
  add_attribute Mail_Points -m
  add_attribute Mail_Users -M
  # These, if they stood behind qsub. What stands in the script may be edited.
  if was_given -P; then add_attribute project -P; fi
  if was_given -p; then add_attribute Priority -p; fi
  if was_given -o; then add_attribute Output_Path -o; fi
  if was_given -e; then add_attribute Error_Path -e; fi
  if was_given -j; then add_attribute Join_Path -j; fi
  if was_given -k; then add_attribute Keep_Files -k; fi
  if was_given -r && [ "$(attribute Rerunable)" = False ]; then options+=(-r n); fi
  if was_given -W; then
    add_attribute umask -W umask=
    add_attribute group_list -W group_list=
  fi
  name_lost_options
}

name_lost_options() {   # say which options behind qsub the next job does not get
  local words word previous='' part lost=''
  read -r -a words <<< "$submitted"
  for word in "${words[@]}"; do
    if [ "$previous" = -W ]; then
      for part in ${word//,/ }; do
        case $part in
          umask=* | group_list=* | depend=*) ;;
          *=*) lost+=" -W $part" ;;
        esac
      done
    fi
    case $word in -[achRSu]*) lost+=" ${word:0:2}" ;; esac
    previous=$word
  done
  if [ -n "$lost" ]; then echo "the next job is submitted without$lost"; fi
}

add_attribute() {   # add_attribute NAME OPTION [PREFIX]: if the job has this attribute
  local value
  value=$(attribute "$1")
  if [ -n "$value" ]; then options+=("$2" "${3:-}$value"); fi
}

was_given() {   # was_given OPTION: did it stand behind qsub, as `-p 5` or `-p5`?
  [[ " $submitted" == *" $1"* ]]
}

add_resources() {   # add to `options` the resources of this job
  # Those of the script's lines, and all that stood behind qsub. The others come from the script
  # again, or are PBS' and the site's own.
  local names=' select place walltime filesystems ' words word line name
  read -r -a words <<< "${submitted//,/ }"
  for word in "${words[@]}"; do
    word=${word#-l}
    if [[ $word == *=* ]]; then names+="${word%%=*} "; fi
  done
  while read -r line; do
    if [[ $line =~ ^Resource_List\.([A-Za-z0-9_]+)\ =\ (.*)$ ]]; then
      name=${BASH_REMATCH[1]}
      if [[ $names == *" $name "* ]]; then options+=(-l "$name=${BASH_REMATCH[2]}"); fi
    fi
  done <<< "$job"
}

list_variables() {   # sets `variables`, the names that stood behind qsub -v, and CHAIN_JOB
  # By name only: qsub takes the value, which may hold commas and blanks, from the environment.
  local list=",${job#*Variable_List = }" name
  if [ -z "$job" ]; then
    list="${given_names// /,}="
    list=${list//,/=,}
  fi
  variables=CHAIN_JOB
  for name in $(compgen -e); do
    if [[ $name != PBS_* && $name != CHAIN_JOB && $list == *",$name="* ]]; then
      variables+=",$name"
    fi
  done
}
