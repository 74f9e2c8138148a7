#!/bin/bash
# The table of docs/rounds.md: ProteinMPNN tuned on 24, 48 and 96 random variants of each protein of
# a table, and Spearman's correlation on all its others, before (zero-shot) and after.
#   bash bench/rounds.sh proteingym.csv fitness
#   SIZES=48 DRAWS=0 bash bench/rounds.sh TABLE.csv COLUMN      higher is better
# Each line is a mean over three draws. Takes two hours on a core for 17 assays. The table begins
# with the column pdb_file. FOLDER keeps the last run.
set -euo pipefail
unset CDPATH

PYTHON=${PYTHON:-python}
SIZES=${SIZES:-24 48 96}
DRAWS=${DRAWS:-0 1 2}
FOLDER=${FOLDER:-runs/rounds}
BASE=${BASE:-v_48_020}
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
table=$(realpath "$1")
measured=$2

shuffled() {  # shuffled PROTEIN SEED: its lines of the table, in random order
  awk -F, -v OFS=, -v protein="$1" -v seed="$2" -v above="$(dirname "$table")/" '
    BEGIN {srand(seed)}
    $1 == protein {$1 = above $1; printf "%.9f,%s\n", rand(), $0}' "$table" |
    sort -n | cut -d , -f 2-
}

spearman() {  # spearman WEIGHTS AND OPTIONS...: of the variants that were not drawn
  "$PYTHON" "$here/score_mutations.py" "$@" --mutations "$FOLDER/others.csv" \
    --measured "$measured" --orders 1 --out "$FOLDER/scores.csv" 2>&1 | tee -a "$FOLDER/log" |
    awk '/^Spearman/ && !n++ {print $2}'
}

round() {     # round PROTEIN SIZE SEED: prints the two correlations
  shuffled "$1" "$3" > "$FOLDER/lines"
  [ "$(wc -l < "$FOLDER/lines")" -ge $(($2 + 10)) ] || return 0     # too few to judge by
  { head -n 1 "$table"; head -n "$2" "$FOLDER/lines"; } > "$FOLDER/drawn.csv"
  { head -n 1 "$table"; tail -n "+$(($2 + 1))" "$FOLDER/lines"; } > "$FOLDER/others.csv"
  rm -rf "$FOLDER/run"
  "$PYTHON" "$here/train_dpo_ddp.py" --config "$here/configs/dpo_own_table.yaml" \
    --train_data "$FOLDER/drawn.csv" --measured "$measured" --better higher \
    --base_model_name "$BASE" --work_dir "$FOLDER/run" >> "$FOLDER/log" 2>&1
  echo "$(spearman "$BASE" --correct_unfolded)" \
    "$(spearman "$FOLDER/run/latest_model.pt")"
}

mkdir -p "$FOLDER"
printf '| protein | variants | zero-shot | tuned |\n|---|---|---|---|\n'
for protein in $(awk -F, 'NR > 1 && !known[$1]++ {print $1}' "$table"); do
  for size in $SIZES; do
    for seed in $DRAWS; do round "$protein" "$size" "$seed"; done |
      awk -v name="$(basename "$protein") | $size" '{before += $1; after += $2}
        END {if (NR) printf "| %s | %.3f | %.3f |\n", name, before / NR, after / NR}'
  done
done
