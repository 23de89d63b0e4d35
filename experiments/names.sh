# Every system of results/names for one seed: a base, and what is trained on it, each measured on 512 held-out names.
# Three hours on one thread. Pages: results/names/README.md, results/paper_tables/README.md.
# Run from the root of the repository. For seed 1 base, paper and alpha are what lies in assets/names.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}

# the base; the paper's training with n = 3, 1 and 6, and with more steps; alpha on top of the first
python train.py --init_from scratch --stage_a_only --seed $seed --out_dir $out/base
for n in 3 1 6; do
  python train.py --n_last $n --seed $seed --init_from $out/base --out_dir $out/paper-$n
done
python train.py --n_last 3 --max_iters 1500 --seed $seed --init_from $out/base --out_dir $out/paper-1500
python train.py --alpha 0.5 --seed $seed --init_from $out/paper-3 --out_dir $out/alpha

# who makes tokens agree: all on the base itself, 1,500 steps of 64 rows
on_base="--seed $seed --init_from $out/base"
python train.py --alpha 0.5 $on_base --out_dir $out/alpha-base
python -m beyond.opponents --alpha 0.5 $on_base --out_dir $out/stage-a
python -m beyond.opponents --chain $on_base --out_dir $out/stage-a-chain
python -m beyond.chain $on_base --out_dir $out/chain
python -m beyond.head train $on_base --out_dir $out/head

# K = 2 and 3
python train.py --alpha 0.5 --n_rounds 2 $on_base --out_dir $out/alpha-k2
python train.py --alpha 0.5 --n_rounds 3 $on_base --out_dir $out/alpha-k3

SEED=$seed OUT=$out bash experiments/names_measure.sh
for adapter in paper-3 alpha; do
  python -m llada.ablation --ckpt $out/$adapter --prompts 512
done
