# Shakespeare, one seed: a base; on it causal Stage B and the paper's Stage B; a base that learns for longer; and
# left-to-right models of two, three and six layers. Then their bits a byte, and forwards and time of their draws.
# One to two hours on one thread. Page: results/text/README.md. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/text-$seed}
text="--data data/shakespeare --seed $seed"
base="--config configs/text_base.toml"
left="$base --max_iters 2000 --block_length 1 --one_by_one 1"

python base.py $text $base --max_iters 2000 --out_dir $out/base
python base.py $text $base --max_iters 3500 --out_dir $out/longer
python base.py $text $left --out_dir $out/left6
python base.py $text $left --preset text_small --n_last 1 --out_dir $out/left3
python base.py $text $left --preset text_two --n_last 1 --out_dir $out/left2
python train.py $text --config configs/text.toml --init_from $out/base --max_iters 3000 --out_dir $out/causal
python train.py $text --init_from $out/base --seq_len 256 --batch_size 4 --out_dir $out/paper

bits="--seed $seed --out $out/bits.jsonl"
draws="--seed $seed --out $out/draws.jsonl"
for system in "base:base, 2,000 steps" "paper:paper, 300 steps" "causal:causal, 3,000 steps" \
    "longer:base, 3,500 steps" "left2:left-to-right, 2 layers" "left3:left-to-right, 3 layers" \
    "left6:left-to-right, 6 layers"; do
  python -m experiments.measure bits --ckpt $out/${system%%:*} --system "${system#*:}" $bits
  python -m experiments.measure draws --ckpt $out/${system%%:*} --system "${system#*:}" $draws
done
