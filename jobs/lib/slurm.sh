# shellcheck shell=bash
# shellcheck disable=SC2154    # read here what jobs/slurm.sh sets, such as `launch`
# The inner part of jobs/slurm.sh: the job's size, its deadline, the next start. It sources this file
# from the folder it was submitted in, calls prepare_job, defines set_launch, which sets `launch`, and
# calls run_job.
source jobs/lib/batch.sh

prepare_job() {   # prepare_job WORD...: sets `hosts`, `cores` (of a rank), `python`, `training` (with
  # these words behind it), and the ranks' environment
  note_settings SCRIPT CONFIG ARGS RUN_DIR VENV PYTHON NPROC PREFLIGHT SAVE_SECONDS REQUEUE \
    RETRIES MAX_JOBS AGAIN_ON EXCLUDE OMP_NUM_THREADS WANDB_MODE
  if [ -z "${SLURM_JOB_ID:-}" ]; then   # DRY_RUN: what Slurm would read from the script's lines
    SLURM_CPUS_PER_TASK=$(asked cpus-per-task) || :
    SLURM_NTASKS_PER_NODE=$(asked ntasks-per-node) || :
  fi
  cores=${SLURM_CPUS_PER_TASK:-1}
  NPROC=${NPROC:-${SLURM_NTASKS_PER_NODE:-4}}
  check_files
  check_number NPROC 1
  check_number SAVE_SECONDS 0
  check_number MAX_JOBS 1
  check_number RETRIES 0
  refuse_options 'config|work_dir|output_dir|fresh|resume' "$ARGS" "$@"
  use_venv
  split_python
  split_arguments "$@"
  training=("$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"})
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} WANDB_MODE
  if [ -n "${DRY_RUN:-}" ]; then
    check_number DRY_RUN 1
    read -r -d '' -a hosts < <(seq -f host%g "$DRY_RUN") || :
  else
    read -r -d '' -a hosts <<< "$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || :
    if [ "${#hosts[@]}" = 0 ]; then fail "scontrol names no hosts of $SLURM_JOB_NODELIST."; fi
    open_log "$SLURM_JOB_ID"
    check_torch
    echo "$(date) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
    count_jobs $((${SLURM_RESTART_COUNT:-0} + 1))
    set_deadline
  fi
}

asked() {   # asked NAME: print what the line `#SBATCH --NAME=...` of the script asks for
  grep -o "^#SBATCH --$1=[0-9]*" "$0" | grep -o '[0-9]*$'
}

set_deadline() {   # sets DDP_DEADLINE, when the run saves and stops, `ends`, the job's end, and `job`
  local end
  # The number of an array's last task is that of the whole array. NUMBER_TASK names the task alone.
  job=$SLURM_JOB_ID
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
  end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$job" --format=%e) || end=''
  if [[ $end =~ ^[0-9]+-[0-9]+-[0-9]+T ]]; then
    ends=$(date -d "$end" +%s)
    export DDP_DEADLINE=$((ends - SAVE_SECONDS))
    if [ "$DDP_DEADLINE" -le "$(date +%s)" ]; then
      fail "the job's time is not longer than SAVE_SECONDS."
    fi
    echo "the run stops and saves at $(date -d "@$DDP_DEADLINE")"
  else
    ends=$(($(date +%s) + 31536000))    # unknown: a year
    echo "squeue does not know when the job ends: the run is stopped by --signal alone"
  fi
}

prepare_start() {   # before each start: sets `on_hosts`, the options of srun, and the number of ranks
  on_hosts=(--nodes="${#hosts[@]}")
  if [ "${#left_out[@]}" -gt 0 ]; then
    on_hosts+=(--exclude="$(joined "${left_out[@]}")")
  fi
  export DDP_WORLD_SIZE=$((${#hosts[@]} * NPROC))
}

joined() {   # joined WORD...: print them with commas between
  local IFS=,
  echo "$*"
}

run_job() {   # the job, from the pre-flight to its end or next start
  if [ -n "${DRY_RUN:-}" ]; then
    prepare_start
    set_launch
    show_launch 'DDP|NCCL|OMP'
    finish 0
  fi
  watch_for_sigterm
  train
  requeue
  finish "$code"
}

requeue() {   # start this job again, if steps are left and it got further; with EXCLUDE without the hosts
  # that it has left out
  local why can_exclude=$EXCLUDE excluded
  why=$(why_no_next_start)
  if [ "$REQUEUE" != 1 ]; then why="REQUEUE is $REQUEUE"; fi
  if [ -n "$why" ]; then
    echo "not requeued: $why"
    return
  fi
  excluded=$(squeue --noheader --jobs="$job" --format=%x) || excluded=''
  echo "requeued, to go on from the last checkpoint"
  trap '' TERM         # which Slurm sends to this script then, and KillWait later SIGKILL
  if ! scontrol requeue "$job"; then
    echo "Slurm did not requeue it: give the same sbatch again"
  elif [ "$EXCLUDE" = 1 ] && [ "${#left_out[@]}" -gt 0 ]; then    # only now: it has to wait
    scontrol update "JobId=$job" \
      "ExcNodeList=${excluded:+$excluded,}$(joined "${left_out[@]}")"
  fi
}
