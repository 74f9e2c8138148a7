#!/bin/bash
# Train on several hosts without a batch system: this command on each of them, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.100 bash jobs/torchrun_multinode.sh --data my.fasta
# MASTER_ADDR is the host of node 0, as the others reach it. What follows the script goes to the training script.
# The hosts need the same files; RUN_DIR is written on node 0 alone.
#   watch      here, or tail -f logs/RUN-NODE_RANK-DATE.out and .err
#   stop       Ctrl-C or kill of this script on one host, or touch RUN_DIR/STOP on node 0: all save and end
#   continue   the same commands again (after STOP: remove that file)
# The exit code is that of the training, see README.md, where RUN_DIR is seen, else torchrun's; 3: the pre-flight
# failed; 130: Ctrl-C ended it (143: SIGTERM).

# What you may want to edit; each can also be given in front of the command.
NNODES=${NNODES:?the number of hosts}
NODE_RANK=${NODE_RANK:?this host, 0 to NNODES - 1}
MASTER_ADDR=${MASTER_ADDR:?host 0, as the others reach it}
MASTER_PORT=${MASTER_PORT:-29500}         # free on host 0, and the two after it for the pre-flight
SCRIPT=${SCRIPT:-train_sedd_ddp.py}
CONFIG=${CONFIG:-configs/sedd_uniref50.yaml}
ARGS=${ARGS:-}                            # more arguments of the training script, separated by blanks
RUN_DIR=${RUN_DIR:-runs/$(basename "${CONFIG%.*}")}
VENV=${VENV:-.venv}                       # used where it exists
PYTHON=${PYTHON:-python}
NPROC=${NPROC:-}                          # ranks on this host, the same on all. Empty: one per GPU, or one
PREFLIGHT=${PREFLIGHT---preflight}        # or "--preflight --bandwidth"; empty: none
MINUTES=${MINUTES:-}                      # the run saves and stops after so long. Empty: no limit
export WANDB_MODE=${WANDB_MODE:-offline}
# For debugging:
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=^docker0,lo   # never this form in GLOO_SOCKET_IFNAME, which wants one name
# export CUDA_DEVICE_ORDER=PCI_BUS_ID
# unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT        # Intel GPUs: they want an MPI, which torchrun is not

set -euo pipefail

# >>> run: the same lines in aurora.pbs, polaris.pbs, slurm.sh and torchrun_multinode.sh >>>
leave() { set +eu; exit "$1"; }   # in a login shell ~/.bash_logout runs now, and is not written for them

fail() { printf 'job script: %s\n' "$*" >&2; leave 2; }

check_settings() {
  local word
  RUN_DIR=${RUN_DIR%/}
  [ -f "$SCRIPT" ] || fail "SCRIPT=$SCRIPT is not a file in $PWD. Start this from the folder that holds it."
  [ -f "$CONFIG" ] || fail "CONFIG=$CONFIG is not a file in $PWD. Start this from the folder that holds it."
  [[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC is '$NPROC', expected a number of ranks per node, 1 or more."
  [[ $NODES =~ ^[1-9][0-9]*$ ]] || fail "the number of nodes is '$NODES', expected 1 or more."
  command -v "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON is not a program. Load a module, set VENV or PYTHON."
  for word in ${arguments[@]+"${arguments[@]}"}; do   # bash before 4.4 calls an empty array unset
    case $word in
      --fresh) fail "--fresh would start over at every continuation. Move $RUN_DIR away instead." ;;
      --work_dir | --work_dir=* | --output_dir | --output_dir=*)
        fail "give the run folder as RUN_DIR=..., this script looks into it." ;;
      --resume | --resume=*) fail "--resume would be refused at the first continuation. Start from it once by hand." ;;
    esac
  done
  mkdir -p "$(dirname "$RUN_DIR")"
}

guard() {   # ends what should not start (again)
  local mark before='' idle=0 rest=''
  if [ -e "$RUN_DIR/DONE" ]; then
    echo "$RUN_DIR/DONE exists: this run is finished. Remove the file to train longer."
    leave 0
  fi
  [ ! -e "$RUN_DIR/STOP" ] || fail "$RUN_DIR/STOP exists: this run was asked to stop. Remove the file to go on."
  # The file lies beside the run folder, so that a first start finds that folder as it was.
  if [ -e "$RUN_DIR.chain" ]; then read -r before idle rest < "$RUN_DIR.chain" || true; fi
  mark=$(stat -c %i-%Y-%s "$RUN_DIR/checkpoints/last.pt" 2> /dev/null || echo none)
  if [ "$CHAINED" = 1 ] && [ "$mark" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  printf '%s %s %s\n' "$mark" "$idle" "$rest" > "$RUN_DIR.chain"
  [ "$idle" -lt "$MAX_IDLE" ] || fail "the last $idle runs in a row left no new checkpoint in $RUN_DIR: their output
  is in logs/. A start by hand counts anew."
}

train() {   # sets code: what the training says in status.json, else the launcher's; again: 1 where work is left
  local status=$RUN_DIR/status.json told launcher=0
  # An earlier start must not speak for this one. Not removed: a refusal is recorded only where there is such a file.
  if [ -e "$status" ]; then
    printf '{"code": null, "reason": "starting", "step": null}\n' > "$status.$HOSTNAME.$$"
    mv "$status.$HOSTNAME.$$" "$status"
  fi
  launch "$PYTHON" -u "$SCRIPT" --config "$CONFIG" --work_dir "$RUN_DIR" ${arguments[@]+"${arguments[@]}"} || launcher=$?
  told=$(sed -n 's/^{"code": *\([^,]*\),.*/\1/p' "$status" 2> /dev/null || true)
  case $told in
    '') conclude "$launcher" "$launcher" ;;                    # a script that writes no status.json
    null) if [ "$launcher" = 2 ]; then conclude 2 2; else conclude "$((launcher ? launcher : 1))" killed; fi ;;
    *) conclude "$told" "$told" ;;
  esac
  echo "$(date '+%F %T') ended: launcher's exit code $launcher, status.json $(cat "$status" 2> /dev/null || echo none)"
}

conclude() {   # conclude CODE OUTCOME: OUTCOME is CODE, or "killed"
  code=$1 again=0
  if [ "$2" = 0 ] && [ -d "$RUN_DIR" ]; then date > "$RUN_DIR/DONE"; fi
  if [[ " $AGAIN_ON " == *" $2 "* ]] && [ ! -e "$RUN_DIR/STOP" ]; then again=1; fi
}
# <<< run <<<

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

launch() {   # launch PYTHON -u SCRIPT ARGUMENTS...: NPROC ranks here, which meet those of the other hosts at host 0
  shift 2   # torch's launcher starts its own
  set -m
  "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" \
    --master-port="$port" --nproc-per-node="$NPROC" ${handled:+"--signals-to-handle=$handled"} "$@" &
  set +m
  follow "$!"
}

LOG=logs/$(basename "$RUN_DIR")-$NODE_RANK-$(date +%Y%m%d-%H%M%S)
mkdir -p logs
# A signal from the terminal must not end what writes the last words down.
exec > >(trap '' INT TERM HUP; exec tee -a "$LOG.out")
writers=${!:-}   # bash before 4.4 does not tell
exec 2> >(trap '' INT TERM HUP; exec tee -a "$LOG.err" >&2)
writers+=" ${!:-}"
echo "output: $PWD/$LOG.out and .err"
# shellcheck disable=SC1091
if [ -f "$VENV/bin/activate" ]; then source "$VENV/bin/activate"; fi
read -r -a arguments <<< "$ARGS"
arguments+=("$@")
NODES=$NNODES CHAINED=0 MAX_IDLE=1 AGAIN_ON="75 70" started=$(date +%s)
# Devices here, and the signals that torch's launcher is to pass on: torch before 2.9 does not know the option.
asked=$("$PYTHON" -c 'import re, torch
xpu = torch.xpu.device_count() if hasattr(torch, "xpu") else 0
new = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 9)
print(torch.cuda.device_count() or xpu or 1, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" if new else "")') ||
  fail "PYTHON=$PYTHON cannot import torch. Set VENV or PYTHON."
read -r devices handled <<< "$asked"
NPROC=${NPROC:-$devices}
check_settings
guard
export DDP_WORLD_SIZE=$((NNODES * NPROC))
if [ -n "$MINUTES" ]; then export DDP_DEADLINE=$((started + MINUTES * 60)); fi
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

# By hand no host can be left out: a second try is for a passing fault.
read -r -a words <<< "$PREFLIGHT"
code=0 stopped=''
if [ -n "$PREFLIGHT" ] && ! [ -f test_aurora_ddp.py ]; then
  echo "no pre-flight: there is no test_aurora_ddp.py in $PWD" >&2
  PREFLIGHT=''
fi
for try in 1 2; do
  if [ -z "$PREFLIGHT" ]; then break; fi
  echo "pre-flight, try $try"
  port=$((MASTER_PORT + try)) code=0
  launch "$PYTHON" -u test_aurora_ddp.py "${words[@]}" || code=3
  if [ "$code" = 0 ] || [ -n "$stopped" ]; then break; fi
done
if [ -n "$stopped" ]; then   # also where the pre-flight had just passed
  echo "SIG$stopped during the pre-flight: nothing is trained" >&2
  code=$((128 + $(kill -l "$stopped")))   # as of a program that a signal ends: 130 at Ctrl-C
fi
port=$MASTER_PORT
if [ "$code" = 0 ]; then train; else again=0; fi
if [ "$again" = 1 ]; then echo "exit code $code: the same commands again go on from the last checkpoint"; fi
exec >&- 2>&-
# shellcheck disable=SC2086
wait $writers || true     # what is still on its way to the files
exit "$code"
