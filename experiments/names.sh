# Names, one seed: a base, what is trained on it, and what each writes for 512 held-out beginnings.
# Four hours on one thread; half of it are the base and the left-to-right model.
# Page: results/names/README.md. Run from the root of the repository.
# For seed 1 base, paper and causal are what lies in assets/names.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}

python base.py --config configs/base.toml --seed $seed --out_dir $out/base
python base.py --config configs/base.toml --one_by_one 1 --seed $seed --out_dir $out/left_to_right
python prepare.py data/names --written_by $out/base --out $out/written

on_base="--seed $seed --init_from $out/base"
python train.py --n_last 3 $on_base --out_dir $out/paper
python train.py --config configs/causal.toml --data $out/written $on_base --out_dir $out/causal
python train.py --config configs/causal.toml --data data/names --max_iters 4000 $on_base --out_dir $out/causal_text
python -m experiments.marker --base $out/base --seed $seed --out $out/marker

measure="python -m experiments.names measure --seed $seed --out $out/records.jsonl"
$measure --system base --ckpt $out/base --way run --dial 1 0.9 0.7 0.5 0.3 0.1 0
$measure --system base --ckpt $out/base --way threshold --dial 0.9 0.7 0.5 0.3 -1
$measure --system base --ckpt $out/base --way threshold --dial 0.7 --edits 0.5
$measure --system base --ckpt $out/base --way ones
$measure --system "left to right" --ckpt $out/left_to_right --way ones
$measure --system base --ckpt $out/base --way first --dial 1 2 3 4
$measure --system paper --ckpt $out/paper --way stage_b --dial 0.7 0.3 -1 --edits none 0
$measure --system paper --ckpt $out/paper --way threshold --dial 0.7 0.3 -1 --edits none 0
$measure --system paper --ckpt $out/paper --way run --dial 1 0.9 0.7 0.5 0.3 0
$measure --system paper --ckpt $out/paper --way first --dial 1 2 3 4
$measure --system causal --ckpt $out/causal --way run --dial 0 0.1 0.2 0.3 0.5 0.7 0.8 0.9 0.95
$measure --system causal --ckpt $out/causal --way first --dial 1 2 3 4
$measure --system causal_text --ckpt $out/causal_text --way run --dial 0 0.5 0.8
$measure --system causal_text --ckpt $out/causal_text --way run --dial 0 --temperature 1 --out $out/draws.jsonl
