# The paper's Tables 2 and 3 on the toy `modes`: a base, then adapters with the paper's clean target at n = 1, 2, 3.
# About 5 minutes on 2 cores. Page: results/paper_tables/README.md. Run from the root of the repository.
set -e
python train.py --data modes --stage_a_only --out_dir out/base
for n in 1 2 3; do
  python train.py --data modes --init_from out/base --n_last $n --learning_rate 1e-3 --max_iters 500 --out_dir out/n$n
  python evaluate.py --ckpt out/n$n
done
python -m llada.ablation --ckpt out/n2
