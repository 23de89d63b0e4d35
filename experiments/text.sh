# Shakespeare, one seed: a base; on it causal Stage B (3,000 steps, and its config's own 800) and the paper's Stage B; a
# base that learns for as long as base and causal Stage B together; and a left-to-right model of the base's size and
# steps. Then their bits a byte, and forwards and time of their draws.
# One to two hours on one thread. Page: results/text/README.md. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/text-$seed}
text="--data data/shakespeare --seed $seed"
base="python base.py $text --config configs/text_base.toml"
train="python train.py $text --init_from $out/base"

$base --max_iters 2000 --out_dir $out/base
$base --max_iters 3500 --out_dir $out/base_3500
$base --max_iters 2000 --block_length 1 --one_by_one 1 --out_dir $out/left
$train --config configs/text.toml --max_iters 3000 --out_dir $out/causal
$train --config configs/text.toml --out_dir $out/short
$train --seq_len 256 --batch_size 4 --out_dir $out/paper
for system in base paper short causal base_3500 left; do
  python -m experiments.measure bits --ckpt $out/$system --seed $seed --out $out/bits.jsonl
done
for system in base paper causal left; do
  python -m experiments.measure draws --ckpt $out/$system --seed $seed --out $out/draws.jsonl
done
