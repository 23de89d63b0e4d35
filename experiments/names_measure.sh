# What names.sh has trained for one seed, on 512 held-out beginnings. Records: $OUT/records.jsonl; nothing is measured
# twice. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}
measure="python -m beyond.evidence measure --seed $seed --out $out/records.jsonl"
gates="1 0.9 0.7 0.5 0.3 -1"

$measure --system base --ckpt $out/base --way threshold --dial $gates --tau_t2t none 0.5 0
$measure --system base --ckpt $out/base --way end_last --dial $gates
$measure --system base --ckpt $out/base --way left
$measure --system base --ckpt $out/base --way left_ones
for system in paper-3 paper-1500; do
  for way in stage_b threshold; do
    $measure --system $system --ckpt $out/$system --way $way --dial 0.7 0.3 -1 --tau_t2t none 0
  done
done
for n in 1 6; do
  paper="--system paper-$n --ckpt $out/paper-$n"
  $measure $paper --way stage_b --dial 0.7 --tau_t2t 0.5 0
  $measure $paper --way threshold --dial 0.7 --tau_t2t 0.5 0
done
$measure --system alpha --ckpt $out/alpha --way stage_b --dial $gates --tau_t2t none 0
$measure --system alpha-base --ckpt $out/alpha-base --way stage_b --dial $gates
$measure --system alpha-base --ckpt $out/alpha-base --way refusing --dial 0.3 0.5 0.8
$measure --system stage-a --ckpt $out/stage-a --way threshold --dial $gates
$measure --system stage-a-chain --ckpt $out/stage-a-chain --way threshold --dial $gates
$measure --system chain --ckpt $out/chain --way stage_b --dial $gates
$measure --system chain --ckpt $out/chain --way refusing --dial 0.3 0.5 0.8
$measure --system head --ckpt $out/head --way head --dial 0 0.2 0.5 0.8 0.95
$measure --system alpha-k2 --ckpt $out/alpha-k2 --way stage_b --dial $gates
$measure --system alpha-k3 --ckpt $out/alpha-k3 --way stage_b --dial $gates
