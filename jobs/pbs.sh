#!/bin/bash -l
# Train at any site with PBS (OpenPBS or Professional), by its mpirun.
#   qsub -v ARGS="--data my.fasta" jobs/pbs.sh     (else data/uniref50)
#   DRY_RUN=4 bash jobs/pbs.sh      anywhere: shows the launch lines for 4 nodes
#   watch      tail -f logs/CONFIG-JOBID.log          (exit codes: docs/runs.md)
#   stop       touch RUN_DIR/STOP: the run saves and ends, and no job follows. After qdel JOBID too;
#              but Open MPI then kills the ranks before they can save
#   continue   remove STOP, give the same qsub. A job with steps left submits the next job itself
# Edit account, walltime, modules, and `select`: nodes, what each has, and its ranks (mpiprocs, one
# per GPU). `bash jobs/local.sh 1 --help` makes .venv. Submit from the folder that holds jobs/.
#PBS -A YOUR_PROJECT
#PBS -N sedd
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=12:00:00
#PBS -r y
#PBS -j oe
# shellcheck disable=SC2046,SC2206,SC2207   # words are split on purpose
if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

# Settings; each can also be given by qsub -v, and then goes on to the next job, as keys do.
names='SCRIPT|CONFIG|ARGS|RUN_DIR|VENV|PYTHON|NPROC|THREADS|DDP_MPI4PY|PREFLIGHT|SAVE_SECONDS'
names+='|MASTER_PORT|WALLTIME|WANDB_.*|HF_.*|NCCL_.*|CCL_.*|FI_.*|https_proxy'
given=$(compgen -e | grep -xE "$names" | paste -sd, -)
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                       # with commas: -v ARGS="'optim.betas=[0.9,0.95]'"
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                  # with its mpirun, if it has one; none: your modules' Python
PYTHON=${PYTHON:-python}             # also several words, for a container: docs/machines.md
NPROC=${NPROC:-}                     # ranks per node. Empty: mpiprocs of `select`
THREADS=${THREADS:-8}                # the cores of a rank
SAVE_SECONDS=${SAVE_SECONDS:-600}    # the run saves and stops so long before the walltime
WALLTIME=${WALLTIME:-}               # such as 12:00:00, where qstat does not answer on the node
STARTS=${STARTS:-50}                 # most starts of a chain; 1: no next job
export DDP_MPI4PY=${DDP_MPI4PY:-0}   # 1: rank 0's address by mpi4py, built for this mpirun

cd "${PBS_O_WORKDIR:-.}" || exit 2   # PBS starts a copy of this script, in the home folder
cancelled=no
if [ -n "${DRY_RUN:-}" ]; then
  hosts=($(seq -f host%g "$DRY_RUN"))
  NPROC=${NPROC:-$(sed -n 's/^#PBS -l select=.*:mpiprocs=\([0-9]*\).*/\1/p' "$0")}
  NPROC=${NPROC:-1}                  # PBS starts one rank per node where mpiprocs is missing
elif [ -n "${PBS_NODEFILE:-}" ]; then
  hosts=($(awk '!seen[$1]++' "$PBS_NODEFILE"))
  NPROC=${NPROC:-$(grep -cxF "${hosts[0]}" "$PBS_NODEFILE")}
  log=logs/$(basename "${CONFIG%.*}")-${PBS_JOBID%%.*}.log
  mkdir -p logs && : >> "$log" || exit 2
  echo "output: $PWD/$log"
  exec >> "$log" 2>&1
  # module load openmpi cuda || exit 2
  if command -v module > /dev/null; then module list; fi
  echo "$(date) job $PBS_JOBID on ${hosts[*]}"
  git describe --always --dirty 2> /dev/null || echo "the code has no git revision"
  ulimit -c 0                        # no core files

  # PBS kills at the walltime without a warning. SECONDS: since this script began.
  job=$(qstat -f "$PBS_JOBID" || { sleep 30; qstat -f "$PBS_JOBID"; })
  job=${job//$'\n\t'/}               # lines that qstat has wrapped
  told() { sed -n "s/^ *$1 = //p" <<< "$job"; }
  walltime=${WALLTIME:-$(told Resource_List.walltime)}
  [ -n "$walltime" ] || echo "ATTENTION: qstat tells no walltime: this script's line counts"
  walltime=${walltime:-$(sed -n 's/^#PBS -l walltime=//p' "$0")}
  if ! [[ $walltime =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]]; then
    echo "walltime $walltime: expected a time such as 12:00:00; WALLTIME=12:00:00 gives it"
    exit 2
  fi
  began=$(($(date +%s) - SECONDS))
  stime=$(told stime)                # earlier in an interactive job, or after a long prologue
  if [ -n "$stime" ] && stime=$(date -d "$stime" +%s); then began=$stime; fi
  IFS=: read -r hours minutes seconds <<< "$walltime"
  ends=$((began + 10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
  export DDP_DEADLINE=$((ends - SAVE_SECONDS))
  trap '[ "$(date +%s)" -ge "$ends" ] || cancelled=yes' TERM     # by qdel; later by the walltime
  select=$(told Resource_List.select)
  select=${select:-$(sed -n 's/^#PBS -l select=//p' "$0")}
  if [[ $select =~ ngpus=([0-9]+) && ${BASH_REMATCH[1]} != "$NPROC" ]]; then
    echo "ATTENTION: select=$select, but $NPROC rank(s) per node (mpiprocs or NPROC)"
  fi
else
  echo "submit this with qsub, or see its first lines: bash $0 --help" >&2
  exit 2
fi
set -euf +C                          # modules fail with it. -f: no patterns in ARGS
case $VENV in /*) PATH=$VENV/bin:$PATH ;; *) PATH=$PWD/$VENV/bin:$PATH ;; esac
export OMP_NUM_THREADS=$THREADS WANDB_MODE=${WANDB_MODE:-offline}
export TMPDIR=/tmp                   # that of PBS is too long for sockets of multiprocessing
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker0,lo    # the ^ form never in GLOO_SOCKET_IFNAME

# Open MPI, MPICH and Intel MPI understand this line. Open MPI by itself would bind ranks to single
# cores, and pass no variables to other hosts. They come in a file that only you can read: any user
# of a host reads command lines, and some variables are keys.
port=${MASTER_PORT:-}
hostfile=$(mktemp)
environment=logs/environment-${PBS_JOBID:-0}
trap 'rm -f "$hostfile" "$environment"' EXIT
launch() {   # launch WORD...: start these words NPROC times on each of `hosts`
  for host in "${hosts[@]}"; do
    for ((rank = 0; rank < NPROC; rank++)); do echo "$host"; done
  done > "$hostfile" || return 1
  export DDP_WORLD_SIZE=$((${#hosts[@]} * NPROC))
  export I_MPI_PERHOST=$NPROC        # else Intel MPI under PBS deals ranks to the hosts in turn
  if [ "$DDP_MPI4PY" = 0 ]; then     # else rank 0 sends its address by MPI
    export MASTER_ADDR=${hosts[0]} MASTER_PORT=${port:-$((20000 + RANDOM % 10000))}
    if [ "${#hosts[@]}" = 1 ]; then MASTER_ADDR=127.0.0.1; fi
  fi
  set -- mpirun -n "$DDP_WORLD_SIZE" --hostfile "$hostfile" --bind-to none \
    bash -c 'source "$0" && exec "$@"' "$environment" "$@"
  printf '%q ' "$@"; echo
  if [ -n "${DRY_RUN:-}" ]; then return; fi
  rm -f "$environment"               # of the start before
  # Each host has its own.
  others='PBS_.*|PMI.*|OMPI_.*|PRTE_.*|PWD|OLDPWD|SHLVL|_|HOST(NAME)?|SSH_.*|XDG_.*|DISPLAY|NCPUS'
  others+='|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|ZE_AFFINITY_MASK'
  (umask 077; declare -p $(compgen -e | grep -vxE "$others") > "$environment") || return 1
  "$@"
}
train=($PYTHON -u "$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" $ARGS "$@")
run() { launch "${train[@]}"; }
# Optional: checks before the run, and a start in this job without a bad host.
more=jobs/lib/again.sh
if [ -f $more ]; then source $more; else echo "without $more: nothing is checked"; fi
state() { stat -c '%i %y' "$RUN_DIR/$1" 2> /dev/null || :; }      # differs after each write
status=$(state status.json)
last=$(state checkpoints/last.pt)
code=0
run || code=$?
[ -z "${DRY_RUN:-}" ] || exit "$code"

# The next job. status.json says more than the launcher's code: 75 stopped with steps left, 70 no
# progress, null killed, 1 with the host of a rank that died. After an exception (1) none follows.
said=''
[ "$(state status.json)" = "$status" ] || said=$(cat "$RUN_DIR/status.json") || :
if [[ $said =~ \"code\":\ ([0-9]+) ]]; then code=${BASH_REMATCH[1]}; fi
if [[ $said =~ \"code\":\ null && $code = 0 ]]; then code=1; fi     # killed without a word
next=yes                             # else the last reason that applies
[ "$(state checkpoints/last.pt)" != "$last" ] || next="no: there is no new checkpoint"
[ "$STARTS" -gt 1 ] || next="no: no start is left of STARTS"
[ "${PBS_ENVIRONMENT:-}${PBS_ARRAY_INDEX:-}" = PBS_BATCH ] || next="no: interactive, or an array"
[ ! -e "$RUN_DIR/STOP" ] || next="no: there is a file $RUN_DIR/STOP"
[[ $said =~ \"code\":\ (75|70|null|1,.*\"suspects\":\ \"[^\"]) ]] || next="no: it ended with $code"
[ "$cancelled" = no ] || next="no: the job was cancelled"
echo "$(date) exit code $code; next job: $next"
if [ "$next" = yes ]; then
  export STARTS=$((STARTS - 1))
  account=$(told Account_Name)
  select=$(told Resource_List.select)
  [ -n "$select" ] || echo "ATTENTION: qstat tells no select: this script's line counts"
  submit=(qsub -W "depend=afterany:$PBS_JOBID" ${PBS_O_QUEUE:+-q "$PBS_O_QUEUE"}
    ${account:+-A "$account"} ${select:+-l "select=$select"} -l "walltime=$walltime"
    -v "STARTS${given:+,$given}" "$0")
  again() { sleep 60; [ $cancelled = no ] && "${submit[@]}"; }
  "${submit[@]}" || again || echo "not submitted: ${submit[*]}
Give the same qsub again. What your site demands more, write as #PBS lines into the script."
fi
set +eu                              # for ~/.bash_logout, which a login shell runs now
exit "$code"
