#!/bin/bash
# Train on this machine, with nothing prepared: makes .venv (once), installs, starts the ranks.
#   bash jobs/local.sh                                       2 ranks, the built-in demo
#   bash jobs/local.sh 4                                     4 ranks
#   bash jobs/local.sh 2 --data my.fasta optim.lr=1e-4       what follows NPROC goes to the training script
#   CONFIG=configs/sedd_cpu.yaml LAUNCHER=mpirun bash jobs/local.sh 2
# The first argument is the number of ranks only if it is a number. The exit code is that of the training (README.md);
# launchers' own say less. Output goes to the screen and to logs/CONFIG-DATE.out and .err, for tail -f.
#
# It works in the repository's folder from wherever it is called, so that the same command always finds the
# same run folder (runs/...) again: relative paths, yours as well (CONFIG, --data), are taken from there.
#
# A second call reuses .venv, a change of requirements.txt updates it. PYTHON=python3.12 chooses the
# interpreter. On a Linux computer without a GPU the download is much smaller from PyTorch's CPU wheel index
# (its address stands on pytorch.org):
#   PIP_EXTRA_INDEX_URL=ADDRESS bash jobs/local.sh
# shellcheck disable=SC2317     # functions that others call by name
set -euo pipefail

# What you may want to edit; each can also be given in front of the command.
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_demo.yaml}
NPROC=${NPROC:-2}                        # ranks; with GPUs, one per GPU
LAUNCHER=${LAUNCHER:-torchrun}           # torchrun | mpirun
ARGS=${ARGS:-}                           # more arguments of the training script, separated by blanks
LOGS=${LOGS:-1}                          # 0: to the screen alone, where a terminal shows a bar of progress
# The MPI of .venv, in which only one can live. MPICH, because it needs no flags to run as root or with more
# ranks than cores. MPI_WHEEL= (empty) installs none: LAUNCHER=mpirun then takes the mpirun of your PATH.
MPI_WHEEL=${MPI_WHEEL-mpich==5.0.2}
# For debugging:
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=^docker0,lo   # never this form in GLOO_SOCKET_IFNAME, which wants one name
# export CUDA_DEVICE_ORDER=PCI_BUS_ID

# >>> environment: the same lines in jobs/local.sh and jobs/test.sh >>>
fail() { printf '%s: %s\n' "$0" "$*" >&2; exit 1; }

install() {   # install PYTHON [pip arguments]
  "$1" -m pip install --quiet --no-input --disable-pip-version-check "${@:2}" ||
    fail "pip could not install ${*:2}
  Its own message stands above. Without network: set HTTPS_PROXY, or point pip at a mirror (PIP_INDEX_URL)
  or at a folder of wheels (PIP_FIND_LINKS). Then give the same command again: nothing half-made is used."
}

make_env() {
  # The stamp is written last. Its first line says when .venv must be made anew: MPI wheels overwrite each
  # other in one environment, and an environment cannot be moved. Its second, when pip has to run again.
  local python=${PYTHON:-python3} version kind list
  if [ -z "${PYTHON:-}" ] && [ -e .venv/stamp ] && .venv/bin/python -c '' 2>/dev/null; then
    python=.venv/bin/python                # no interpreter was asked for: keep the one that .venv has
  fi
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "cannot run '$python'. Install Python 3.10 or newer, or name one: PYTHON=python3.11 bash $0"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is Python $version, expected 3.10 or newer. Name another one: PYTHON=python3.11 bash $0"
  kind="Python $version, ${MPI_WHEEL:-no MPI wheel}, in $PWD"
  list=$(cksum < requirements.txt)
  if .venv/bin/python -c '' 2>/dev/null && [ "$(cat .venv/stamp 2>/dev/null)" = "$kind"$'\n'"$list" ]; then
    return
  fi
  if [ "$(head -n 1 .venv/stamp 2>/dev/null)" != "$kind" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    echo "making .venv ($kind)"
    rm -f .venv/stamp
    "$python" -m venv --clear .venv ||
      fail "'$python -m venv' failed, see above. On Debian and Ubuntu its files are a package of their own:
  apt-get install python$version-venv. Or name another interpreter: PYTHON=python3.11 bash $0"
  fi
  rm -f .venv/stamp
  echo "installing requirements.txt and ${MPI_WHEEL:-no MPI} into .venv (minutes at first: torch is large)"
  install .venv/bin/python -r requirements.txt ${MPI_WHEEL:+"$MPI_WHEEL"}
  printf '%s\n' "$kind" "$list" > .venv/stamp
}

locked() {   # run a function while no other call works on .venv
  [ ! -L .venv ] || fail "$PWD/.venv is a link, and what it points to would be overwritten. Remove the link."
  if [ -e .venv ] && ! [ -e .venv/stamp ] && ! [ -e .venv.lock ]; then
    fail "$PWD/.venv is there but was not made by this script. Move it away, or use it without this script."
  fi
  ( # a subshell, so that the training started later does not hold the lock
    if command -v flock > /dev/null && ! flock -n 9; then
      echo "another call is working on .venv; waiting for it"
      flock 9 || echo "no file locks on this file system: give such calls one after the other"
    fi
    "$@"
  ) 9> .venv.lock
}
# <<< environment <<<

# >>> follow: the same lines in local.sh and torchrun_multinode.sh >>>
follow() {   # follow PID: wait for a launcher in a process group of its own, and pass signals on to it, once
  local pid=$1 result name
  for name in TERM INT USR1; do
    # shellcheck disable=SC2064
    trap "signalled=1 stopped=$name; kill -$name $pid || true" "$name"
  done
  # shellcheck disable=SC2064
  trap "signalled=1 stopped=HUP; kill -TERM $pid || true" HUP   # the terminal was closed
  signalled=1
  while [ "$signalled" = 1 ]; do   # a signal ends the waiting, not the launcher
    signalled=0 result=0
    wait "$pid" || result=$?
  done
  trap - TERM INT USR1 HUP
  return "$result"
}
# <<< follow <<<

if [[ ${1:-} =~ ^[0-9]+$ ]]; then NPROC=$1; shift; fi
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC is '$NPROC', expected a number of ranks, 1 or more."
[[ $LAUNCHER == torchrun || $LAUNCHER == mpirun ]] ||
  fail "LAUNCHER is '$LAUNCHER', expected torchrun or mpirun."

called_from=$PWD
unset CDPATH
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
[ "$called_from" -ef . ] || echo "working in $PWD; relative paths are taken from there"
[ -f "$SCRIPT" ] || fail "SCRIPT=$SCRIPT is not a file in $PWD"
[ -f "$CONFIG" ] || fail "CONFIG=$CONFIG is not a file in $PWD"
locked make_env

# Unset, every rank would use all cores, and the ranks would slow each other down.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=$(( cores > NPROC ? cores / NPROC : 1 ))
fi
read -r -a arguments <<< "$ARGS"
set -- ${arguments[@]+"${arguments[@]}"} "$@"     # bash 3.2 calls an empty array unset
if [ "$LOGS" = 1 ]; then
  mkdir -p logs
  log=logs/$(basename "${CONFIG%.*}")-$(date +%Y%m%d-%H%M%S)-$$
  # A signal from the terminal must not end what writes the last words down.
  exec > >(trap '' INT TERM HUP; exec tee -a "$log.out") 2> >(trap '' INT TERM HUP; exec tee -a "$log.err" >&2)
  echo "output: $PWD/$log.out and .err"
fi
if [ "$LAUNCHER" = torchrun ]; then
  command=(.venv/bin/python -m torch.distributed.run --standalone --nproc_per_node="$NPROC"
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
else
  mpirun=.venv/bin/mpirun
  [ -n "$MPI_WHEEL" ] || mpirun=$(command -v mpirun) || fail "MPI_WHEEL is empty and no mpirun is on PATH."
  command=("$mpirun" -n "$NPROC" .venv/bin/python)
fi

# Where the run leaves what its exit code was: the last of these options holds.
status=runs/$(basename "${CONFIG%.*}") before=''
for word in "$@"; do
  case $before in --work_dir | --output_dir) status=$word ;; esac
  case $word in --work_dir=* | --output_dir=*) status=${word#*=} ;; esac
  before=$word
done
status=$status/status.json stamp=.venv/started.$$ code=0
touch "$stamp"
set -m
"${command[@]}" "$SCRIPT" --config "$CONFIG" "$@" &
set +m
follow "$!" || code=$?
if [ "$code" != 0 ] && [ "$status" -nt "$stamp" ]; then
  told=$(sed -n 's/^{"code": *\([1-9][0-9]*\),.*/\1/p' "$status")
  code=${told:-$code}
  printf '\n%s: %s\n' "$status" "$(cat "$status")" >&2     # after a launcher's own words, which say less
fi
rm -f "$stamp"
exit "$code"
