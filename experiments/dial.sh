# Seven noisy copies from independent to certain: each decoder's error against total correlation.
# About 10 minutes on 2 cores. Page: results/theorem/README.md.
# Run from the root of the repository.
set -e
for eps in 0.02 0.05 0.1 0.2 0.4 0.7 1.0; do
  python train.py --data copy --toy eps=$eps n_ctx=8 --n_last 2 --corruption mask --max_iters 800 --batch_size 64 \
    --eval_interval 50 --out_dir out/dial-$eps
  python evaluate.py --ckpt out/dial-$eps
done
