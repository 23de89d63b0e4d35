# Names, one seed: a base, what is trained on it, and what each writes for 512 held-out beginnings.
# Four hours on one thread; half of it are the base and the left-to-right model.
# Page: results/names/README.md. Run from the root of the repository.
# For seed 1 base, paper and causal are what lies in assets/names.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}

python base.py --config configs/base.toml --seed $seed --out_dir $out/base
python base.py --config configs/base.toml --one_by_one 1 --seed $seed --out_dir $out/left_to_right
python base.py --config configs/base.toml --one_by_one 1 --max_iters 1000 --seed $seed --out_dir $out/left_to_right_1000
python prepare.py data/names --written_by $out/base --out $out/written

on_base="--seed $seed --init_from $out/base"
python train.py --n_last 3 $on_base --out_dir $out/paper
python train.py --config configs/alpha.toml $on_base --out_dir $out/alpha
python train.py --config configs/causal.toml --data $out/written $on_base --out_dir $out/causal
# the same but for the token before; and both, taught the text itself: three seeds of these on the base of seed 1
python train.py --config configs/causal.toml --no-causal --data $out/written $on_base --out_dir $out/told
python train.py --config configs/causal.toml --data data/names --max_iters 4000 $on_base --out_dir $out/causal_text
python train.py --config configs/causal.toml --no-causal --data data/names --max_iters 4000 $on_base --out_dir $out/told_text

measure="python -m experiments.names measure --seed $seed --out $out/records.jsonl"
$measure --system base --ckpt $out/base --way run --dial 1 0.9 0.7 0.5 0.3 0.1 0
$measure --system base --ckpt $out/base --way threshold --dial 0.9 0.7 0.5 0.3 -1
$measure --system base --ckpt $out/base --way threshold --dial 0.7 --edits 0.5
$measure --system base --ckpt $out/base --way ones
$measure --system "left to right" --ckpt $out/left_to_right --way ones
$measure --system "left to right, 1,000 steps" --ckpt $out/left_to_right_1000 --way ones
$measure --system base --ckpt $out/base --way first --dial 1 2 3 4
$measure --system paper --ckpt $out/paper --way stage_b --dial 0.7 0.3 -1 --edits none 0
$measure --system paper --ckpt $out/paper --way threshold --dial 0.7 0.3 -1 --edits none 0
$measure --system paper --ckpt $out/paper --way run --dial 1 0.9 0.7 0.5 0.3 0
$measure --system paper --ckpt $out/paper --way first --dial 1 2 3 4
$measure --system alpha --ckpt $out/alpha --way stage_b --dial 0.9 0.7 0.5 0.3 -1
$measure --system alpha --ckpt $out/alpha --way run --dial 0.9 0.7 0.5 0.3 0.1 0
$measure --system alpha --ckpt $out/alpha --way first --dial 1 2 3 4
$measure --system causal --ckpt $out/causal --way run --dial 0 0.1 0.2 0.3 0.5 0.7 0.8 0.9 0.95
$measure --system causal --ckpt $out/causal --way first --dial 1 2 3 4
$measure --system causal --ckpt $out/causal --way stage_b --dial 0.7 0.3 -1
$measure --system told --ckpt $out/told --way run --dial 0 0.5 0.8
$measure --system told --ckpt $out/told --way first --dial 1 2 4
$measure --system causal_text --ckpt $out/causal_text --way run --dial 0 0.5 0.8
$measure --system told_text --ckpt $out/told_text --way run --dial 0 0.5 0.8
$measure --system causal_text --ckpt $out/causal_text --way run --dial 0 --temperature 1 --out $out/draws.jsonl
$measure --system told_text --ckpt $out/told_text --way run --dial 0 --temperature 1 --out $out/draws.jsonl
