# Names, one seed: a base, a left-to-right model, the paper's adapter, causal Stage B, and what each writes for all
# held-out beginnings.
# Two to three hours on one thread. Page: results/names/README.md. Run from the root of the repository.
# With seed 1 the base is the one in assets/names, whose adapter in assets/names/paper has seed 0.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}
python base.py --config configs/base.toml --seed $seed --out_dir $out/base
python base.py --config configs/base.toml --one_by_one 1 --seed $seed --out_dir $out/left
python train.py --n_last 3 --seed $seed --init_from $out/base --out_dir $out/paper
python train.py --config configs/text.toml --data data/names --seq_len 32 --batch_size 64 --max_iters 3000 \
    --seed $seed --init_from $out/base --out_dir $out/causal

names="--seed $seed --out $out/names.jsonl"
python -m experiments.measure names --ckpt $out/base --system base $names
python -m experiments.measure names --ckpt $out/left --system "left-to-right model" $names
python -m experiments.measure names --ckpt $out/paper --system paper $names
python -m experiments.measure controls --ckpt $out/paper --system draft --seed $seed --out $out/controls.jsonl
python -m experiments.measure names --ckpt $out/causal --system causal $names
for system in base paper causal; do
  python -m experiments.measure bits --ckpt $out/$system --system $system --seed $seed --out $out/bits.jsonl
done
python -m released.ablation --ckpt $out/paper --prompts 832
