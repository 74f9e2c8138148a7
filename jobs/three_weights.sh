#!/bin/bash
# Train from three published weights, one after the other, and print the command that scores by all
# three: the mean of their scores ranks mutations better than one.
#   bash jobs/three_weights.sh --train_data megascale.csv data.val_fraction=0.2
#   CONFIG=configs/dpo_own_table.yaml FOLDER=runs/round1 bash jobs/three_weights.sh \
#       --train_data table.csv --measured activity --better higher
#   CONFIG=configs/dpo_binding.yaml FROM=runs/three_weights FOLDER=runs/three_binding \
#       bash jobs/three_weights.sh --train_data skempi.csv
# FROM: folder of an earlier call, whose three weights are trained further.
# All words go to train_dpo_ddp.py, whose --config, --base_model_name and --work_dir are given here.
# Runs: FOLDER/v_48_010 and so on. The same command goes on after an interruption.
set -euo pipefail
unset CDPATH

if [[ ${1:-} = --help || ${1:-} = -h ]]; then sed -n '1d; /^# /!q; s/^# //p' "$0"; exit; fi

PYTHON=${PYTHON:-python}
SCRIPT=${SCRIPT:-train_dpo_ddp.py}
CONFIG=${CONFIG:-configs/dpo_stability.yaml}
FOLDER=${FOLDER:-runs/three_weights}
FROM=${FROM:-}
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -e "$CONFIG" ] || CONFIG=$here/$CONFIG

if [[ " $* " =~ " "--(config|base_model_name|work_dir|output_dir)[=\ ] ]]; then
  echo "three_weights.sh: error: found --${BASH_REMATCH[1]}; expected CONFIG=... or FOLDER=..." >&2
  exit 2
fi
for base in v_48_020 v_48_010 v_48_030; do
  start=$base
  [ -z "$FROM" ] || start=$FROM/$base/latest_model.pt
  "$PYTHON" "$here/$SCRIPT" --config "$CONFIG" --base_model_name "$start" \
    --work_dir "$FOLDER/$base" "$@"
done
echo "Score by all three, each corrected by its own base weights:"
printf '  %q %q %q --also %q --also %q ...\n' "$PYTHON" "$here/score_mutations.py" \
  "$FOLDER"/{v_48_020,v_48_010,v_48_030}/latest_model.pt
