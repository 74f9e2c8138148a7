# shellcheck shell=bash
# shellcheck disable=SC2154    # read here what the job scripts set, such as `launch`
# What jobs/aurora.pbs, jobs/polaris.pbs and jobs/pbs.sh share: hosts, deadline, the next job of a
# chain. They source this file from the folder they were submitted in, call prepare_job, define
# set_launch, which sets `launch`, and call run_job.
# A job's attributes, as `qstat -f` prints them, are in `job`, one a line; empty: not known.
source jobs/lib/batch.sh
A_YEAR=8760:00:00    # in place of a walltime that is not known
AT_START=300         # seconds in which a server that does not answer is asked again
AT_END=1800          # the same for the next job, if the job may last so long

prepare_job() {   # sets `hosts`, `hostfile`, `python`, `training`, and the ranks' environment
  note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC CPU_BIND THREADS NCCL_PLUGIN_DIR \
    DDP_MPI4PY PREFLIGHT SAVE_SECONDS WALLTIME RETRIES CHAIN MAX_JOBS AGAIN_ON
  job=''
  given_port=${MASTER_PORT:-}
  list_hosts
  check_settings
  # PBS sets a TMPDIR too long for sockets of multiprocessing, and OMP_NUM_THREADS for a whole node.
  export TMPDIR=/tmp
  export OMP_NUM_THREADS=$THREADS
  export WANDB_MODE=${WANDB_MODE:-offline}
  export DDP_MPI4PY
  use_venv
  split_python
  # shellcheck disable=SC2119         # qsub passes no words to a script
  split_arguments
  training=("$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
  hostfile=$(mktemp)
  environment=logs/environment.XXXXXX       # a file, once write_environment has written it
  trap 'rm -f "$hostfile" "$environment"' EXIT
  if [ -z "${DRY_RUN:-}" ]; then
    open_log "${PBS_JOBID%%.*}"
    check_torch
    count_jobs "${CHAIN_JOB:-1}"
    if [ -n "$WALLTIME" ]; then ask_server 0; else ask_server "$AT_START"; fi
    check_submission
    set_deadline
  fi
}

list_hosts() {   # sets `hosts`, those of the job, or with DRY_RUN so many made-up ones; NPROC too, if
  # it is empty: mpiprocs, as many times as PBS lists a host
  if [ -n "${DRY_RUN:-}" ]; then
    check_number DRY_RUN 1
    read -r -d '' -a hosts < <(seq -f host%g "$DRY_RUN") || :
    NPROC=${NPROC:-$(sed -n 's/^#PBS -l select=.*:mpiprocs=\([0-9]*\).*/\1/p' "$0")}
  else
    read -r -d '' -a hosts < <(awk '!seen[$1]++' "$PBS_NODEFILE") || :
    NPROC=${NPROC:-$(grep -cxF "${hosts[0]}" "$PBS_NODEFILE")}
  fi
}

check_settings() {
  check_files
  check_number NPROC 1
  check_number SAVE_SECONDS 0
  check_number MAX_JOBS 1
  check_number RETRIES 0
  refuse_options 'config|work_dir|output_dir|fresh|resume' "$ARGS"
  if ! [[ $WALLTIME =~ ^([0-9]+:){0,2}[0-9]+$|^$ ]]; then
    fail "WALLTIME=$WALLTIME is not a time such as 12:00:00."
  fi
  if [ -n "${EXCLUDE:-}" ]; then
    fail "EXCLUDE is for Slurm: PBS cannot leave a host out of the next job. Leave it unset."
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

prepare_start() {   # before each start: writes `hostfile`; the number of ranks, and where they meet
  if [ "$retry" -gt 0 ] && [ -z "$job" ]; then
    ask_server 0
    set_deadline
  fi
  printf '%s\n' "${hosts[@]}" > "$hostfile"
  export DDP_WORLD_SIZE=$((${#hosts[@]} * NPROC))    # PALS sets no world size
  # With DDP_MPI4PY=1, rank 0 sends its address by MPI. On one host the ranks find each other, and
  # so do those of other jobs there, such as other members of an array.
  if [ "$DDP_MPI4PY" = 0 ] && [ "${#hosts[@]}" -gt 1 ]; then
    local digits=${PBS_JOBID:-0} port
    digits=${digits%%[!0-9]*}
    port=$((20000 + (10#$digits + 97 * ${PBS_ARRAY_INDEX:-0} + 31 * retry) % 10000))
    export MASTER_ADDR=${hosts[0]} MASTER_PORT=${given_port:-$port}
  elif [ "$DDP_MPI4PY" = 0 ]; then
    unset MASTER_ADDR MASTER_PORT                     # of a start on more hosts
  fi
}

list_slots() {   # write each host NPROC times into `hostfile`, as mpirun counts ranks
  local host k
  for host in "${hosts[@]}"; do
    if [ -z "${DRY_RUN:-}" ] && [ "$(grep -cxF "$host" "$PBS_NODEFILE")" -lt "$NPROC" ]; then
      fail "NPROC=$NPROC, but PBS lists $host fewer times: Open MPI starts no more ranks there.
  Ask for them: -l select=...:mpiprocs=$NPROC"
    fi
    for ((k = 0; k < NPROC; k++)); do echo "$host"; done
  done > "$hostfile"
}

write_environment() {   # write_environment NAMES: into the file `environment`, the variables that
  # begin so, those given by qsub -v, and those in which programs and libraries are looked for
  local name names=()
  for name in $(compgen -e); do
    if [[ $name =~ ^((PATH|LD_LIBRARY_PATH|PYTHONPATH|TMPDIR)$|($1)_) ]] || was_given "$name"; then
      names+=("$name")
    fi
  done
  echo "variables for the ranks: ${names[*]}"
  if [ -z "${DRY_RUN:-}" ]; then
    rm -f "$environment"                      # of the start before
    environment=$(mktemp logs/environment.XXXXXX)    # mode 600
    declare -p "${names[@]}" > "$environment"
  fi
}

run_job() {   # the job, from the pre-flight to the next job
  if [ -n "${DRY_RUN:-}" ]; then
    prepare_start
    set_launch
    show_launch 'CCL|DDP|FI|NCCL|OMP|ONEAPI|ZE'
    finish 0
  fi
  echo "job $PBS_JOBID on ${hosts[*]} stops and saves at $(date -d "@$DDP_DEADLINE")"
  if [[ $(umask) == *77 ]]; then
    echo "umask $(umask): nobody else can read what this job writes; change it by -W umask=022"
  fi
  watch_for_sigterm
  train
  submit_next_job
  finish "$code"
}

ask_server() {   # ask_server SECONDS: sets `job`; while the server does not answer, asks again
  local limit=$(($(date +%s) + $1))
  until job=$(qstat -f "$PBS_JOBID") && [ -n "$job" ]; do
    job=''
    if [ "$(date +%s)" -ge "$limit" ]; then
      echo "qstat does not know this job, or its server does not answer"
      return
    fi
    sleep 5
  done
  job=${job//$'\n\t'/}     # join the lines that qstat has wrapped
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

was_given() {   # was_given NAME: by qsub -v, as far as is known
  [[ $1 != PBS_* && $1 != CHAIN_JOB && ",${job#*Variable_List = }" == *",$1="* ]]
}

why_no_chain() {   # print why no job can follow this one, however it ends; nothing if one can
  if [ "$CHAIN" != 1 ]; then
    echo "CHAIN is $CHAIN"
  elif [ -n "${PBS_ARRAY_INDEX:-}" ]; then
    echo "this is a member of a job array"
  elif [ "${PBS_ENVIRONMENT:-}" = PBS_INTERACTIVE ]; then
    echo "this job is interactive"
  elif [[ ${PBS_QUEUE:-} == *debug* ]]; then
    echo "in the queue $PBS_QUEUE a user may have one job"
  fi
}

check_submission() {   # refuse at the start what no next job could be made from
  local submitted
  submitted=$(attribute Submit_arguments)
  if [[ " $submitted" =~ \ -v.*\ -v ]]; then
    fail "-v was given twice, and PBS knows the last one only. Write all in one:
  -v CONFIG=...,ARGS=\"...\""
  fi
  if [ -n "$(why_no_chain)" ]; then
    echo "no next job will follow: $(why_no_chain)"
  elif [ -n "$job" ] && ! grep -qs jobs/lib/pbs.sh "${submitted##* }"; then
    fail "the last word behind qsub is not the path of this script, from which the next job is made.
  Give it so, without blanks, and not by 'qsub < FILE'. Or let no next job follow: -v CHAIN=0."
  elif [ -n "$job" ] && [ "$job_number" = 1 ]; then
    try_submission
  fi
}

try_submission() {   # submit the next job on hold, and delete it: at some sites only login nodes may
  local held
  if ! held=$(submit -h -m n); then
    echo "ATTENTION: this host could not submit a next job (see above). If so at the end too, give the
  same qsub again. CHAIN=0: no next job, and no trial now"
  elif ! qdel "$held"; then
    echo "not deleted: give qdel $held"
  fi
}

set_deadline() {   # sets DDP_DEADLINE, when the run saves and stops, and `ends`, the job's end
  local seconds began told
  began=$(($(date +%s) - SECONDS))         # SECONDS have passed since this script's start
  told=$(attribute Resource_List.walltime)
  told=${told:-$WALLTIME}
  if [ -z "$told" ]; then
    told=$(sed -n 's/^#PBS .*walltime=\([0-9:]*\).*/\1/p' "$0" | head -n 1)
    echo "the walltime is not known, and WALLTIME is empty: it is taken to be ${told:-without end}"
  fi
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

submit_next_job() {   # if steps are left and this job got further
  local why limit refusals=0 can_exclude=0      # PBS cannot leave a host out
  why=$(why_no_chain)
  why=${why:-$(why_no_next_start)}
  if [ -n "$why" ]; then
    echo "no next job: $why"
    return
  fi
  limit=$(($(date +%s) + AT_END))
  if [ "$limit" -gt $((ends - 30)) ]; then limit=$((ends - 30)); fi
  if [ -z "$job" ]; then ask_server $((limit - $(date +%s))); fi
  while [ -n "$job" ] && ! submit; do
    # A server that answers has refused it, or came back just now. One that does not is asked again.
    if qstat -f "$PBS_JOBID" > /dev/null; then refusals=$((refusals + 1)); fi
    if [ "$(date +%s)" -ge "$limit" ] || [ "$refusals" = 2 ]; then
      job=''
    else
      sleep 5
    fi
  done
  if [ -z "$job" ]; then echo "not submitted: give the same qsub again"; fi
}

submit() {   # submit OPTION...: the next job: this one's account, queue, nodes, time, variables, what
  # below is set, and these options of qsub. All else stands in the script's own lines, as they are
  # by then.
  local options=("$@") name submitted
  add_attribute Account_Name -A
  add_attribute Resource_List.select -l select=
  add_attribute Resource_List.walltime -l walltime=
  add_attribute umask -W umask=
  if [ "$(attribute Priority)" != 0 ]; then add_attribute Priority -p; fi
  if [ "$(attribute Rerunable)" = False ]; then options+=(-r n); fi
  # By name only: qsub takes the value, which may hold commas and blanks, from the environment.
  local names=CHAIN_JOB
  for name in $(compgen -e); do
    if was_given "$name"; then names+=",$name"; fi
  done
  submitted=$(attribute Submit_arguments)
  CHAIN_JOB=$((job_number + 1)) qsub -W "depend=afterany:$PBS_JOBID" -q "$PBS_O_QUEUE" \
    ${options[@]+"${options[@]}"} -v "$names" "${submitted##* }"
}

add_attribute() {   # add_attribute NAME OPTION [PREFIX]: to `options`, if the job has this attribute
  local value
  value=$(attribute "$1")
  if [ -n "$value" ]; then options+=("$2" "${3:-}$value"); fi
}
