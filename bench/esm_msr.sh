#!/bin/bash
# A table of docs/stability.md: ProteinMPNN on the split of Megascale that ESM-MSR was published
# with (97 training and 112 test domains), as far as a table has its domains.
#   bash bench/esm_msr.sh megascale.csv
#   FOLDER=runs/mine bash bench/esm_msr.sh ...
# Prints how many of the domains the table has, then Spearman over all mutations of the test
# domains, and as mean of domains: of the base weights, of one weight, of the mean of three. The
# table begins with the columns pdb_file,chain,mutation,ddg; names of structures begin with the PDB
# code. The codes below are those domains of the split that EvoStability selected too (39 and 47).
# Domains of both sides may be relatives: the split is kept as it was published. FOLDER keeps
# tables, runs, logs and scores. Six minutes on one core.
set -euo pipefail
unset CDPATH

PYTHON=${PYTHON:-python}
FOLDER=${FOLDER:-runs/esm_msr}
train="1aoy 1f0m 1gyz 1ify 1k1v 1pv0 1qp2 1r69 1ufm 1v1c 1wcl 2d1u 2hdz 2jn4 2jvd 2jz2 2k28 2k5p
  2kfv 2kvt 2kvv 2kwh 2l09 2l6q 2ldm 2lqk 2m2j 2m8e 2ma4 2mi6 2mky 2och 2ru9 3dkm 3l1x 3v1a 4c26
  5jrt 6acv"
test="1gjs 1gl5 1h92 1lp1 1o6x 1orc 1qly 1srm 1tg0 1tuc 1tud 1uzc 1w4g 1y0m 1yu5 1zlm 2ami 2b88
  2btt 2hbb 2jws 2k2a 2k5n 2kcm 2kgt 2kr3 2l3x 2lp5 2m0y 2m5a 2m8j 2m8u 2mwa 2o2w 2op7 2rrt 2wxc
  2ysb 2ysf 3i35 4hck 4uzw 5aht 5ubs 5vnt 6nmw 7jjk"
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

select_domains() {    # select_domains TABLE NAME CODES: makes FOLDER/NAME.csv, prints how many
  awk -F, -v OFS=, -v codes="${3//$'\n'/ }" -v out="$FOLDER/$2.csv" \
      -v above="$(dirname "$(realpath "$1")")/" '
    BEGIN {split(codes, list, " "); for (i in list) wanted[list[i]]}
    NR == 1 {print > out; next}
    {code = tolower($1); sub(".*/", "", code); sub("[._].*", "", code)}
    code in wanted {seen[code]; $1 = above $1; print > out}
    END {for (code in seen) number++; print number + 0}' "$1"
}

spearman() {          # spearman NAME WEIGHTS AND OPTIONS...: prints a row of the table
  "$PYTHON" "$here/score_mutations.py" "${@:2}" --mutations "$FOLDER/test.csv" --measured ddg \
    --lower_is_better --orders 1 --out "$FOLDER/scores.csv" 2>&1 | tee -a "$FOLDER/scores.log" |
    awk -v name="$1" '/^Spearman/ {row = row " | " $2} END {print "| " name row " |"}'
}

mkdir -p "$FOLDER"
number_train=$(select_domains "$1" train "$train")
number_test=$(select_domains "$1" test "$test")
echo "trained on $number_train of 97 domains, tested on $number_test of 112:"
printf '| weights | all mutations | mean of domains |\n|---|---|---|\n'
spearman "v_48_020" v_48_020 --correct_unfolded
env FOLDER="$FOLDER/weights" bash "$here/jobs/three_weights.sh" --train_data "$FOLDER/train.csv" \
  > "$FOLDER/train.log" 2>&1
spearman "one, trained" "$FOLDER/weights/v_48_020/latest_model.pt"
spearman "three, trained" "$FOLDER/weights/v_48_020/latest_model.pt" \
  --also "$FOLDER/weights/v_48_010/latest_model.pt" \
  --also "$FOLDER/weights/v_48_030/latest_model.pt"
