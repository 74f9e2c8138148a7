# shellcheck shell=bash
# shellcheck disable=SC2086,SC2154    # the job scripts set what is read here; words are split
# Optional: a job script that sources this file, after `launch` and `train`, gets another `run`. It
#   - refuses settings that cannot be right, before anything is started (exit code 2);
#   - checks the machine by PREFLIGHT, and trains only if all is well (else exit code 3);
#   - leaves out a host that the check suspects, or whose rank died or is late, and starts again in
#     the same job on those that are left: on fewer ranks a step takes longer, its sum is equal;
#   - in a DRY_RUN says which Python would run, and whether the files are there.
# It reads hosts, train, log, cancelled and the settings of the script; it changes hosts, train, and
# STARTS by each start.
PREFLIGHT=${PREFLIGHT-jobs/preflight.py}   # and its options; empty: no check of the machine
RESTART=300     # seconds before the run has to save, in which it is not started again

run() {
  local code known before why
  check_settings
  if [ -n "${DRY_RUN:-}" ]; then
    report
    return
  fi
  while true; do
    known=$(wc -l < "$log")           # lines of earlier starts
    before=$(state status.json)
    code=0
    check_machine || code=$?
    if [ "$code" = 0 ]; then launch "${train[@]}" || code=$?; fi
    find_bad_hosts
    if [ "${#bad[@]}" = 0 ]; then return "$code"; fi
    why=$(why_not_again)
    if [ -n "$why" ]; then
      echo "not started again in this job, without ${bad[*]}: $why"
      return "$code"
    fi
    keep_global_batch
    hosts=("${good[@]}")
    STARTS=$((STARTS - 1))
    echo "$(date) starting again on ${hosts[*]}, without ${bad[*]}"
  done
}

refuse() {   # refuse MESSAGE: end with code 2, which asks for a correction
  printf 'job script: %s\n' "$*" >&2
  set +eu    # a login shell now runs the user's ~/.bash_logout
  exit 2
}

check_settings() {
  local own='--(config|work_dir|output_dir|fresh|resume)' name
  if [ "${#hosts[@]}" = 0 ]; then
    refuse "no host: DRY_RUN=${DRY_RUN:-} is a number of nodes, or the scheduler names none."
  fi
  for name in SCRIPT CONFIG; do
    if [ ! -f "${!name}" ]; then
      refuse "$name=${!name} is not a file in $PWD. Submit from the folder that holds it."
    fi
  done
  for name in NPROC STARTS; do
    if ! [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]]; then refuse "$name=${!name} is not 1 or more."; fi
  done
  if ! [[ $SAVE_SECONDS =~ ^(0|[1-9][0-9]{0,8})$ ]]; then
    refuse "SAVE_SECONDS=$SAVE_SECONDS is not a number of seconds."
  fi
  for name in ARGS RUN_DIR CONFIG PYTHON PREFLIGHT; do    # by qsub -v they double with each job
    if [[ ${!name} == *[\"\\]* ]]; then
      refuse "$name=${!name}: words are split at blanks. Leave out quotes and backslashes."
    fi
  done
  if [[ " ${train[*]}" =~ --work_dir.*[[:space:]]$own([=[:space:]]|$) ]]; then
    refuse "--${BASH_REMATCH[1]} is among the arguments. Give CONFIG or RUN_DIR; and --fresh or" \
      "--resume once by hand, as each next start would repeat it."
  fi
  if [[ ${CPU_BIND:-} == list:* && $(tr -cd : <<< "$CPU_BIND" | wc -c) != "$NPROC" ]]; then
    refuse "NPROC=$NPROC, but CPU_BIND=$CPU_BIND has the cores of another number of ranks."
  fi
  if [ "$VENV" != none ] && [ ! -x "$VENV/bin/python" ]; then
    name="there is no $VENV/bin/python (VENV). $(make_venv)"
    if [ -z "${DRY_RUN:-}" ]; then refuse "$name"; fi
    echo "ATTENTION: $name"
  fi
  if [ -n "${DRY_RUN:-}" ]; then return; fi
  if ! $PYTHON -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("torch"))'; then
    refuse "PYTHON=$PYTHON does not run here, or has no torch. Correct the modules, VENV or PYTHON."
  fi
  if [ "$DDP_DEADLINE" -le "$(date +%s)" ]; then
    refuse "SAVE_SECONDS=$SAVE_SECONDS: the time of the job is not longer."
  fi
}

make_venv() {   # print how to make VENV
  if [ "$VENV" = .venv ]; then
    echo "Make it once: bash jobs/local.sh 1 --help"
    return
  fi
  echo "Make it once, after the lines with \`module\` of the job script:
  python -m venv --system-site-packages $VENV
  $VENV/bin/pip install -r requirements-base.txt"
}

check_machine() {   # 0: all is well, 2: wrong options, 3: a check failed, 143: cancelled
  local code=0
  if [ "$cancelled" = yes ]; then return 143; fi
  if [ -z "$PREFLIGHT" ]; then return; fi
  launch $PYTHON -u $PREFLIGHT --work_dir "$RUN_DIR" || code=$?
  if [ "$cancelled" = yes ]; then return 143; fi
  if [[ $code = 0 || $code = 2 ]]; then return "$code"; fi
  echo "$(date) the pre-flight ended with $code: nothing is trained"
  if ! new_lines | grep -qE '^(PASS|FAIL)'; then
    echo "nothing was checked: the launcher or Python says above why it did not start"
  fi
  return 3
}

find_bad_hosts() {   # sets `bad`, the hosts at fault, and `good`, the others. They are named by
  # status.json, or where this start has written none, by the log. An exception blames no host
  local named host
  if [ "$(state status.json)" != "$before" ]; then
    named=$(sed -n 's/.*"suspects": "\([^"]*\)".*/\1/p' "$RUN_DIR/status.json")
  else
    named=$(new_lines | sed -nE -e 's/^suspect hosts: //p' \
      -e 's/^FAILED: rank [0-9]+( of [0-9]+)? on ([^:]*): (died|no progress.* Late:).*/\2/p' |
      tail -n 1)
  fi
  bad=()
  good=()
  for host in "${hosts[@]}"; do    # with and without a domain
    if [[ ",$named," == *",${host%%.*}"[,.]* ]]; then bad+=("$host"); else good+=("$host"); fi
  done
}

new_lines() {   # print what came into the log by this start
  tail -n "+$((known + 1))" "$log"
}

why_not_again() {   # print why the run is not started again in this job; nothing if it is
  if [ "$cancelled" = yes ]; then
    echo "the job was cancelled"
  elif [ -e "$RUN_DIR/STOP" ]; then
    echo "there is a file $RUN_DIR/STOP"
  elif [ "${#good[@]}" = 0 ]; then
    echo "no other host is left"
  elif [ "$STARTS" -le 1 ]; then
    echo "no start is left of STARTS"
  elif [ "$(date +%s)" -gt $((DDP_DEADLINE - RESTART)) ]; then
    echo "the time of the job is nearly over"
  fi
}

keep_global_batch() {   # until there is a checkpoint, which keeps the number of micro-batches, have
  # the ranks that are left compute as many as all ranks would have
  local accum
  if ! grep -q micro_batches "$SCRIPT"; then return; fi      # not one of our trainings
  if [[ -e $RUN_DIR/checkpoints/last.pt || " ${train[*]}" == *" training.micro_batches="* ]] ||
    grep -qE '^[^#]*\bmicro_batches:' "$CONFIG"; then
    return
  fi
  accum=$(printf '%s\n' "${train[@]}" | sed -n 's/^training\.accum=//p' | tail -n 1)
  accum=${accum:-$(sed -n 's/^[^#]*\baccum: *\([0-9][0-9]*\).*/\1/p' "$CONFIG" | head -n 1)}
  train+=("training.micro_batches=$((${#hosts[@]} * NPROC * ${accum:-1}))")
}

report() {   # for DRY_RUN
  local word option='' data=()
  echo "Python: $(command -v ${PYTHON%% *} || echo "$PYTHON, which is not here"); VENV=$VENV"
  report_file "$CONFIG"
  for word in "${train[@]}"; do
    case $word,$option in
      --*data=* | --*structures=* | --init_from=*) data+=("${word#*=}") ;;
      --*) option=${word%%=*} ;;
      *=*,*) option='' ;;
      *,--*data | *,--datafile | *,--*structures | *,--init_from) data+=("$word") ;;
    esac
  done
  if [ "${#data[@]}" = 0 ]; then      # those of the config
    data=($(sed -nE 's/^ *(file|train_data|structures): *([^ #]+).*/\2/p' "$CONFIG"))
  fi
  for word in ${data[@]+"${data[@]}"}; do report_file "$word"; done
  if [ -n "$PREFLIGHT" ]; then launch $PYTHON -u $PREFLIGHT --work_dir "$RUN_DIR"; fi
  launch "${train[@]}"
}

report_file() {
  if [ -e "$1" ]; then echo "$1 is there"; else echo "ATTENTION: $1 is not there, in $PWD"; fi
}
