#!/bin/bash
# The table of docs/stability.md: ProteinMPNN trained on Megascale, with three seeds, and from three
# published weights, of which scores are means.
#   bash bench/stability.sh megascale.csv s2648.csv proteingym.csv 5L33.pdb 6MRR.pdb
#   SEEDS=0 FOLDER=runs/mine bash bench/stability.sh ...
# Prints Spearman over all mutations and as mean of proteins, for the proteins that are held out,
# and for all assays; then how likely the native sequence of each structure is, and what 16 designs
# keep of it. About an hour on one core. `python -m bench tables` makes the first two tables. Held
# out are the PDB codes below: the families of both tables that a hash drew (30 % identity). The
# tables begin with the columns pdb_file,chain,mutation,ddg, and names of structures with the code;
# that of the assays has a column fitness. FOLDER keeps runs, logs and scores.
set -euo pipefail
unset CDPATH

PYTHON=${PYTHON:-python}
SEEDS=${SEEDS:-0 1 2}
FOLDER=${FOLDER:-runs/stability}
held_out="1aep 1c9o 1cse 1csp 1csq 1f0m 1gl5 1h7m 1h92 1hti 1iro 1kfw 1lbi 1mbg 1mjc 1oia 1qly 1rg8
  1s1n 1sak 1shf 1shg 1srm 1ten 1tg0 1tuc 1tud 1vqb 1wit 1zlm 2a36 2abd 2btt 2ci2 2dri 2j6k 2jwt
  2k5n 2kcm 2kfv 2kgt 2kr3 2l7m 2l9r 2ldm 2lss 2lxk 2lyr 2lzm 2m0c 2mky 2mwa 2o2w 2rn2 3ssi 3v1a
  4hck 5cro 5z2s 6nmw"
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
assays=$3
structures=("${@:4}")

split() {     # split TABLE NAME: makes FOLDER/NAME_held_out.csv and FOLDER/NAME_rest.csv
  awk -F, -v OFS=, -v codes="${held_out//$'\n'/ }" -v above="$(dirname "$(realpath "$1")")/" \
      -v name="$FOLDER/$2" '
    {code = $1; sub(".*/", "", code); sub("[._].*", "", code)}
    {side = index(" " codes " ", " " code " ") ? "held_out" : "rest"}
    NR == 1 {print > (name "_held_out.csv"); side = "rest"}
    NR > 1 {$1 = above $1}
    {print > (name "_" side ".csv")}' "$1"
}

train() {     # train NAME SEED BASE: makes FOLDER/NAME
  "$PYTHON" "$here/train_dpo_ddp.py" --config "$here/configs/dpo_stability.yaml" \
    --train_data "$FOLDER/megascale_rest.csv" --val_data "$FOLDER/megascale_held_out.csv" \
    --base_model_name "$3" --work_dir "$FOLDER/$1" "training.seed=$2" > "$FOLDER/$1.log" 2>&1
}

spearman() {  # spearman TABLE COLUMN ORDERS WEIGHTS AND OPTIONS...
  "$PYTHON" "$here/score_mutations.py" "${@:4}" --mutations "$1" --measured "$2" --orders "$3" \
    --out "$FOLDER/scores.csv" 2>&1 | tee -a "$FOLDER/scores.log" |
    awk '/^Spearman/ {print $2}' | paste -s -d ';'
}

row() {       # row NAME WEIGHTS AND OPTIONS...
  echo "| $1 | $(spearman "$FOLDER/megascale_held_out.csv" ddg 1 --lower_is_better "${@:2}")" \
    "| $(spearman "$FOLDER/s2648_held_out.csv" ddg 4 --lower_is_better "${@:2}")" \
    "| $(spearman "$assays" fitness 1 "${@:2}") |"
}

designs() {   # designs NAME WEIGHTS: adds to FOLDER/designs.txt
  [ ${#structures[@]} != 0 ] || return 0
  "$PYTHON" "$here/sample_proteinmpnn.py" "$2" "${structures[@]}" --num 16 2>&1 |
    sed -n -e "s/^.*: mean of/$1, &/p" \
      -e "s/^>\(.*, score=[0-9.]*\), .*designed_chains.*/$1, native \1/p" >> "$FOLDER/designs.txt"
}

mkdir -p "$FOLDER"
: > "$FOLDER/designs.txt"
split "$1" megascale
split "$2" s2648
printf '| trained on Megascale | domains | S2648 | assays |\n|---|---|---|---|\n'
row no v_48_020 --correct_unfolded
designs no v_48_020
for seed in $SEEDS; do
  train "seed_$seed" "$seed" v_48_020
  row "seed $seed" "$FOLDER/seed_$seed/latest_model.pt"
  designs "seed $seed" "$FOLDER/seed_$seed/latest_model.pt"
done
for base in v_48_010 v_48_030; do
  train "from_$base" 0 $base
done
row "three weights" "$FOLDER/seed_${SEEDS%% *}/latest_model.pt" \
  --also "$FOLDER/from_v_48_010/latest_model.pt" --also "$FOLDER/from_v_48_030/latest_model.pt"
cat "$FOLDER/designs.txt"
