# Every system of results/names on 512 held-out beginnings, a record a line: names_measure.sh BASE PAPER ALPHA RECORDS
set -e
base=$1
paper=$2
alpha=$3
gates="1 0.9 0.7 0.5 0.3 -1"
python -m beyond.evidence measure --out $4 --system base $base --way threshold --dial $gates --tau_t2t none 0.5 0
python -m beyond.evidence measure --out $4 --system base $base --way end_last --dial $gates
python -m beyond.evidence measure --out $4 --system base $base --way random --dial 0.7 0.3
python -m beyond.evidence measure --out $4 --system base $base --way left
python -m beyond.evidence measure --out $4 --system base $base --way left_ones
python -m beyond.evidence measure --out $4 --system paper $paper --way stage_b --dial $gates --tau_t2t none 0
python -m beyond.evidence measure --out $4 --system paper $paper --way threshold --dial $gates --tau_t2t none 0
python -m beyond.evidence measure --out $4 --system alpha $alpha --way stage_b --dial $gates --tau_t2t none 0
python -m beyond.evidence measure --out $4 --system alpha $alpha --way refusing --dial 0.1 0.3 0.5 0.7
# with the folder of `python -m beyond.opponents stage_a --alpha 0.5 --init_from BASE --seed 1`
if [ -n "$5" ]; then
  python -m beyond.evidence measure --out $4 --system "Stage A by alpha" $5 --way threshold --dial $gates
fi
for mark in marker_elsewhere marker_none marker_half; do
  python -m beyond.evidence measure --out $4 --system alpha $alpha --way $mark --dial 0.3 -1
  python -m beyond.evidence measure --out $4 --system paper $paper --way $mark --dial 0.3 -1
done
