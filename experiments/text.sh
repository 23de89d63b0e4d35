# Shakespeare, one seed: a base; on it causal Stage B (3,000 steps, and its config's own 800) and the paper's Stage B; a
# base that learns for as long as base and causal Stage B together; and a left-to-right model of the base's size and
# steps. Then their bits a byte, and forwards and time of their draws.
# One to two hours on one thread. Page: results/text/README.md. Run from the root of the repository.
set -e
seed=${SEED:-1}
out=${OUT:-out/text-$seed}
text="--data data/shakespeare --seed $seed"
base="--config configs/text_base.toml"
causal="--config configs/text.toml --init_from $out/base"

python base.py $text $base --max_iters 2000 --out_dir $out/base
python base.py $text $base --max_iters 3500 --out_dir $out/longer
python base.py $text $base --max_iters 2000 --block_length 1 --one_by_one 1 --out_dir $out/left
python train.py $text $causal --max_iters 3000 --out_dir $out/causal
python train.py $text $causal --out_dir $out/short
python train.py $text --init_from $out/base --seq_len 256 --batch_size 4 --out_dir $out/paper

bits="--seed $seed --out $out/bits.jsonl"
python -m experiments.measure bits --ckpt $out/base --system "base of 2,000 steps" $bits
python -m experiments.measure bits --ckpt $out/paper --system "paper, 300 steps" $bits
python -m experiments.measure bits --ckpt $out/short --system "causal, 800 steps" $bits
python -m experiments.measure bits --ckpt $out/causal --system "causal, 3,000 steps" $bits
python -m experiments.measure bits --ckpt $out/longer --system "base of 3,500 steps" $bits
python -m experiments.measure bits --ckpt $out/left --system "left-to-right model" $bits

draws="--seed $seed --out $out/draws.jsonl"
python -m experiments.measure draws --ckpt $out/base --system base $draws
python -m experiments.measure draws --ckpt $out/paper --system paper $draws
python -m experiments.measure draws --ckpt $out/causal --system causal $draws
python -m experiments.measure draws --ckpt $out/left --system "left-to-right model" $draws
