#!/bin/bash
# Does a new card serve? Four parts, one after the other, in 9 minutes at most (MINUTES):
#   machine   test_aurora_ddp.py
#   dtypes    test_dtype.py
#   resume    the demo of SEDD, killed after a checkpoint and continued, ends with the loss of a run
#             that was left alone, within 0.1 %
#   speed     python -m bench speed
#
#   bash bench/card.sh                  on the device that training would choose
#   DEVICE=cpu STEPS=30 SPEED="sedd --config configs/sedd_demo.yaml --repeats 2" bash bench/card.sh
#
# Shows what each part prints, then a table. A part that fails does not keep the others from being
# tried: then the exit code is 3.
set -eu
unset CDPATH
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

DEVICE=${DEVICE:-auto}          # auto | cuda | xpu | cpu
STEPS=${STEPS:-150}             # of the demo
SPEED=${SPEED:---repeats 2}     # what to measure, see python -m bench speed --help
MINUTES=${MINUTES:-9}           # at most, of which each part has its share
PYTHON=${PYTHON:-python}

limit() {     # limit SECONDS: of 9 minutes
  echo "$(($1 * MINUTES / 9))"
}

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
demo=(timeout "$(limit 60)" "$PYTHON" train_sedd_ddp.py --config configs/sedd_demo.yaml
      --device "$DEVICE" "training.n_iters=$STEPS" "training.snapshot_freq=$((STEPS / 3))")
table="| part | outcome | seconds |"$'\n'"|---|---|---|"
code=0

part() {      # part NAME COMMAND...
  local outcome=PASS began=$SECONDS
  printf '\n== %s\n' "$1"
  "${@:2}" || outcome="FAIL, exit code $?"
  outcome=${outcome/exit code 124/its time was up}
  [ "$outcome" = PASS ] || code=3
  table+=$'\n'"| $1 | $outcome | $((SECONDS - began)) |"
}

resume() {
  "${demo[@]}" --work_dir "$folder/alone" && killed && "${demo[@]}" --work_dir "$folder/killed" &&
    echo "loss $(loss alone) alone, $(loss killed) continued" &&
    awk -v one="$(loss alone)" -v other="$(loss killed)" \
      'BEGIN {exit !(one > 0 && (one - other)^2 <= (0.001 * one)^2)}'
}

killed() {    # `timeout` leads a group of processes, which is killed as a whole
  "${demo[@]}" --work_dir "$folder/killed" &
  until [ -e "$folder/killed/checkpoints/last.pt" ]; do
    kill -0 $! || return
    sleep 0.05
  done
  kill -9 -- "-$!"
  ! wait $!
}

loss() {      # of the last step
  tail -n 1 "$folder/$1/metrics.jsonl" | grep -o '"loss": [^,]*' | cut -d ' ' -f 2
}

part machine timeout "$(limit 40)" "$PYTHON" test_aurora_ddp.py --device "$DEVICE"
part dtypes timeout "$(limit 80)" "$PYTHON" test_dtype.py --device "$DEVICE"
part resume resume
# shellcheck disable=SC2086
part speed timeout "$(limit 240)" "$PYTHON" -m bench speed $SPEED --device "$DEVICE"
printf '\n%s\n' "$table"
exit $code
