# What names.sh has trained for one seed, on 512 held-out beginnings; systems that are not there yet are passed over.
# Records: $OUT/records.jsonl; nothing is measured twice. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}
gates="1 0.9 0.7 0.5 0.3 -1"

# measure SYSTEM FOLDER WAY and flags
measure() {
  if [ ! -e "$out/$2/config.json" ] && [ ! -e "$out/$2/adapter.json" ]; then return; fi
  python -m beyond.evidence measure --system "$1" --ckpt "$out/$2" --seed $seed --out $out/records.jsonl --way "${@:3}"
}

measure base base threshold --dial $gates --tau_t2t none 0.5 0
measure base base end_last --dial $gates
measure base base left
measure base base left_ones
for n in 3 1 6; do
  measure "paper, n = $n" paper-$n stage_b --dial 0.7 0.3 -1 --tau_t2t none 0.5 0
  measure "paper, n = $n" paper-$n threshold --dial 0.7 0.3 -1 --tau_t2t none 0.5 0
done
measure alpha alpha stage_b --dial $gates --tau_t2t none 0
measure "alpha on the base" alpha-base stage_b --dial $gates --tau_t2t none 0
measure "Stage A by alpha" stage-a threshold --dial $gates --tau_t2t none 0
measure chain chain stage_b --dial $gates --tau_t2t none 0
measure head head head --dial 0 0.2 0.5 0.8 0.95
measure "alpha, K = 2" alpha-k2 stage_b --dial $gates
measure "alpha, K = 3" alpha-k3 stage_b --dial $gates
